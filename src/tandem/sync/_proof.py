"""How trainer and engine prove that they hold the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tandem.engines.base import Probe

Checksums = Mapping[str, int]
"""Checksum of each tensor by name, see ``weights/checksums.py``."""

PROBE = "The quick brown fox counts: one, two, three, four, five. 7 + 8 = 15; 12 * 3 = 36."
"""Scored on both sides after a publish."""


def differing(mine: Checksums, theirs: Checksums) -> list[str]:
    """Names of the trainer's tensors that the engine holds otherwise, or not at all."""
    return [name for name, value in mine.items() if theirs.get(name) != value]


def probe_gap(score: Callable[..., list[float]], tokens: Sequence[int], probe: Probe) -> dict[str, float]:
    """Largest difference in nats between a probe's answer and the trainer's own ``score``, by what was asked."""
    gaps = {"on a probe": gap(probe.scored, score(tokens))}
    if probe.sampled is not None:
        whole = [*tokens, *probe.sampled.tokens]
        ours = score(whole, probe.temperature)[len(tokens) - 1 :]
        gaps["on tokens sampled after a probe"] = gap(probe.sampled.logprobs, ours)
    return gaps


def gap(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """Largest absolute difference of logprobs; infinite where one side is not a number."""
    if len(engine) != len(trainer):
        return float("inf")
    worst = 0.0
    for a, b in zip(engine, trainer, strict=True):
        if not abs(a - b) < float("inf"):
            return float("inf")
        worst = max(worst, abs(a - b))
    return worst
