"""Slices of cut weights: the lead's commands, each rank's part in them, and ``sync: shared`` by them.

Only the lead talks to the engine. What reads or writes weights is a command that all ranks execute together: each
rounds its float32 masters into the memory of the engine's worker on its device, scores with what it has, checksums it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from tandem.distributed.crew import Ranks
from tandem.distributed.follower import Handler
from tandem.distributed.slice_writer import SliceWriter
from tandem.distributed.slices import EngineSlice, Slice
from tandem.distributed.weight_shards import ShardedPolicy
from tandem.engines.base import EngineSpec, ExportsSlices
from tandem.errors import TransportError, UnsupportedPair
from tandem.trainable.full import write_index, write_part
from tandem.transport.bridge import attach_parts
from tandem.transport.buckets import TensorEntry
from tandem.transport.collective import Member
from tandem.transport.daemon import on_daemon
from tandem.transport.sharing import finish
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, WeightSync
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.checksums import Checksums, differing


class RankSlices:
    """One rank's shards, and the memory of the engine's worker on its device, if there is one beside it."""

    def __init__(self, policy: ShardedPolicy, skeleton: Any):
        self.policy = policy
        self._skeleton = skeleton  # transformers' model, of which the configuration is written
        self._weights = policy.weights
        self._slices: dict[str, list[EngineSlice]] = {}
        self._writer: SliceWriter | None = None
        """Of the attached memory; made by the first publish, in which all ranks take part."""

    def attach(self, export: Mapping[str, Any]) -> str:
        """Attach a worker's memory; why that cannot be, and empty once it is done.

        All ranks must have tried before one can tell: none may be left waiting for another in what follows.
        """
        self._slices, self._writer = {}, None  # of a worker that is gone
        try:
            parts = attach_parts(export["parameters"], export["places"])
        except TransportError as error:
            return str(error)
        self._slices = {
            name: [EngineSlice(part=Slice.at(part.first, part.tensor.shape), tensor=part.tensor) for part in of]
            for name, of in parts.items()
        }
        places = {part.tensor.device for of in self._slices.values() for part in of}
        if places != {self._weights.device}:
            worker = ", ".join(map(str, places))
            return f"it is on {self._weights.device} and its engine's worker on {worker}; they must share a device"
        return ""

    def publish(self) -> int:
        """Write the weights into the worker's memory, complete when it returns; bytes received from other ranks."""
        if self._writer is None:
            self._writer = self._weights.writer(self._slices)
        received = self._writer.write()
        finish(self._weights.device)  # the worker reads on a stream of its own
        return received

    def checksums(self) -> Checksums:
        """Of all weights as they are published."""
        return self._weights.checksums()

    def scores(self, tokens: Sequence[int], temperatures: Sequence[float], bare: bool = False) -> list[list[float]]:
        """``Policy.scores``, or without the adapter; after it no gathered weight is left."""
        model: Any = self.policy.model
        with model.disable_adapter() if bare else nullcontext():
            rows = self.policy.scores(tokens, *temperatures)
        self._weights.reshard()
        return rows

    def finite(self) -> bool:
        """True if all values of this rank's shards are finite."""
        return all(bool(torch.isfinite(local).all()) for local in self._weights.shards().values())

    def send(self, names: Sequence[str], bucket_bytes: int) -> None:
        """Give the lead this rank's parts of these tensors, which it sends to engines."""
        if self._weights.replica == 0:
            shards = self._weights.shards()
            for name in names:
                self._weights.gather(name, shards[name], None, most_bytes=bucket_bytes)

    def send_all(
        self, member: Member, manifest: Sequence[TensorEntry], bucket_bytes: int
    ) -> tuple[int, TransportError | None]:
        """The lead's part: each bucket is gathered while those before are on the wire.

        Returns:
            The bytes sent, and why engines have not got them: the other ranks' parts are taken all the same.
        """
        if self._weights.device.type == "cuda":
            torch.cuda.synchronize(self._weights.device)  # the optimizer wrote on another thread's stream
        shards, left = self._weights.shards(), deque(entry.name for entry in manifest)

        def pack(views: Sequence[tuple[str, Tensor]]) -> None:
            for name, view in views:
                self._weights.gather(name, shards[name], view, most_bytes=bucket_bytes)
                left.popleft()

        try:
            return member.send_packed(manifest, pack, bucket_bytes), None
        except TransportError as error:
            self.send(left, bucket_bytes)
            return 0, error

    def stage(self) -> Callable[[Path], None]:
        """Gather this rank's share of whole weights in host memory; what writes it into a model's folder.

        Every rank has a file, about as large as the others'; no rank ever has all weights.
        """
        weights, ranks, replicas = self._weights, self._weights.ranks, self._weights.num_replicas
        sizes, staged = [0] * (ranks * replicas), dict[str, Tensor]()
        number = weights.replica * ranks + weights.rank
        for name, shard in weights.shards().items():
            file = sizes.index(min(sizes))
            sizes[file] += math.prod(weights.shapes[name])
            if file // ranks == weights.replica:
                here = torch.empty(weights.shapes[name], dtype=weights.dtype) if file == number else None
                weights.gather(name, shard, here, to=file % ranks)
                if here is not None:
                    staged[name] = here
        return lambda folder: write_part(self._skeleton, staged, folder, number, len(sizes))

    def save(self, folder: str) -> None:
        """Write this rank's file of a model's folder."""
        self.stage()(Path(folder))


class TrainedSlices(Trained):
    """The weights of all ranks, as weight sync reads them on the lead; an adapter is whole on each.

    Args:
        trainable: the recipe's.
        slices: the lead's part.
        ranks: all ranks, which take part in whatever is read.
    """

    gathers: ClassVar[int] = 2

    def __init__(self, trainable: Any, slices: RankSlices, ranks: Ranks):
        super().__init__(trainable, slices.policy)
        self._slices, self._ranks = slices, ranks
        self._is_whole = trainable.payload == "adapter"

    async def all(self, name: str, *arguments: Any) -> list[Any]:
        """Have every rank execute a method of its ``RankSlices``; results in order of rank."""
        here = self._policy.compute(getattr(self._slices, name), *arguments)
        result, others = await self._ranks.execute(f"{name}_slices", lambda rank: list(arguments), here)
        return [result, *others]

    async def attach(self, exports: Sequence[Sequence[Any]]) -> None:
        """Have each rank attach the memory of its own worker: neighbours have those of one engine.

        Raises:
            TransportError: a rank cannot, or an engine has another number of workers.
        """
        ranks = self._ranks.world // len(exports)
        for number, workers in enumerate(exports):
            if len(workers) != ranks:
                left = "it is left of a run with other ranks; go on once it has ended (engine.linger_seconds)"
                raise TransportError(f"engine {number} has {len(workers)} workers, and {ranks} ranks share it: {left}")
        of_ranks = [export for workers in exports for export in workers]
        here = self._policy.compute(self._slices.attach, of_ranks[0])
        why, others = await self._ranks.execute("attach_slices", lambda rank: [of_ranks[rank]], here)
        if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate((why, *others)) if reason]:
            raise TransportError(failed[0])

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
        names = [entry.name for entry in self.manifest]
        sending = on_daemon(self._slices.send_all, member, self.manifest, bucket_bytes)
        (sent, error), _ = await self._ranks.execute("send_slices", lambda rank: [names, bucket_bytes], sending)
        if error is not None:
            raise error
        return sent

    async def save_weights(self, folder: Path) -> None:
        """Write the weights as a model's folder, each rank a file."""
        await self.all("save", str(folder))
        await self._policy.compute(write_index, folder)

    async def checksums(self) -> Checksums:
        """Checksums of the published weights as ranks would write them."""
        return await (super().checksums() if self._is_whole else self._checksums_of(dict(self.source)))

    async def frozen_checksums(self) -> Checksums:
        """The same of the weights that no publish changes."""
        return await self._checksums_of(self.frozen)

    async def _checksums_of(self, named: Mapping[str, Any]) -> Checksums:
        sums = (await self.all("checksums"))[0]
        return {name: sums[name] for name in named}

    async def finite(self) -> bool:
        """True if all trained values are finite."""
        return await super().finite() if self._is_whole else all(await self.all("finite"))

    async def scores(self, tokens: Sequence[int], *temperatures: float) -> list[list[float]]:
        """Logprobs of tokens as the ranks compute them together, at several temperatures."""
        rows: list[list[float]] = (await self.all("scores", list(tokens), list(temperatures)))[0]
        return rows

    async def bare_scores(self, tokens: Sequence[int]) -> list[float]:
        """The same at temperature 1 without the adapter; empty where there is none."""
        if self._trainable.untrained(self._policy.model) is None:
            return []
        row: list[float] = (await self.all("scores", list(tokens), [1.0], True))[0][0]
        return row


def slice_handlers(slices: RankSlices) -> dict[str, Handler]:
    """A follower's part in each of these commands."""

    def of(function: Callable[..., Any]) -> Handler:
        async def handle(body: Any) -> Any:
            return await slices.policy.compute(function, *(body or ()))

        return handle

    methods = ("attach", "publish", "finite", "checksums", "scores", "send", "save")
    return {f"{name}_slices": of(getattr(slices, name)) for name in methods}


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
