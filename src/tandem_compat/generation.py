"""Every field of vLLM's SamplingParams, as generation options of other systems name them, and what it is here.

What changes the distribution that tokens are drawn from must be in the logprobs that the trainer computes. Where it is,
the field is an option of ``sampling``; where it is not, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.config.registry import did_you_mean
from tandem.config.tree import Problems
from tandem.types import Json
from tandem_compat.table import ForeignOption, Reader, by_name, copied, refused, unused

_UNSEEN = "it changes probabilities by what the trainer does not see, so they would be missing in the logprobs"

GRAMMAR = "the trainer does not know which tokens a grammar allowed; write sampling.regex, or reward the form"

FIELDS: Mapping[str, ForeignOption] = by_name(
    *(copied(name, "anything", name) for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "min_tokens", "max_tokens", "stop", "stop_token_ids",
    )),
    *unused("anything",
        "seed logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs "
        "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
        "stream_interval skip_clone routed_experts_prompt_start skip_reading_prefix_cache"),
    refused("n", "anything", "how many answers a task gets is the size of a group"),
    refused("ignore_eos", "anything", "what goes on after its end token is no turn of a conversation; min_tokens makes "
        "answers longer"),
    *(refused(name, "anything", _UNSEEN)
      for name in ("logit_bias", "allowed_token_ids", "thinking_token_budget", "watermarking")),
    refused("bad_words", "anything", f"{_UNSEEN}; punish words by a reward"),
    *(refused(name, "anything", GRAMMAR) for name in ("structured_outputs", "guided_decoding")),
    refused("trace_decode_token_ids", "anything", "it forces tokens that the policy did not choose"),
    refused("repetition_detection", "anything", "it ends answers by a rule of vLLM alone; punish repetition, "
        "or set a penalty"),
    refused("extra_args", "anything", "what a plug-in of the engine does with them, the trainer cannot know"),
)  # fmt: skip
"""By name, as of vLLM 0.26 to 0.32."""


def translated(fields: Mapping[str, Json]) -> Reader:
    """What given fields come to as options of ``sampling``; a field that is null is left out."""
    reader = Reader(FIELDS, Problems())
    for name, value in fields.items():
        if name not in FIELDS:
            reader.wrong(name, f"there is no such field of vLLM's SamplingParams{did_you_mean(name, FIELDS)}")
        elif value is not None:
            reader.read(name, _plain(name, value))
    reader.settle_all({})
    return reader


def _plain(name: str, value: Json) -> Json:
    """A value as ``sampling`` has it: vLLM takes one stop text for a list, and top_k -1 for off."""
    if name == "stop" and isinstance(value, str):
        return [value]
    return max(0, value) if name == "top_k" and isinstance(value, int) else value


def put_generation(reader: Reader, prefix: str = "") -> None:
    """Set options of sampling by generation_kwargs, which come before those that have names of their own, and top_k."""
    kwargs, top_k = prefix + "generation_kwargs", prefix + "top_k"
    if reader[top_k] is not None:
        reader.put("sampling.top_k", max(0, reader[top_k]), top_k)
    translation = translated(reader[kwargs])
    for option, value in translation.recipe.items():
        reader.put(f"sampling.{option}", value, kwargs)
    for why in translation.notes:
        reader.note(kwargs, why)
    for why in translation.problems:
        reader.wrong(kwargs, why)
