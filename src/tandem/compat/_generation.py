"""Every field of vLLM's SamplingParams, as generation options of other systems name them, and what it is here.

What changes the distribution that tokens are drawn from must be in the logprobs that the trainer computes. Where it is,
the field is an option of ``sampling``; where it is not, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.registry import did_you_mean
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field. Of the three texts exactly one is there."""

    becomes: str = ""
    """Option of ``sampling`` that it is."""
    idle: str = ""
    """Why it changes nothing."""
    refused: str = ""
    """Why it is refused."""


def _is(option: str) -> Field:
    return Field(becomes=option)


def _idle(why: str) -> Field:
    return Field(idle=why)


def _no(why: str) -> Field:
    return Field(refused=why)


_ASKED = "Tandem asks for the logprobs that it needs"
_TEXT = "token ids are trained on, and text is made of them by the tokenizer"
_BACK = "it changes how an answer comes back, not what it is"
_UNSEEN = "it changes probabilities by what the trainer does not see, so they would be missing in the logprobs"

GRAMMAR = (
    "what a grammar forces has probability 1 and teaches nothing, and the trainer would have to know which tokens the "
    "engine's grammar allowed at each place; of a regular expression sampling.regex can be had, else reward the form "
    "(rewards: format, with pattern or tags)"
)

FIELDS: Mapping[str, Field] = {
    "temperature": _is("temperature"),
    "top_p": _is("top_p"),
    "top_k": _is("top_k"),
    "min_p": _is("min_p"),
    "repetition_penalty": _is("repetition_penalty"),
    "presence_penalty": _is("presence_penalty"),
    "frequency_penalty": _is("frequency_penalty"),
    "min_tokens": _is("min_tokens"),
    "max_tokens": _is("max_tokens"),
    "stop": _is("stop"),
    "stop_token_ids": _is("stop_token_ids"),
    "seed": _idle("every answer has a random stream of its own, which the run's seed fixes"),
    "logprobs": _idle(_ASKED),
    "prompt_logprobs": _idle(_ASKED),
    "prompt_logprob_token_ids": _idle(_ASKED),
    "prompt_logprob_start": _idle(_ASKED),
    "logprob_token_ids": _idle(_ASKED),
    "flat_logprobs": _idle(_ASKED),
    "detokenize": _idle(_TEXT),
    "skip_special_tokens": _idle(_TEXT),
    "spaces_between_special_tokens": _idle(_TEXT),
    "include_stop_str_in_output": _idle("a stop text stays in an answer, since it was sampled"),
    "output_kind": _idle(_BACK),
    "stream_interval": _idle(_BACK),
    "skip_clone": _idle(_BACK),
    "routed_experts_prompt_start": _idle(_BACK),
    "skip_reading_prefix_cache": _idle("it decides what is computed anew, not what is sampled"),
    "n": _no("how many answers a task gets is the size of a group"),
    "ignore_eos": _no("what goes on after its end token is no turn of a conversation; min_tokens makes answers longer"),
    "logit_bias": _no(_UNSEEN),
    "allowed_token_ids": _no(_UNSEEN),
    "bad_words": _no(f"{_UNSEEN}; punish words by a reward"),
    "structured_outputs": _no(GRAMMAR),
    "guided_decoding": _no(GRAMMAR),
    "thinking_token_budget": _no(f"it forces the end of a thought; {_UNSEEN}"),
    "trace_decode_token_ids": _no("it forces tokens that the policy did not choose"),
    "repetition_detection": _no("it ends answers by a rule of vLLM alone; punish repetition, or set a penalty"),
    "watermarking": _no(_UNSEEN),
    "extra_args": _no("what a plug-in of the engine does with them, the trainer cannot know"),
}  # fmt: skip
"""By name, as of vLLM 0.26 to 0.32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What given fields come to."""

    sampling: Mapping[str, Json]
    """Options of ``sampling``."""
    notes: tuple[str, ...]
    """Of what changes nothing."""
    wrong: tuple[str, ...]
    """Of what is refused."""


def translated(given: Mapping[str, Json]) -> Found:
    """Options of ``sampling`` that given fields are; a field that is null is left out."""
    sampling: dict[str, Json] = {}
    notes: list[str] = []
    wrong: list[str] = []
    for name, value in given.items():
        field = FIELDS.get(name)
        if field is None:
            wrong.append(f"{name} is no field of vLLM's SamplingParams{did_you_mean(name, FIELDS)}")
        elif value is None:
            continue
        elif field.refused:
            wrong.append(f"{name}: {field.refused}")
        elif field.idle:
            notes.append(f"{name} changes nothing: {field.idle}")
        else:
            sampling[field.becomes] = _plain(name, value)
    return Found(sampling=sampling, notes=tuple(notes), wrong=tuple(wrong))


def _plain(name: str, value: Json) -> Json:
    """A value as ``sampling`` has it: vLLM takes one stop text for a list, and top_k -1 for off."""
    if name == "stop" and isinstance(value, str):
        return [value]
    return max(0, value) if name == "top_k" and isinstance(value, int) else value
