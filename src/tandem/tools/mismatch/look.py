"""A run's gap between trainer and engine: how large, where, made of what, and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.loading import RunConfig
from tandem.errors import ConfigError, TandemError
from tandem.observability.report.folder import RunFolder, load
from tandem.rollout.template import Template
from tandem.tools.mismatch.causes import Cause, Evidence, Rollouts, causes, rms
from tandem.tools.mismatch.recorded import Break, breaks, choose, spoken
from tandem.tools.mismatch.weights import Lab
from tandem.types import Json

BINS = ((1, 1), (2, 8), (9, 64), (65, 512), (513, None))
"""Places in a turn, from 1."""
END = 4
"""Last tokens of a turn that are shown by themselves too."""
WORST = 8
"""Tokens that are shown with their text."""
CONTEXT = 12
"""Tokens of text shown before such a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPart:
    """One cause and how much of the gap it is."""

    category: str
    """staleness, numerics, sampling, tokenisation or unexplained."""
    name: str
    """What happened."""
    advice: str
    """What to do; may be empty."""
    fault: bool
    """False for what the recipe allows or the type of the weights explains."""
    share: float
    """Of the mean squared gap: mean(gap x part) / mean(gap^2). Shares sum to 1; one that works against is below 0."""
    interval: tuple[float, float] | None
    """95 % of resamples of rollouts; None with too few of them."""
    mean: float
    """Nats per token."""
    rms: float
    """Root mean square, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPosition:
    """The gap at some places of a turn."""

    where: str
    """Which."""
    tokens: int
    """How many."""
    mean: float
    """Of the gap, nats."""
    rms: float
    """Root mean square of the gap, nats."""
    shares: Mapping[str, float]
    """Of the mean squared gap there, by category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapToken:
    """One of the widest gaps."""

    rollout: str
    """Id of its rollout."""
    turn: int
    """Which turn, from 0."""
    place: int
    """Place in the turn, from 0."""
    context: str
    """Text before it."""
    text: str
    """Its own."""
    engine: float
    """The engine's logprob."""
    trainer: float
    """The trainer's."""
    parts: Mapping[str, float]
    """Nats by category; they sum to the gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Result of a mismatch analysis."""

    run: str
    """Folder."""
    step: int
    """Optimizer step whose tokens were looked at."""
    rollouts: int
    """How many."""
    passed: int
    """Rollouts of the step that have no gap: not trained, or without the engine's logprobs."""
    tokens: int
    """Sampled tokens."""
    versions: Mapping[int, int]
    """Tokens by the version stamped on them."""
    stand_ins: Mapping[int, int]
    """Version to the one on disk that was computed with in its place."""
    dtype: str
    """Of the weights."""
    device: str
    """Where it was computed."""
    gap: Mapping[str, float]
    """mean, mean_abs, rms and max of trainer minus engine, nats, and k3: KL(engine || trainer) estimated by it."""
    allowed: float
    """Gap (root mean square) that the type explains on these tokens."""
    parts: tuple[GapPart, ...]
    """Largest share first."""
    categories: Mapping[str, float]
    """Share by category."""
    positions: tuple[GapPosition, ...]
    """By place in the turn; the last row overlaps the others."""
    worst: tuple[GapToken, ...]
    """Widest gaps first."""
    breaks: tuple[Break, ...]
    """Turns whose prompt is not what was expected."""
    probe_gap: float | None
    """Widest difference of the proofs after publishes up to this step; None where nothing was published."""
    verdict: str
    """In words."""
    dominant: GapPart | None
    """The largest part; None if the gap is within what the type explains and no fault was seen beneath."""

    def as_json(self) -> Json:
        """Plain data."""
        return dataclasses.asdict(self)


def look(path: Path, config: RunConfig, *, step: int | None = None, tokens: int = 4096) -> Mismatch:
    """Look at one step of a run.

    Args:
        path: the run's folder.
        config: its recipe.
        step: optimizer step; None: the newest that was trained right after a checkpoint, else the last recorded.
        tokens: about how many sampled tokens.

    Raises:
        ConfigError: the step is not recorded, the model cannot be read, or a grammar had a say in what was sampled.
        TandemError: nothing of the step has a gap.
        CheckpointError: a checkpoint cannot be read.
    """
    run = load(path)
    if config.sampling.regex:
        raise ConfigError(
            "sampling.regex: the engine's logprobs are of the tokens that its grammar allowed, the trainer's of all, "
            "and how much of their gap that is cannot be known without the grammar; probe_gap in metrics.jsonl "
            "compares the two on a text that none was used for"
        )
    with contextlib.closing(Lab(config, run.path)) as lab:
        step = choose(run, lab.saved) if step is None else step
        if step not in run.rollout_steps:
            kept = f"{run.rollout_steps[0]} to {run.rollout_steps[-1]}" if run.rollout_steps else "none"
            raise ConfigError(f"{run.path} holds no rollouts of step {step}; it has those of {kept}")
        turns, passed = spoken(run.rollouts(step), tokens)
        if not turns:
            raise TandemError(f"no token of step {step} has both logprobs: none was trained, or no sampler told any")
        template = Template(lab.tokenizer, config.chat_template_kwargs)
        evidence = Evidence(turns, lab, template, config.sampling)
        split = causes(evidence)
        return _summary(run, evidence, split, list(breaks(turns, template)), passed)


def _summary(
    run: RunFolder, evidence: Evidence, split: Sequence[Cause], broken: Sequence[Break], passed: int
) -> Mismatch:
    gap_N = evidence.gap_N
    parts = sorted(_parts(evidence, split), key=lambda part: -part.share)
    step = evidence.trained_version + 1
    return Mismatch(
        run=str(run.path),
        step=step,
        rollouts=len({turn.rollout for turn in evidence.turns}),
        passed=passed,
        tokens=gap_N.numel(),
        versions=dict(sorted(evidence.versions.items())),
        stand_ins={version: other for version, other in sorted(evidence.stand_in.items()) if version != other},
        dtype=str(evidence.lab.dtype).removeprefix("torch."),
        device=evidence.lab.device,
        gap={
            "mean": float(gap_N.mean()),
            "mean_abs": float(gap_N.abs().mean()),
            "rms": rms(gap_N),
            "max": float(gap_N.abs().max()),
            "k3": float((torch.expm1(gap_N) - gap_N).mean()),
        },
        allowed=evidence.allowed,
        parts=tuple(parts),
        categories=_by_category(split, gap_N, torch.ones_like(gap_N, dtype=torch.bool)),
        positions=tuple(_positions(evidence, split)),
        worst=tuple(_worst(evidence, split)),
        breaks=tuple(broken),
        probe_gap=_probe_gap(run, step),
        verdict=" ".join(_verdict(evidence, parts, broken)),
        dominant=None if _is_nothing(evidence, parts) else parts[0],
    )


def _share(part_N: Tensor, gap_N: Tensor) -> float:
    total = float(gap_N.square().sum())
    return float((part_N * gap_N).sum()) / total if total else 0.0


def _parts(evidence: Evidence, split: Sequence[Cause]) -> Iterator[GapPart]:
    rollouts, gap_N = Rollouts(evidence.rollout_N), evidence.gap_N
    for cause in split:
        yield GapPart(
            category=cause.category,
            name=cause.name,
            advice=cause.advice,
            fault=cause.fault,
            share=_share(cause.part_N, gap_N),
            interval=rollouts.interval(cause.part_N * gap_N, gap_N.square()),
            mean=float(cause.part_N.mean()),
            rms=rms(cause.part_N),
        )


def _by_category(split: Sequence[Cause], gap_N: Tensor, here_N: Tensor) -> dict[str, float]:
    shares: defaultdict[str, float] = defaultdict(float)
    for cause in split:
        shares[cause.category] += _share(cause.part_N[here_N], gap_N[here_N])
    return dict(shares)


def _positions(evidence: Evidence, split: Sequence[Cause]) -> Iterator[GapPosition]:
    at_N = torch.tensor([i + 1 for turn in evidence.turns for i in range(len(turn.tokens))])
    left_N = torch.tensor([len(turn.tokens) - i for turn in evidence.turns for i in range(len(turn.tokens))])
    rows = [
        ("first" if last == 1 else f"{first} to {last}" if last else f"{first} on",
         (at_N >= first) & (at_N <= (last or math.inf)))
        for first, last in BINS
    ]  # fmt: skip
    for where, here_N in [*rows, (f"last {END}", left_N <= END)]:
        if bool(here_N.any()):
            gap_N = evidence.gap_N[here_N]
            yield GapPosition(
                where=where,
                tokens=gap_N.numel(),
                mean=float(gap_N.mean()),
                rms=rms(gap_N),
                shares=_by_category(split, evidence.gap_N, here_N),
            )


def _worst(evidence: Evidence, split: Sequence[Cause]) -> Iterator[GapToken]:
    places = [(turn, i) for turn in evidence.turns for i in range(len(turn.tokens))]
    order = torch.argsort(evidence.gap_N.abs(), descending=True, stable=True)[:WORST].tolist()
    for n in order:
        turn, i = places[n]
        parts: defaultdict[str, float] = defaultdict(float)
        for cause in split:
            parts[cause.category] += float(cause.part_N[n])
        before = (*turn.prompt, *turn.tokens[:i])[-CONTEXT:]
        yield GapToken(
            rollout=turn.rollout,
            turn=turn.turn,
            place=i,
            context=evidence.lab.tokenizer.decode(list(before)),
            text=turn.pieces[i],
            engine=turn.engine[i],
            trainer=turn.trainer[i],
            parts=dict(parts),
        )


def _probe_gap(run: RunFolder, step: int) -> float | None:
    gaps = [
        float(event["probe_gap"])
        for event in run.events
        if event.get("event") == "published" and event.get("probe_gap") is not None and event.get("step", 0) < step
    ]
    return max(gaps, default=None)


def _is_nothing(evidence: Evidence, parts: Sequence[GapPart]) -> bool:
    return rms(evidence.gap_N) <= evidence.allowed and not any(part.fault for part in parts)


def _verdict(evidence: Evidence, parts: Sequence[GapPart], broken: Sequence[Break]) -> Iterator[str]:
    first, *others = parts
    if _is_nothing(evidence, parts):
        size = rms(evidence.gap_N)
        kind = str(evidence.lab.dtype).removeprefix("torch.")
        yield f"Nothing to explain: the gap of {size:.2g} nats is within what {kind} explains here"
        yield f"({evidence.allowed:.2g})."
    else:
        yield f"{first.category.capitalize()} dominates: {first.name}; {first.share:.0%} of the squared gap."
        if first.advice:
            yield f"What to do: {first.advice}."
        if also := [
            f"{part.name} (rms {part.rms:.1e})" for part in others if part.fault and part.rms > evidence.allowed
        ]:
            yield f"Beneath it: {'; '.join(also)}."
    renewed = [one for one in broken if one.kind == "history"]
    if renewed:
        yield (
            f"{len(renewed)} later turns do not continue what was sampled: whoever speaks for the policy tokenises its "
            "words anew, so that it sees other tokens than it said."
        )
