"""How trainer and engine prove that they hold the same weights."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import Any

from torch import Tensor

from tandem.engines.base import CanAttest, Engine, Probe
from tandem.errors import EngineError, StaleWeights, TornWeights
from tandem.policy.policy import Policy
from tandem.types import PolicyVersion
from tandem.weights.checksums import checksums

log = logging.getLogger(__name__)

Checksums = Mapping[str, int]
"""Checksum of each tensor by name, see ``weights/checksums.py``."""

PROBE = (
    "The quick brown fox counts: one, two, three, four, five. 7 + 8 = 15; 12 * 3 = 36. In the year 1889 a tower was "
    "finished that was not meant to stay. Why does bread rise? Because yeast eats sugar and breathes out a gas, which "
    "the dough keeps. def area(r): return 3.14159 * r**2  # of a circle. Ask for the red book, not the blue one; it is "
    "on the third shelf, behind the lamp."
)
"""Scored on both sides after a publish."""
SHORT = 64
"""Tokens of it that are enough where nothing is routed, or where rounding is small."""
LONG = 256
"""Tokens of it where requests may be routed past an adapter, and rounding hides that from each single token."""

_CERTAIN = 5.0
"""What ``mistaken_for`` asks for: chance alone is below exp(-12.5), 4 in a million."""


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


class Behaviour:
    """What an engine answers to a probe, against what the trainer computes itself, publish after publish."""

    def __init__(self, policy: Policy, trains: Any, tolerance: float):
        self.tokens: list[int] = []
        """The probe."""
        self._policy = policy
        self._trains = trains
        self._allowed = tolerance or (1e-3 if policy.dtype.itemsize == 4 else 0.3)
        self._others: dict[str, list[float]] = {}

    async def compare(self, engine: Engine, version: PolicyVersion, sums: Callable[[], Awaitable[None]]) -> float:
        """Largest difference of a logprob, in nats, over all engines.

        Args:
            engine: it is asked once the sums are compared, and goes on by that; what the trainer computes itself is
                begun meanwhile, before there are samples beside which it takes longer.
            version: that the engine is to hold.
            sums: compares both sides' bytes.

        Raises:
            StaleWeights: it is more than is allowed, or speaks of other weights than those of ``version``.
        """
        policy, tokens = self._policy, self._text(engine)
        compared = asyncio.ensure_future(sums())

        async def own() -> list[float]:
            if self._trains.travels == "adapter":  # the trainer's sums are taken by the same thread: they come first
                await compared
            return await policy.compute(self._scores)

        async def asked() -> Sequence[Probe]:
            await compared
            return await engine.probe(tokens)

        mine, probes = await asyncio.gather(own(), asked())
        worst = 0.0
        for probe in probes:
            if probe.cached:
                raise StaleWeights(
                    f"{probe.name} took {probe.cached} tokens of a prompt from its prefix cache right after a publish: "
                    "their keys and values are of older weights"
                )
            gaps = await policy.compute(probe_gap, policy.score, tokens, probe, mine)
            for what, found in gaps.items():
                if not found <= self._allowed:
                    raise StaleWeights(
                        f"version {version.step} was moved, but {what} {probe.name} and the trainer differ by "
                        f"{found:.3g} nats (allowed {self._allowed:g}): it does not sample from these weights as they "
                        "are, or is noisier than this model should be (deep ones with random weights are: "
                        "sync.tolerance)"
                    )
                worst = max(worst, found)
            if other := mistaken_for(probe.scored, mine, self._others):
                raise StaleWeights(
                    f"version {version.step} was moved, but {probe.name} answers a probe as {other} does, and samples "
                    "from that"
                )
        self._others["the version before"] = mine
        return worst

    def _text(self, engine: Engine) -> list[int]:
        if not self.tokens:
            off = self._trains.untrained(self._policy.model)
            most = min(LONG, max(SHORT, engine.context // 2)) if off and self._policy.dtype.itemsize < 4 else SHORT
            self.tokens = self._policy.tokenizer.encode(PROBE)[:most]
        return self.tokens

    def _scores(self) -> list[float]:
        if not self._others and (off := self._trains.untrained(self._policy.model)):
            with off:
                self._others["the model without its adapter"] = self._policy.score(self.tokens)
        return self._policy.score(self.tokens)


def probe_gap(
    score: Callable[..., list[float]], tokens: Sequence[int], probe: Probe, mine: Sequence[float]
) -> dict[str, float]:
    """Largest difference in nats between a probe's answer and the trainer's own ``score``, by what was asked.

    Args:
        score: the trainer's.
        tokens: of the probe.
        probe: an engine's answer.
        mine: ``score(tokens)``.
    """
    gaps = {"on a probe": gap(probe.scored, mine)}
    if probe.sampled is not None:
        whole = [*tokens, *probe.sampled.tokens]
        ours = score(whole, probe.temperature)[len(tokens) - 1 :]
        gaps["on tokens sampled after a probe"] = gap(probe.sampled.logprobs, ours)
    return gaps


def mistaken_for(engine: Sequence[float], mine: Sequence[float], others: Mapping[str, Sequence[float]]) -> str:
    """Which other weights an engine samples from, judged by its logprobs of a probe; empty if it is none of them.

    In bfloat16 the tolerance of a probe must be wide, and an adapter that is left out may stay within it. But numerics
    know no weights: a token's logprob is no more likely beyond the middle between the two than short of it. How far
    beyond it is, summed over the tokens and divided by the root of the squares' sum, exceeds x by chance with a
    probability below exp(-x^2 / 2), whatever the distribution (Hoeffding's inequality for the signs, JASA 1963). It is
    at most the root of the number of tokens, and about half of that where weights differ by twice the rounding.

    Args:
        engine: what an engine answered.
        mine: what the trainer computes with the weights that were published.
        others: what it computed with others, by what they are.
    """
    for what, theirs in others.items():
        beyond = [
            math.copysign(1.0, t - m) * (e - (m + t) / 2)
            for e, m, t in zip(engine, mine, theirs, strict=True)
            if t != m
        ]
        if sum(beyond) > _CERTAIN * math.sqrt(math.fsum(x * x for x in beyond)):
            return what
    return ""


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
