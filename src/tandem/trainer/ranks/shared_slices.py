"""``sync: shared`` of ranks whose weights are cut as a tensor-parallel engine's are: each writes its worker's slices.

Only the lead talks to the engine. What reads or writes weights is a command that all ranks execute together: each
rounds its float32 masters into the memory of the worker on its device, scores with what it has, checksums it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from tandem.engines.base import EngineSpec, ExportsSlices
from tandem.errors import UnsupportedPair
from tandem.model.policy import Policy
from tandem.transport.buckets import TensorEntry
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.probe import Checksums, differing

if TYPE_CHECKING:
    from tandem.trainer.ranks.slices import LeadSlices
    from tandem.transport.collective import Member


class TrainedSlices(Trained):
    """The weights of all ranks, as weight sync reads them on the lead; an adapter is whole on each.

    Args:
        trainable: the recipe's.
        policy: the lead's part of it.
        ranks: all ranks, which take part in whatever is read.
    """

    gathers: ClassVar[int] = 2

    def __init__(self, trainable: Any, policy: Policy, ranks: LeadSlices):
        super().__init__(trainable, policy)
        self.ranks = ranks
        self._is_whole = trainable.payload == "adapter"

    @property
    def manifest(self) -> list[TensorEntry]:
        """As it is published, of whole tensors."""
        if self._is_whole:
            return super().manifest
        dtype = str(self._policy.dtype).removeprefix("torch.")
        return [entry._replace(dtype=dtype) for entry in super().manifest]

    async def send(self, member: Member, bucket_bytes: int) -> int:
        """Send the payload, gathered bucket by bucket."""
        if self._is_whole:
            return await super().send(member, bucket_bytes)
        return await self.ranks.send(member, self.manifest, bucket_bytes)

    async def save_weights(self, folder: Path) -> None:
        """Write the weights as a model's folder, by all ranks."""
        await self.ranks.save(folder)

    async def checksums(self) -> Checksums:
        """Checksums of the published weights as ranks would write them."""
        if self._is_whole:
            return await super().checksums()
        return _only(await self.ranks.checksums(), dict(self.source))

    async def frozen_checksums(self) -> Checksums:
        """The same of the weights that no publish changes."""
        return _only(await self.ranks.checksums(), self.frozen)

    async def finite(self) -> bool:
        """True if all trained values are finite."""
        return await (super().finite() if self._is_whole else self.ranks.finite())

    async def scores(self, tokens: Sequence[int], *temperatures: float) -> list[list[float]]:
        """Logprobs of tokens as the ranks compute them together, at several temperatures."""
        return await self.ranks.scores(tokens, temperatures)

    async def bare_scores(self, tokens: Sequence[int]) -> list[float]:
        """The same at temperature 1 without the adapter; empty where there is none."""
        if self._trainable.untrained(self._policy.model) is None:
            return []
        return (await self.ranks.scores(tokens, [1.0], bare=True))[0]


def _only(sums: Checksums, named: Mapping[str, Any]) -> Checksums:
    return {name: sums[name] for name in named}


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
        engine, ranks = session.engine, _ranks(session)
        assert isinstance(engine, ExportsSlices)
        await session.pause()
        if session.trainable.payload == "adapter":
            return
        await ranks.attach(await engine.exports_of_workers())
        if not session.fresh:
            return
        sums = await session.trained.sums(engine, await ranks.checksums())
        for name, stored in sums.engines.items():
            if wrong := differing(sums.stored, stored):
                other = f"{name} holds {wrong[0]!r} with other values than the ranks, or not at all"
                raise UnsupportedPair(f"sync shared: {other}; use distributed.shard: states")

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Each rank rounds its masters into its worker's slices; returns the bytes that ranks received for it.

        An adapter is written into the slot of each engine.
        """
        if (copied := await self._adapted(session)) is not None:
            return copied
        return await _ranks(session).publish()


def _ranks(session: SyncContext) -> LeadSlices:
    assert isinstance(session.trained, TrainedSlices)
    return session.trained.ranks
