"""Ranks whose weights are cut as a tensor-parallel engine's are: the lead's commands, and each rank's part in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from tandem.distributed.crew import Ranks
from tandem.distributed.follower import Handler
from tandem.distributed.shared_slices import SharedSlices, TrainedSlices
from tandem.distributed.slices import EngineSlice, Slice
from tandem.engines.base import Engine, EngineRequirements
from tandem.errors import TransportError
from tandem.trainer.ranks.lead import ManyRanks
from tandem.transport.parts import attach_parts
from tandem.transport.sharing import finish
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.probe import Checksums

if TYPE_CHECKING:
    from tandem.distributed.slice_writer import SliceWriter
    from tandem.distributed.weight_shards import ShardedPolicy

T = TypeVar("T")


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
        self._slices = {
            name: [EngineSlice(part=Slice.at(part.first, part.tensor.shape), tensor=part.tensor) for part in of]
            for name, of in parts.items()
        }
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

    def gather(self, take: Callable[[str, Tensor], None] = lambda name, tensor: None) -> None:
        """Gather all weights, one after another, and hand each over."""
        for name, tensor in self._weights.whole([name for name, _ in self._weights.model.named_parameters()]):
            take(name, tensor)


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


class LeadSlices:
    """All ranks with slices of the weights, as the lead's weight sync and checkpoints see them."""

    def __init__(self, slices: RankSlices, skeleton: Skeleton, ranks: Ranks):
        self._slices, self._skeleton, self._ranks = slices, skeleton, ranks

    async def _all(self, command: str, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Have every rank execute a command, this one ``function``; results in order of rank."""
        here = self._slices.policy.compute(function, *arguments)
        result, others = await self._ranks.execute(command, lambda rank: list(arguments), here)
        return [result, *others]

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
        of_ranks = [export for workers in exports for export in workers]
        here = self._slices.policy.compute(self._slices.attach, of_ranks[0])
        why, others = await self._ranks.execute("attach_slices", lambda rank: [of_ranks[rank]], here)
        if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate((why, *others)) if reason]:
            raise TransportError(failed[0])

    async def publish(self) -> int:
        """Every rank writes its worker's slices; bytes that all of them received from each other."""
        return sum(await self._all("publish_slices", self._slices.publish))

    async def checksums(self) -> Checksums:
        """Of all weights as they are published."""
        return (await self._all("checksum_slices", self._slices.checksums))[0]

    async def scores(self, tokens: Sequence[int], temperatures: Sequence[float]) -> list[list[float]]:
        """Logprobs of tokens by the weights of all ranks."""
        return (await self._all("score_slices", self._slices.scores, list(tokens), list(temperatures)))[0]

    async def finite(self) -> bool:
        """True if all values of all ranks are finite."""
        return all(await self._all("check_slices", self._slices.finite))

    async def whole(self) -> nn.Module:
        """The model with all its weights, in this process's host memory."""
        weights: dict[str, Tensor] = {}

        def take(name: str, tensor: Tensor) -> None:
            weights[name] = tensor.cpu()

        await self._ranks.execute("gather_slices", None, self._slices.policy.compute(self._slices.gather, take))
        return self._skeleton.filled(weights)


def slice_handlers(slices: RankSlices) -> dict[str, Handler]:
    """A follower's part in each of these commands; what all ranks have alike is the lead's to tell."""

    def of(function: Callable[..., Any], *, replies: bool) -> Handler:
        async def handle(body: Any) -> Any:
            result = await slices.policy.compute(function, *(body or ()))
            return result if replies else None

        return handle

    return {
        "attach_slices": of(slices.attach, replies=True),
        "publish_slices": of(slices.publish, replies=True),
        "checksum_slices": of(slices.checksums, replies=False),
        "score_slices": of(slices.scores, replies=False),
        "check_slices": of(slices.finite, replies=True),
        "gather_slices": of(slices.gather, replies=False),
    }


class SlicedRanks(ManyRanks):
    """Several ranks, each with the slices of one worker of an engine: none of them has all weights."""

    _slices: LeadSlices

    async def start_engine(self, stack: AsyncExitStack, requirements: EngineRequirements) -> Engine:
        """Start the engines, and cut the policy among the ranks where each worker has its slices now."""
        engine = await super().start_engine(stack, requirements)
        whole = self.policy
        skeleton = await whole.compute(Skeleton, whole.model)
        cutting = whole.compute(self.parts.cut, whole, skeleton.bare(), whole.model)
        self.policy = cut = await self._all("cut", None, cutting)
        self._slices = LeadSlices(RankSlices(cut), skeleton, self.ranks)
        return engine

    @property
    def sync(self) -> WeightSync:
        """The recipe's, by slices."""
        return SharedSlices.of(self.config.sync)

    def trained(self) -> Trained:
        """The weights of all ranks."""
        return TrainedSlices(self.config.trainable, self.policy, self._slices)

    async def load_weights(self, path: Path) -> None:
        """Nothing: other ranks take theirs from this one when it is cut."""

    async def model(self) -> nn.Module:
        """A copy of the model with all weights, gathered from all ranks, in host memory."""
        return await self._slices.whole()
