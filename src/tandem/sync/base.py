"""How weights travel: one transaction, written once; a way of travelling writes only ``move``."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tandem.engines.base import Engine, EngineSpec
from tandem.errors import StaleWeights, TornWeights, UnsupportedPair
from tandem.metrics import Max, Sum, Value
from tandem.policy.policy import Policy
from tandem.sync._proof import Checksums, checksums, digest, gap
from tandem.types import PolicyVersion

log = logging.getLogger(__name__)

PROBE = "The quick brown fox counts: one, two, three, four, five. 7 + 8 = 15; 12 * 3 = 36."
"""Scored on both sides after a publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one publish did."""

    version: PolicyVersion
    """What the engine now serves."""
    seconds: float
    """From pause to resume, without the optimizer's own time."""
    bytes: int
    """Bytes that were copied; 0 where nothing was."""
    paused: float
    """Seconds the engine sampled nothing."""
    probe_gap: float | None
    """Largest difference of the probe's logprobs between engine and trainer; None if this publish was not proven."""


@dataclass(frozen=True, kw_only=True)
class WeightSync(ABC):
    """A frozen dataclass whose fields are the way's options."""

    carries: ClassVar[frozenset[str]]
    """Which ``trains`` parts it can carry, by name."""
    port: ClassVar[type]
    """The engine port it needs."""
    pause: ClassVar[Literal["step", "move", "never"]]
    """When the engine stands still: from before the optimizer, from before the move, or not at all."""

    prove_every: int = 1
    """Publishes between two proofs; the first publish of a run is always proven."""
    tolerance: float = 0.0
    """Largest probe gap in nats; 0 means 0.001 for float32 weights and 0.15 for narrower ones."""

    def __post_init__(self) -> None:
        if self.prove_every < 1:
            raise ValueError("prove_every must be at least 1")
        if self.tolerance < 0:
            raise ValueError("tolerance must not be negative")

    def check(self, *, trains: str, engine: EngineSpec) -> None:
        """Refuse a pair that cannot work, before any weight is loaded.

        Raises:
            UnsupportedPair: names the ones that can.
        """
        if trains not in self.carries:
            ways = " or ".join(sorted(self.carries))
            raise UnsupportedPair(f"sync: {_name(self)} cannot carry trains: {trains}; it carries {ways}")
        if self.port not in engine.ports:
            has = ", ".join(sorted(port.__name__ for port in engine.ports)) or "none"
            raise UnsupportedPair(
                f"sync: {_name(self)} needs an engine with the port {self.port.__name__}; engine: {_name(engine)} has "
                f"{has}. engine: embedded with sync: shared always works"
            )

    @abstractmethod
    async def move(self, link: Link, version: PolicyVersion) -> int:
        """Make the engine hold the policy's weights; returns the bytes copied."""

    async def compare(self, link: Link, mine: Checksums) -> None:
        """Compare the trainer's checksums with those of the engine's own bytes.

        Raises:
            StaleWeights: none of the trained tensors agree.
            TornWeights: some do.
        """
        theirs = await self.engine_checksums(link, mine)
        wrong = [name for name, value in mine.items() if theirs.get(name) != value]
        if not wrong:
            return
        kind = StaleWeights if len(wrong) == len(mine) else TornWeights
        raise kind(
            f"{len(wrong)} of {len(mine)} trained tensors differ between trainer and engine, first {wrong[0]!r}; "
            "the engine stays paused"
        )

    @abstractmethod
    async def engine_checksums(self, link: Link, mine: Checksums) -> Checksums:
        """Checksums of what the engine holds, under the trainer's names; ``mine`` are the trainer's."""

    @asynccontextmanager
    async def open(self, policy: Policy, engine: Engine, start: PolicyVersion, source: Any) -> AsyncIterator[Link]:
        """Bind, publish the starting version and prove it, so that a broken way fails before the first step.

        ``start.digest`` is empty for a fresh run; otherwise the policy must hold exactly those bytes.

        Raises:
            StaleWeights, TornWeights: the proof failed.
        """
        link = Link(sync=self, policy=policy, engine=engine, source=source)
        await link.publish(start)
        yield link


@dataclass(slots=True, kw_only=True)
class Handoff:
    """What ``commit`` hands to the block that runs the optimizer."""

    published: Published | None = None
    """Set when the block is left and the publish succeeded."""

    def metrics(self) -> Mapping[str, Value]:
        """Numbers of this publish."""
        if self.published is None:
            return {}
        p = self.published
        out: dict[str, Value] = {"seconds/sync": Sum(p.seconds), "engine/paused_seconds": Sum(p.paused)}
        if p.probe_gap is not None:
            out["probe_gap"] = Max(p.probe_gap)
        return out


@dataclass(slots=True, kw_only=True)
class Link:
    """A live way between one policy and one engine."""

    sync: WeightSync
    """Its options."""
    policy: Policy
    """The trainer's side."""
    engine: Engine
    """The engine's side."""
    source: Any
    """The trained weights by Hugging Face name, re-iterable."""
    _publishes: int = 0
    _probe: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def commit(self, step: int) -> AsyncIterator[Handoff]:
        """``[pause: step] -> optimizer (the block) -> [pause: move] -> move -> prove -> stamp -> resume``.

        If the block or the proof fails, a paused engine stays paused: it never serves weights in doubt.
        """
        handoff = Handoff()
        paused_at = None
        if self.sync.pause == "step":
            paused_at = time.monotonic()
            await self.engine.pause()
        optimizer_at = time.monotonic()
        yield handoff
        handoff.published = await self.publish(
            PolicyVersion(step=step, digest=""), paused_at=paused_at, optimizer=time.monotonic() - optimizer_at
        )

    async def publish(
        self, version: PolicyVersion, *, paused_at: float | None = None, optimizer: float = 0.0
    ) -> Published:
        """Move, prove, stamp and resume. A version without a digest gets that of the bytes.

        Raises:
            StaleWeights, TornWeights: the engine does not hold these weights; it is left paused.
        """
        start = time.monotonic()
        if paused_at is None and self.sync.pause != "never":
            paused_at = start
            await self.engine.pause()
        copied = await self.sync.move(self, version)
        prove = self._publishes % self.sync.prove_every == 0
        mine: Checksums = await self.policy.compute(checksums, self.source)
        found = digest(mine)
        if version.digest and version.digest != found:
            raise StaleWeights(
                f"the policy holds weights {found}, but version {version.step} was {version.digest}; "
                "the checkpoint's weights and its state do not belong together"
            )
        version = PolicyVersion(step=version.step, digest=found)
        probe_gap = await self._prove(version, mine) if prove else None
        await self.engine.stamp(version)
        await self.engine.resume()
        self._publishes += 1
        now = time.monotonic()
        return Published(
            version=version,
            seconds=now - start if paused_at is None else now - paused_at - optimizer,
            bytes=copied,
            paused=0.0 if paused_at is None else now - paused_at,
            probe_gap=probe_gap,
        )

    async def _prove(self, version: PolicyVersion, mine: Checksums) -> float:
        await self.sync.compare(self, mine)
        if not self._probe:
            self._probe = self.policy.tokenizer.encode(PROBE)[:64]
        theirs = await self.engine.score(self._probe)
        ours = await self.policy.compute(self.policy.score, self._probe)
        found = gap(theirs, ours)
        allowed = self.sync.tolerance or (1e-3 if self.policy.dtype.itemsize == 4 else 0.15)
        if found > allowed:
            raise StaleWeights(
                f"version {version.step} was moved, but on a probe engine and trainer differ by {found:.3g} nats "
                f"(allowed {allowed:g}): the engine does not sample from these weights. It stays paused"
            )
        return found


def _name(thing: object) -> str:
    return type(thing).__module__.rpartition(".")[2]
