"""ms-swift's built-in rewards: what each comes to in a recipe, and those that Tandem's own would score otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.rewards.base import Reward
from tandem.rewards.overlong import Overlong
from tandem.types import Json, Rollout
from tandem_compat.table import Reader

NAMES = ("accuracy", "format", "cosine", "repetition", "soft_overlong")
"""By which ``reward_funcs`` knows them."""

_TAGGED = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class SwiftFormat(Reward):
    """1 for a thought in think tags, then an answer in answer tags, and nothing before or after, be it a space."""

    def __call__(self, rollout: Rollout) -> float:
        return float(_TAGGED.fullmatch(rollout.final_message) is not None)


@dataclass(frozen=True, kw_only=True)
class SwiftSoftOverlong(Overlong):
    """0 up to ``max_tokens - cache`` tokens, then a straight line through -1 at ``max_tokens`` that goes on beyond."""

    def __call__(self, rollout: Rollout) -> float:
        return -max(0.0, (rollout.num_tokens - (self.max_tokens - self.cache)) / self.cache)


def built_in(name: str, args: Reader) -> dict[str, Json]:
    """Kind and options of the built-in reward of that name; ``scale`` multiplies its weight."""
    longest = args["max_completion_length"]
    match name:
        case "accuracy":
            return {"kind": "math_verify"}
        case "format":
            return {"kind": f"{__name__}:SwiftFormat"}
        case "cosine":
            return {
                "kind": "cosine_length",
                "accuracy": "math_verify",
                "max_tokens": args["cosine_max_len"] or longest,
                "right_short": args["cosine_min_len_value_correct"],
                "right_long": args["cosine_max_len_value_correct"],
                "wrong_short": args["cosine_min_len_value_wrong"],
                "wrong_long": args["cosine_max_len_value_wrong"],
            }
        case "repetition":
            return {"kind": "repetition", "ngram": args["repetition_n_grams"],
                    "scale": -args["repetition_max_penalty"]}  # fmt: skip
        case _:
            most = args["soft_max_length"] or longest
            return {"kind": f"{__name__}:SwiftSoftOverlong", "max_tokens": most, "cache": args["soft_cache_length"]}
