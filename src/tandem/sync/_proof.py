"""How trainer and engine prove that they hold the same weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence

from torch import Tensor

from tandem.engines.base import CanAttest, Engine, Probe
from tandem.errors import EngineError, StaleWeights, TornWeights
from tandem.policy.policy import Policy
from tandem.weights.checksums import checksums

log = logging.getLogger(__name__)

Checksums = Mapping[str, int]
"""Checksum of each tensor by name, see ``weights/checksums.py``."""

PROBE = "The quick brown fox counts: one, two, three, four, five. 7 + 8 = 15; 12 * 3 = 36."
"""Scored on both sides after a publish."""


def differing(mine: Checksums, theirs: Checksums) -> list[str]:
    """Names of the trainer's tensors that the engine holds otherwise, or not at all."""
    return [name for name, value in mine.items() if theirs.get(name) != value]


async def compare_frozen(
    engine: Engine, policy: Policy, base: Mapping[str, Tensor], *, without: Container[str]
) -> None:
    """Compare the weights that no publish carries, once for every start of the engine: nothing else would see them.

    Args:
        engine: compared only if it checksums its own bytes.
        policy: the trainer's.
        base: its weights by Hugging Face name.
        without: names of those that publishes carry.

    Raises:
        StaleWeights, TornWeights: the engine holds others.
    """
    frozen = {name: p for name, p in base.items() if name not in without}
    if not frozen or not isinstance(engine, CanAttest):
        return
    epoch = engine.epoch
    try:
        found = await engine.checksums("weights")
    except EngineError as error:
        if engine.epoch != epoch or not (await engine.health()).ok:
            raise
        log.warning("weights that are not trained are not compared, only probed: %s", str(error).splitlines()[0])
        return
    mine: Checksums = await policy.compute(lambda: checksums((n, p.detach()) for n, p in frozen.items()))
    for name, theirs in found.items():
        if wrong := differing(mine, theirs):
            kind = StaleWeights if len(wrong) == len(mine) else TornWeights
            raise kind(
                f"{len(wrong)} of {len(mine)} weights that are not trained differ between the trainer and {name}, "
                f"first {wrong[0]!r}; both must start from the same model in the same type"
            )


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
