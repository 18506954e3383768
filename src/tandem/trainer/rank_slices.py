"""Ranks whose weights are cut as a tensor-parallel engine's are: the lead's commands, and each rank's part in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.distributed.crew import Ranks
from tandem.distributed.follower import Handler
from tandem.distributed.slices import EngineSlice, Slice
from tandem.errors import TransportError
from tandem.transport.parts import AttachedPart, attach_parts
from tandem.transport.sharing import finish
from tandem.weight_sync.verify.probe import Checksums

if TYPE_CHECKING:
    from tandem.distributed.slice_writer import SliceWriter
    from tandem.distributed.weight_shards import ShardedPolicy


class RankSlices:
    """One rank's shards, and the memory of the engine's worker on its device; called on the compute thread."""

    def __init__(self, policy: ShardedPolicy):
        self.policy = policy
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
        self._slices = {name: [_slice(part) for part in of] for name, of in parts.items()}
        places = {part.tensor.device for of in self._slices.values() for part in of}
        if places != {self._weights.device}:
            return (
                f"it is on {self._weights.device}, and the memory of its engine's worker on "
                f"{', '.join(map(str, places))}: workers must be on the ranks' devices in order"
            )
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

    def scores(self, tokens: Sequence[int], temperatures: Sequence[float]) -> list[list[float]]:
        """``Policy.scores``, after which no gathered weight is left."""
        rows = self.policy.scores(tokens, *temperatures)
        self._weights.reshard()
        return rows

    def finite(self) -> bool:
        """True if all values of this rank's shards are finite."""
        return all(bool(torch.isfinite(local).all()) for _, local in self._weights.local_parameters)

    def gather(self, take: Callable[[str, Tensor], None]) -> None:
        """Gather all weights, one after another, and hand each over."""
        for name, tensor in self._weights.whole([name for name, _ in self._weights.model.named_parameters()]):
            take(name, tensor)


def _slice(part: AttachedPart) -> EngineSlice:
    return EngineSlice(part=Slice.at(part.first, part.tensor.shape), tensor=part.tensor)


class Skeleton:
    """A model without its weights, which makes whole ones of it in host memory.

    Args:
        model: whole, on any device; it is left as it is.
    """

    def __init__(self, model: nn.Module):
        self._bare = _with_weights(model, {name: p.to("meta") for name, p in model.named_parameters()})

    def bare(self) -> nn.Module:
        """The model on the meta device."""
        return copy.deepcopy(self._bare)

    def filled(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model with these weights; tied ones are given once."""
        return _with_weights(self._bare, weights)


def _with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model with other weights in the place of its own, which are not copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(weights[name].detach(), requires_grad=p.requires_grad)
        for name, p in model.named_parameters()
    }
    return copy.deepcopy(model, memo)


class SliceCrew:
    """All ranks with slices of the weights, as the lead's weight sync and checkpoints see them."""

    def __init__(self, mine: RankSlices, skeleton: Skeleton, ranks: Ranks):
        self._mine, self._skeleton, self._ranks = mine, skeleton, ranks
        self._compute = mine.policy.compute

    async def attach(self, exports: Sequence[Sequence[Any]]) -> None:
        """Have each rank attach the memory of its own worker: neighbours have those of one engine.

        Raises:
            TransportError: a rank cannot, or an engine has another number of workers.
        """
        ranks = self._ranks.world // len(exports)
        for number, workers in enumerate(exports):
            if len(workers) != ranks:
                raise TransportError(
                    f"engine {number} has {len(workers)} workers, and {ranks} ranks share it: it was left by this "
                    "run's trainer when engines had as many as it has. Go on once it has ended, which it does after "
                    "engine.linger_seconds"
                )
        every = [export for workers in exports for export in workers]
        own = self._compute(self._mine.attach, every[0])
        why, others = await self._ranks.execute("attach_slices", lambda rank: every[rank], own)
        if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate((why, *others)) if reason]:
            raise TransportError(failed[0])

    async def publish(self) -> int:
        """Every rank writes its worker's slices; bytes that all of them received from each other."""
        own = self._compute(self._mine.publish)
        received, others = await self._ranks.execute("publish_slices", None, own)
        return int(received + sum(others))

    async def checksums(self) -> Checksums:
        """Of all weights as they are published."""
        return (await self._ranks.execute("checksum_slices", None, self._compute(self._mine.checksums)))[0]

    async def scores(self, tokens: Sequence[int], temperatures: Sequence[float]) -> list[list[float]]:
        """Logprobs of tokens by the weights of all ranks."""
        own = self._compute(self._mine.scores, tokens, temperatures)
        body = [list(tokens), list(temperatures)]
        return (await self._ranks.execute("score_slices", lambda rank: body, own))[0]

    async def finite(self) -> bool:
        """True if all values of all ranks are finite."""
        mine, others = await self._ranks.execute("check_slices", None, self._compute(self._mine.finite))
        return mine and all(others)

    async def whole(self) -> nn.Module:
        """The model with all its weights, in this process's host memory."""
        weights: dict[str, Tensor] = {}

        def take(name: str, tensor: Tensor) -> None:
            weights[name] = tensor.cpu()

        await self._ranks.execute("gather_slices", None, self._compute(self._mine.gather, take))
        return self._skeleton.filled(weights)


def slice_handlers(mine: RankSlices) -> dict[str, Handler]:
    """What a follower does for each of these commands."""
    compute = mine.policy.compute

    async def attach(body: Any) -> str:
        return await compute(mine.attach, body)

    async def publish(body: Any) -> int:
        return await compute(mine.publish)

    async def checksums(body: Any) -> None:
        await compute(mine.checksums)

    async def scores(body: Any) -> None:
        await compute(mine.scores, *body)

    async def finite(body: Any) -> bool:
        return await compute(mine.finite)

    async def gather(body: Any) -> None:
        await compute(mine.gather, lambda name, tensor: None)

    return {
        "attach_slices": attach,
        "publish_slices": publish,
        "checksum_slices": checksums,
        "score_slices": scores,
        "check_slices": finite,
        "gather_slices": gather,
    }
