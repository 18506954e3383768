"""Every field of vLLM's SamplingParams, as generation options of other systems name them, and what it is here.

What changes the distribution that tokens are drawn from must be in the logprobs that the trainer computes. Where it is,
the field is an option of ``sampling``; where it is not, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.registry import did_you_mean
from tandem.types import Json
from tandem_compat.table import ForeignOption, becomes, by_name, idle, refused

_LOGPROBS = "Tandem asks for the logprobs that it needs"
_TEXT = "token ids are trained on, and text is made of them by the tokenizer"
_BACK = "it changes how an answer comes back, not what it is"
_UNSEEN = "it changes probabilities by what the trainer does not see, so they would be missing in the logprobs"

GRAMMAR = (
    "what a grammar forces has probability 1 and teaches nothing, and the trainer would have to know which tokens the "
    "engine's grammar allowed at each place; of a regular expression sampling.regex can be had, else reward the form "
    "(rewards: format, with pattern or tags)"
)

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "max_tokens",
    "stop",
    "stop_token_ids",
)
"""Fields that options of ``sampling`` are named after."""

FIELDS: Mapping[str, ForeignOption] = by_name(
    *(becomes(name, "anything", name) for name in _SAME),
    idle("seed", "anything", "every answer has a random stream of its own, which the run's seed fixes"),
    idle("logprobs", "anything", _LOGPROBS),
    idle("prompt_logprobs", "anything", _LOGPROBS),
    idle("prompt_logprob_token_ids", "anything", _LOGPROBS),
    idle("prompt_logprob_start", "anything", _LOGPROBS),
    idle("logprob_token_ids", "anything", _LOGPROBS),
    idle("flat_logprobs", "anything", _LOGPROBS),
    idle("detokenize", "anything", _TEXT),
    idle("skip_special_tokens", "anything", _TEXT),
    idle("spaces_between_special_tokens", "anything", _TEXT),
    idle("include_stop_str_in_output", "anything", "a stop text stays in an answer, since it was sampled"),
    idle("output_kind", "anything", _BACK),
    idle("stream_interval", "anything", _BACK),
    idle("skip_clone", "anything", _BACK),
    idle("routed_experts_prompt_start", "anything", _BACK),
    idle("skip_reading_prefix_cache", "anything", "it decides what is computed anew, not what is sampled"),
    refused("n", "anything", "how many answers a task gets is the size of a group"),
    refused("ignore_eos", "anything", "what goes on after its end token is no turn of a conversation; min_tokens makes "
        "answers longer"),
    refused("logit_bias", "anything", _UNSEEN),
    refused("allowed_token_ids", "anything", _UNSEEN),
    refused("bad_words", "anything", f"{_UNSEEN}; punish words by a reward"),
    refused("structured_outputs", "anything", GRAMMAR),
    refused("guided_decoding", "anything", GRAMMAR),
    refused("thinking_token_budget", "anything", f"it forces the end of a thought; {_UNSEEN}"),
    refused("trace_decode_token_ids", "anything", "it forces tokens that the policy did not choose"),
    refused("repetition_detection", "anything", "it ends answers by a rule of vLLM alone; punish repetition, "
        "or set a penalty"),
    refused("watermarking", "anything", _UNSEEN),
    refused("extra_args", "anything", "what a plug-in of the engine does with them, the trainer cannot know"),
)  # fmt: skip
"""By name, as of vLLM 0.26 to 0.32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options that foreign fields translate to."""

    sampling: Mapping[str, Json]
    """Options of ``sampling``."""
    notes: tuple[str, ...]
    """Of what changes nothing."""
    wrong: tuple[str, ...]
    """Of what is refused."""


def translated(fields: Mapping[str, Json]) -> SamplingOptions:
    """Options of ``sampling`` that given fields are; a field that is null is left out."""
    sampling: dict[str, Json] = {}
    notes: list[str] = []
    wrong: list[str] = []
    for name, value in fields.items():
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
    return SamplingOptions(sampling=sampling, notes=tuple(notes), wrong=tuple(wrong))


def _plain(name: str, value: Json) -> Json:
    """A value as ``sampling`` has it: vLLM takes one stop text for a list, and top_k -1 for off."""
    if name == "stop" and isinstance(value, str):
        return [value]
    return max(0, value) if name == "top_k" and isinstance(value, int) else value
