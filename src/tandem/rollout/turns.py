"""One sampled turn of a conversation, and which sampling options it records.

Training computes the logprob of each token as it was sampled. A turn records its temperature; what else changes the
distribution is taken from the recipe. A request or an environment that samples otherwise is refused: its logprobs and
the trainer's would differ, and nothing would tell.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from tandem.engines.base import Sampler
from tandem.observability import waits
from tandem.types import Json, Sampling, Turn

COLDEST = 0.01
"""Least temperature; engines take a lower one for greedy, or for this one."""
OF_THE_RUN = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
"""Fields of ``Sampling`` that a turn does not record."""

last_completion: WeakKeyDictionary[Sampler, float] = WeakKeyDictionary()
"""When each engine last completed any prompt, on the monotonic clock."""


async def sample_turn(engine: Sampler, prompt: Sequence[int], sampling: Sampling, stream: str) -> Turn:
    """Sample a completion of a prompt.

    Args:
        engine: samples.
        prompt: token ids.
        sampling: how.
        stream: names the random stream: the same name draws the same tokens.
    """
    key = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "big")
    request = engine.generate(prompt, sampling, key)
    completion = await waits.wait(request, owner=waits.actor("rollouts"), reason="an answer", on="engine")
    waits.progress()
    last_completion[engine] = time.monotonic()
    return Turn(prompt=tuple(prompt), completion=completion, temperature=sampling.temperature or 1.0)


def unrecorded_options(sampling: Sampling) -> dict[str, Json]:
    """The options that a turn does not record, for a trainer that compares them with its own."""
    return {name: getattr(sampling, name) for name in OF_THE_RUN}


def differing(sampling: Sampling, options: Mapping[str, Json]) -> str | None:
    """The first of ``OF_THE_RUN`` that is among the options and differs from ``sampling``; None: there is none.

    A value that is no number is no option; -1 is vLLM's word for a top_k that is off.
    """
    for name in OF_THE_RUN:
        value = options.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name == "top_k":
            value = max(0, value)
        if not math.isclose(value, getattr(sampling, name), rel_tol=1e-9):
            return name
    return None


def untrainable_option(sampling: Sampling, requested: Sampling) -> str | None:
    """The first option of a sampling by which its logprobs would not be those that training computes, if there is one.

    ``sampling`` is the run's: what a turn records, and what only ends an answer, may be another.
    """
    if requested.temperature < COLDEST and requested.temperature != sampling.temperature:
        return "temperature"
    return differing(sampling, unrecorded_options(requested))
