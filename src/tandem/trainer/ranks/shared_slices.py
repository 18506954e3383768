"""``sync: shared`` of ranks whose weights are cut as a tensor-parallel engine's are: each writes its worker's slices.

Only the lead talks to the engine. What reads or writes weights is a command that all ranks execute together: each
rounds its float32 masters into the memory of the worker on its device, scores with what it has, checksums it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from tandem.engines.base import EngineSpec, ExportsSlices
from tandem.errors import UnsupportedPair
from tandem.trainer.ranks.slices import TrainedSlices
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.verify.probe import differing


@dataclass(frozen=True, kw_only=True)
class SharedSlices(Shared):
    """What ``sync: shared`` is for ranks that hold an engine's slices; its options are the same."""

    capability: ClassVar[type] = ExportsSlices
    # Masters are updated beside the engine's memory, so it samples on until they are written there.
    pause: ClassVar[Literal["step", "transfer", "never"]] = "transfer"

    sums_before_pause: ClassVar[bool] = True

    @classmethod
    def of(cls, sync: WeightSync) -> Self:
        """The recipe's ``sync: shared``, for ranks with slices."""
        assert isinstance(sync, Shared)
        return cls(**{field.name: getattr(sync, field.name) for field in dataclasses.fields(sync)})

    def check(self, *, trainable: Any, engine: EngineSpec) -> None:
        """Refuse an engine that cannot share slices; how many there must be is for the ranks to say."""
        if self.capability not in engine.capabilities or (reason := engine.refuses(self.capability)):
            reason = reason if self.capability in engine.capabilities else "it has no workers that share their slices"
            pair = f"sync: shared and engine: {type(engine).__name__.lower()}"
            raise UnsupportedPair(f"{pair} do not go together with distributed.shard: weights: {reason}")

    async def bind(self, session: SyncContext) -> None:
        """Have each rank attach its worker's memory; an engine on the very weights must hold the very bytes.

        Where an adapter is trained, engines keep the weights that they were started on.

        Raises:
            UnsupportedPair: names the first weight that the engine holds otherwise.
        """
        engine, trained = session.engine, _trained(session)
        assert isinstance(engine, ExportsSlices)
        await session.pause()
        if session.trainable.payload == "adapter":
            return
        await trained.attach(await engine.exports_of_workers())
        if not session.fresh:
            return
        _, stored, engines = await trained.sums(engine, (await trained.all("checksums"))[0])
        for name, sums in engines.items():
            if wrong := differing(stored, sums):
                other = f"{name} holds {wrong[0]!r} with other values than the ranks, or not at all"
                raise UnsupportedPair(f"sync shared: {other}; use distributed.shard: states")

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Each rank rounds its masters into its worker's slices; returns the bytes that ranks received for it.

        An adapter is written into the slot of each engine.
        """
        if (copied := await self._adapted(session)) is not None:
            return copied
        return sum(await _trained(session).all("publish"))


def _trained(session: SyncContext) -> TrainedSlices:
    assert isinstance(session.trained, TrainedSlices)
    return session.trained
