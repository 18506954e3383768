"""Rollout records: prompts, messages, rewards and every token's numbers of a step, one JSON line a rollout.

People read them in the report, and ``mismatch`` compares the two logprobs of every token. They hold all that the engine
was given: the token ids before each turn, its temperature, and the version stamped on each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, starmap

import msgspec
import numpy as np

from tandem.rollout.template import Template
from tandem.trainer.pack import StepBatch, unforced
from tandem.trainer.step import StepStats
from tandem.types import UNKNOWN_LOGPROB, Json, Message, Rollout


class TokenRecord(msgspec.Struct, gc=False):
    """A sampled token. A step has tens of thousands, which a dict each would cost three times the time."""

    t: str
    """Its text."""
    id: int
    lp: float | None
    """The sampler's logprob."""
    tp: float | None
    """The trainer's."""
    adv: float | None
    """Advantage."""
    m: int
    """1 if it was trained, else 0."""


def records(
    step: int, batch: StepBatch, stats: StepStats, template: Template, *, skip_forced: bool = False
) -> Iterator[dict[str, Json]]:
    """One record for each rollout of the batch, failed ones included.

    Each is made when it is asked for: a thread that writes one before it makes the next holds nothing up for long.

    Args:
        step: that was trained.
        batch: what it was trained on.
        stats: the logprobs of its trained tokens.
        template: makes text of them.
        skip_forced: the packer's: tokens that nothing could have been sampled in place of were not trained.
    """
    for group in batch.groups:
        for rollout in group.rollouts:
            advantage = batch.advantages.get(rollout.id)
            yield {
                "step": step,
                "group": group.id,
                "rollout": rollout.id,
                "env": group.env,
                "task": rollout.task.id,
                "prompt": _plain(rollout.task.prompt),
                "messages": _plain(rollout.messages),
                "answer": rollout.task.answer,
                "text": rollout.text,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                "turn_rewards": [turn.reward for turn in rollout.turns],
                "metrics": rollout.metrics,
                "advantage": advantage,
                "status": rollout.status,
                "error": rollout.error,
                "truncated": rollout.truncated,
                "versions": _versions(rollout),
                "turns": [len(turn.completion.tokens) for turn in rollout.turns],
                "prompts": _prompts(rollout),
                "temperatures": [turn.temperature for turn in rollout.turns],
                "stamps": _version_counts(rollout),
                "tokens": _tokens(rollout, advantage, stats.logprobs.get(rollout.id), template, skip_forced),
            }


def _plain(messages: Sequence[Message]) -> list[dict[str, Json]]:
    return [m.as_dict() for m in messages]


def _versions(rollout: Rollout) -> list[int]:
    spans = [turn.completion for turn in rollout.turns if turn.completion.tokens]
    return [min(c.version_min for c in spans), max(c.version_max for c in spans)] if spans else []


def _prompts(rollout: Rollout) -> list[tuple[int, list[int]]]:
    """The ids before each turn: how many begin the turn before it, its sampled tokens included, and those after them.

    A turn that continues the one before it keeps all of that, so that no id is written twice.
    """
    out: list[tuple[int, list[int]]] = []
    before: tuple[int, ...] = ()
    for turn in rollout.turns:
        num_shared = shared(before, turn.prompt)
        out.append((num_shared, list(turn.prompt[num_shared:])))
        before = (*turn.prompt, *turn.completion.tokens)
    return out


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _version_counts(rollout: Rollout) -> list[tuple[int, int]]:
    """Policy step and number of the tokens in a row that it sampled, over all turns."""
    versions = (version for turn in rollout.turns for version in turn.completion.versions)
    return [(version, len(list(run))) for version, run in groupby(versions)]


def _tokens(
    rollout: Rollout, advantage: float | None, trained: Sequence[float] | None, template: Template, skip_forced: bool
) -> list[TokenRecord]:
    """Sampled tokens of all turns; ``tp`` is the trainer's logprob of those it trained.

    None has one where only some of a rollout's sequences were computed: the others had no advantage.
    """
    completions = [turn.completion for turn in rollout.turns]
    ids = [token for completion in completions for token in completion.tokens]
    sampled = [logprob for completion in completions for logprob in completion.logprobs]
    known = [None if lp == UNKNOWN_LOGPROB else lp for lp in _rounded(sampled)]
    of_turns = [turn.trained for turn in rollout.turns for _ in turn.completion.tokens]
    trainable = list(map(all, zip(unforced(sampled), of_turns, strict=True))) if skip_forced else of_turns
    mask = [int(trained is not None and it) for it in trainable]
    trainer: Sequence[float | None] = [None] * len(ids)
    if trained is not None and len(trained) == sum(trainable):
        values = iter(_rounded(trained))
        trainer = [next(values) if it else None for it in trainable]
    advantages = rollout.advantages or [advantage] * len(ids)
    columns = zip(template.pieces(ids), ids, known, trainer, advantages, mask, strict=True)
    return list(starmap(TokenRecord, columns))


def _rounded(values: Sequence[float]) -> list[float]:
    """To five places, all at once: a step has tens of thousands, and the next one waits until they are written."""
    rounded: list[float] = np.round(np.asarray(values, dtype=np.float64), 5).tolist()
    return rounded
