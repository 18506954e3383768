"""What of a sampling is recorded with what it sampled, and what must therefore be the run's own.

Training computes the logprob of each token as it was sampled. A turn records its temperature; what else changes the
distribution is taken from the recipe. Who samples otherwise, be it an agent by a request or an environment elsewhere,
is refused: its logprobs and the trainer's would differ, and nothing would tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tandem.types import Json, Sampling

COLDEST = 0.01
"""Least temperature; engines take a lower one for greedy, or for this one."""
OF_THE_RUN = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"
)  # fmt: skip
"""Fields of ``Sampling`` that a recorded turn does not tell."""


def told(sampling: Sampling) -> dict[str, Json]:
    """What a turn does not tell, for somebody who compares it with his own."""
    return {name: getattr(sampling, name) for name in OF_THE_RUN}


def differing(own: Sampling, given: Mapping[str, Json]) -> str | None:
    """The first of ``OF_THE_RUN`` that is given and is not ``own``'s; None: there is none.

    Nothing is given by what is no number; -1 is vLLM's word for a top_k that is off.
    """
    for name in OF_THE_RUN:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name == "top_k":
            value = max(0, value)
        if not math.isclose(value, getattr(own, name), rel_tol=1e-9):
            return name
    return None


def unkept(own: Sampling, asked: Sampling) -> str | None:
    """The first option of a sampling by which its logprobs would not be those that training computes, if there is one.

    ``own`` is the run's: what a turn records, and what only ends an answer, may be another.
    """
    if asked.temperature < COLDEST and asked.temperature != own.temperature:
        return "temperature"
    return differing(own, told(asked))


def why_not(name: str, own: Sampling, asked: Sampling) -> str:
    """What is wrong with an option that ``unkept`` found, and what to do."""
    if name == "temperature":
        return (
            f"temperature {asked.temperature:g} is greedy, or nearly so, and such answers cannot be trained on; ask "
            f"for {COLDEST:g} at least, or leave it out (the run's is {own.temperature:g})"
        )
    theirs, ours = getattr(asked, name), getattr(own, name)
    return (
        f"{name} {theirs:g} is not the run's, which is {ours:g}: with that training computes the logprobs of all "
        f"answers; leave {name} out, or set sampling.{name} to {theirs:g} in the recipe"
    )
