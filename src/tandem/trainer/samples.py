"""Samples: the trainable sequences of a rollout, and one of them as arrays.

Turns that continue one another become one sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tandem.trainer.prefix_tree import Ints
from tandem.types import Rollout, Sample

_FORCED = -1e-6
"""Logprobs above this are of tokens that nothing could have been sampled in place of."""


def unforced(logprobs: Sequence[float]) -> tuple[bool, ...]:
    """Of each sampled token, whether another one could have been sampled in its place."""
    return tuple(logprob < _FORCED for logprob in logprobs)


def samples_of(rollout: Rollout, advantage: float, *, skip_forced: bool = False) -> Iterator[Sample]:
    """The trainable sequences of a rollout: one, unless a turn's prompt does not continue the turn before it.

    ``advantage`` is that of every sampled token, unless the environment gave each its own. Turns that are not trained,
    and with ``skip_forced`` tokens that were sampled with probability 1, are not; nor is a sequence of none else.
    """
    tokens: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    experts = b""
    temperature = 1.0
    own_advantages = None if rollout.advantages is None else iter(rollout.advantages)

    def sample() -> Sample:
        return Sample(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            advantages=advantages,
            temperature=temperature,
            begins=begins,
            ends=ends,
            experts=experts,
            rollout=rollout.id,
        )

    for turn in rollout.turns:
        completion = turn.completion
        if not completion.tokens:
            continue
        count = len(completion.tokens)
        if not tokens or turn.temperature != temperature or tokens != turn.prompt[: len(tokens)]:
            if any(mask):
                yield sample()
            tokens, mask, logprobs, advantages, begins, ends, experts = (), (), (), (), (), (), b""
            temperature = turn.temperature
        new = turn.prompt[len(tokens) :]
        none = (0.0,) * len(new)
        begins += (len(turn.prompt),)
        experts += completion.experts[len(experts) :]
        tokens += new + completion.tokens
        ends += (len(tokens),)
        turn_advantages = (advantage,) * count if own_advantages is None else tuple(islice(own_advantages, count))
        free, sampled = (turn.trained,) * count, completion.logprobs
        if skip_forced or not turn.trained:
            free = unforced(sampled) if turn.trained else free
            sampled = tuple(p if it else 0.0 for p, it in zip(sampled, free, strict=True))
            turn_advantages = tuple(a if it else 0.0 for a, it in zip(turn_advantages, free, strict=True))
        mask += (False,) * len(new) + free
        logprobs += none + sampled
        advantages += none + turn_advantages
    if any(mask):
        yield sample()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleArrays:
    """A sample as arrays: the tokens that are computed, and what belongs to each trained one."""

    rollout: str
    temperature: float
    tokens: Ints
    """Prompt and completion ids."""
    at: Ints
    """Places of the trained tokens in the sequence."""
    targets: Ints
    """Token ids at the trained places."""
    logprobs: NDArray[np.float64]
    """Logprobs that the sampler recorded for them."""
    advantages: NDArray[np.float64]
    answers: tuple[tuple[int, int], ...]
    """Where each completion begins, and the place after its last token."""
    experts: bytes
    """Of the sample."""

    @staticmethod
    def of(sample: Sample) -> SampleArrays:
        """The arrays of a sample."""
        # array.array takes a tuple in about half the time that numpy does.
        tokens = np.frombuffer(array("q", sample.tokens), dtype=np.int64)
        at = np.flatnonzero(np.frombuffer(bytes(sample.mask), dtype=np.bool_))
        return SampleArrays(
            rollout=sample.rollout,
            temperature=sample.temperature,
            tokens=tokens,
            at=at,
            targets=tokens[at],
            logprobs=np.frombuffer(array("d", sample.logprobs))[at],
            advantages=np.frombuffer(array("d", sample.advantages))[at],
            answers=tuple(zip(sample.begins, sample.ends, strict=True)),
            experts=sample.experts,
        )
