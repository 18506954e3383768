"""A run's gap between trainer and engine: how large, by which version's tokens, and where in a turn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.loading import RunConfig
from tandem.errors import ConfigError, TandemError
from tandem.model.policy import load_tokenizer
from tandem.observability.report.folder import RunFolder, load
from tandem.rollout.template import Template
from tandem.tools.mismatch.recorded import Break, RecordedTurn, breaks, spoken
from tandem.types import Json

PLACES: Mapping[str, tuple[int, float]] = {
    "all": (1, math.inf),
    "first": (1, 1),
    "2 to 8": (2, 8),
    "9 to 64": (9, 64),
    "65 to 512": (65, 512),
    "513 on": (513, math.inf),
}
"""Places in a turn, from 1."""
END = 4
"""Last tokens of a turn that are shown by themselves too."""
WORST = 8
"""Tokens that are shown with their text."""
CONTEXT = 12
"""Tokens of text shown before such a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCell:
    """The gap of the tokens of some version at some places of a turn."""

    version: int | None
    """Policy version stamped on them; None: any."""
    where: str
    """Which places."""
    tokens: int
    """How many."""
    mean: float
    """Trainer minus engine, nats."""
    rms: float
    """Root mean square, nats."""
    max: float
    """The widest, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapToken:
    """One of the widest gaps."""

    rollout: str
    """Id of its rollout."""
    turn: int
    """Which turn, from 0."""
    place: int
    """Place in the turn, from 0."""
    version: int
    """Policy version stamped on it."""
    context: str
    """Text before it."""
    text: str
    """Its own."""
    engine: float
    """The engine's logprob."""
    trainer: float
    """The trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Result of a mismatch analysis."""

    run: str
    """Folder."""
    step: int
    """Optimizer step whose tokens were looked at; it trained the weights of the step before."""
    rollouts: int
    """How many."""
    passed: int
    """Rollouts of the step that have no gap: not trained, or without the engine's logprobs."""
    dtype: str
    """Of the weights."""
    gap: Mapping[str, float]
    """mean, mean_abs, rms and max of trainer minus engine, nats, and k3: KL(engine || trainer) estimated by it."""
    table: tuple[GapCell, ...]
    """By version and by place in the turn; the row of a turn's last tokens overlaps the others."""
    worst: tuple[GapToken, ...]
    """Widest gaps first."""
    breaks: tuple[Break, ...]
    """Turns whose prompt is not what was expected."""
    probe_gap: float | None
    """Widest difference of the proofs after publishes up to this step; None where nothing was published."""

    def as_json(self) -> Json:
        """Plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class _Token:
    """A sampled token in its turn."""

    turn: RecordedTurn
    place: int

    @property
    def gap(self) -> float:
        return self.turn.trainer[self.place] - self.turn.engine[self.place]

    @property
    def version(self) -> int:
        return self.turn.versions[self.place]


def look(path: Path, config: RunConfig, *, step: int | None = None) -> Mismatch:
    """Look at one step of a run.

    Args:
        path: the run's folder.
        config: its recipe.
        step: optimizer step; None: the last recorded.

    Raises:
        ConfigError: the step is not recorded, or a grammar had a say in what was sampled.
        TandemError: nothing of the step has a gap.
    """
    run = load(path)
    if config.sampling.regex:
        raise ConfigError(
            "sampling.regex: the engine's logprobs are of the tokens that its grammar allowed, the trainer's of all, "
            "and how much of their gap that is cannot be known without the grammar; probe_gap in metrics.jsonl "
            "compares the two on a text that none was used for"
        )
    if not run.rollout_steps:
        raise TandemError(f"{run.path} holds no rollouts: nothing was trained yet, or the folder rollouts/ was removed")
    step = run.rollout_steps[-1] if step is None else step
    if step not in run.rollout_steps:
        kept = f"{run.rollout_steps[0]} to {run.rollout_steps[-1]}"
        raise ConfigError(f"{run.path} holds no rollouts of step {step}; it has those of {kept}")
    turns, passed = spoken(run.rollouts(step))
    if not turns:
        raise TandemError(f"no token of step {step} has both logprobs: none was trained, or no sampler told any")
    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    tokens = [_Token(turn, place) for turn in turns for place in range(len(turn.tokens))]
    gaps = [token.gap for token in tokens]
    return Mismatch(
        run=str(run.path),
        step=step,
        rollouts=len({turn.rollout for turn in turns}),
        passed=passed,
        dtype=config.dtype,
        gap={
            "mean": math.fsum(gaps) / len(gaps),
            "mean_abs": math.fsum(map(abs, gaps)) / len(gaps),
            "rms": _rms(gaps),
            "max": max(map(abs, gaps)),
            "k3": math.fsum(math.expm1(gap) - gap for gap in gaps) / len(gaps),
        },
        table=tuple(_table(tokens)),
        worst=tuple(_worst(tokens, tokenizer)),
        breaks=tuple(breaks(turns, Template(tokenizer, config.chat_template_kwargs))),
        probe_gap=_probe_gap(run, step),
    )


def _rms(gaps: Sequence[float]) -> float:
    return math.sqrt(math.fsum(gap * gap for gap in gaps) / len(gaps))


def _table(tokens: Sequence[_Token]) -> Iterator[GapCell]:
    """A row for each place of each version, after those of all versions where there are several."""
    versions = sorted({token.version for token in tokens})
    for version in [None, *versions] if len(versions) > 1 else versions:
        own = [token for token in tokens if version in (None, token.version)]
        for where, (first, last) in PLACES.items():
            gaps = [token.gap for token in own if first <= token.place + 1 <= last]
            yield from _cell(version, where, gaps)
        ends = [token.gap for token in own if len(token.turn.tokens) - token.place <= END]
        yield from _cell(version, f"last {END}", ends)


def _cell(version: int | None, where: str, gaps: Sequence[float]) -> Iterator[GapCell]:
    if gaps:
        mean, widest = math.fsum(gaps) / len(gaps), max(map(abs, gaps))
        yield GapCell(version=version, where=where, tokens=len(gaps), mean=mean, rms=_rms(gaps), max=widest)


def _worst(tokens: Sequence[_Token], tokenizer: Any) -> Iterator[GapToken]:
    for token in sorted(tokens, key=lambda token: -abs(token.gap))[:WORST]:
        turn, i = token.turn, token.place
        yield GapToken(
            rollout=turn.rollout,
            turn=turn.turn,
            place=i,
            version=token.version,
            context=tokenizer.decode([*turn.prompt, *turn.tokens[:i]][-CONTEXT:]),
            text=turn.pieces[i],
            engine=turn.engine[i],
            trainer=turn.trainer[i],
        )


def _probe_gap(run: RunFolder, step: int) -> float | None:
    gaps = [
        float(event["probe_gap"])
        for event in run.events
        if event.get("event") == "published" and event.get("probe_gap") is not None and event.get("step", 0) < step
    ]
    return max(gaps, default=None)
