"""A step's work where there are several ranks: that of each, and that of rank 0, which divides a batch among them.

Micro-batches and metrics travel as plain data, of classes that are listed here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from tandem.algorithms.losses.base import MicroBatch
from tandem.distributed.context_parallel import ContextPart, WholeRow
from tandem.distributed.crew import Ranks
from tandem.distributed.follower import Handler
from tandem.distributed.sharding import ShardedStepper
from tandem.distributed.weight_shards import WeightShardStepper
from tandem.metrics import Histogram, Max, Mean, Share, Sum, Value
from tandem.model.attention import Packed
from tandem.model.penalties import Events, Penalties, TokenHistory
from tandem.pending import PendingMetrics
from tandem.trainer.pack import Micro, StepBatch
from tandem.trainer.step import BatchPass, LocalWork, OldLogprobs, Verb
from tandem.transport.sharing import finish

T = TypeVar("T")

Results = tuple[Sequence[Mapping[str, Value]], Sequence[Sequence[float]]]
"""Metrics and logprobs of a rank's micro-batches, in order."""


@dataclass(slots=True, kw_only=True)
class RankWork(LocalWork):
    """One rank's work: its micro-batches of a step, round after round, and its part of the optimizer."""

    stepper: ShardedStepper | WeightShardStepper
    context: Any = None
    """The group of ranks that compute each micro-batch together; None: this rank computes it alone."""
    _micros: Sequence[Micro | None] = field(default=(), init=False)
    _old: list[OldLogprobs | None] = field(default_factory=list, init=False)
    _is_first: bool = field(default=True, init=False)
    """Whether no pass over them was made."""

    def take(self, plains: Sequence[dict[str, Any] | None]) -> None:
        """Micro-batches of a new step, as plain data; None for a round in which this rank has none."""
        device, is_shared = self.policy.device, self.context is not None
        self._micros = [None if plain is None else micro_of(plain, device, is_shared=is_shared) for plain in plains]
        self._old, self._is_first = [None] * len(plains), True

    async def rounds(self, queued: Callable[[], None] = lambda: None) -> Results:
        """Forward and backward over them; results of those that there are."""
        compute, passes = self.policy.compute, list[tuple[PendingMetrics, Tensor]]()
        self.hook()
        await compute(self.stepper.begin_pass, len(self._micros))
        for i, micro in enumerate(self._micros):
            if micro is None:
                if self._is_first and self.objective.reference is not None:
                    await compute(self.join_reference)
                await compute(self.reduce)
                continue
            pending, logprobs_N, self._old[i] = await compute(self.micro, micro, self._old[i])
            passes.append((pending, logprobs_N))
        await compute(self.stepper.end_pass)
        self._is_first = False
        queued()
        return await compute(self.settle, passes)

    async def divergence_rounds(self) -> list[list[float]]:
        """By how much the sampled logprobs of its micro-batches are above the reference's."""
        divergences = []
        for micro in self._micros:
            if micro is None:
                await self.policy.compute(self.join_reference)
            else:
                divergences.append(await self.policy.compute(self.divergence, micro))
        return divergences

    @torch.no_grad()
    def join_reference(self) -> None:
        """Take part in the others' pass with the reference, which gathers weights that are cut."""
        assert self.reference is not None
        with self.reference.in_place():
            self.policy.take_part()

    def reduce(self) -> None:
        """Add the gradient of a micro-batch, or nothing, to that of the other ranks."""
        self.stepper.flush()

    def part(self, micro: Micro) -> WholeRow:
        """What of a micro-batch this rank computes: with context parallelism a run of its tokens."""
        if self.context is None:
            return LocalWork.part(self, micro)
        return ContextPart.of(micro.plan, micro.tokens_T, micro.positions_T, micro.predict_N, self.context)


@dataclass(slots=True, kw_only=True)
class LeadWork(RankWork):
    """The work of all ranks, as rank 0 has it done."""

    ranks: Ranks
    context_parallel: int = 1
    """Ranks that share each micro-batch."""

    async def passed(self, batch: StepBatch, old: Sequence[OldLogprobs], queued: Callable[[], None]) -> BatchPass:
        """Every rank computes its micro-batches; results are in the batch's order."""
        indices = self._indices(batch)
        here, replies = await self._executed("micros", batch, self.rounds(queued), keep=bool(old))
        others = [(of_plain(metrics), logprobs) for metrics, logprobs in replies]
        results = [list(zip(*of_rank, strict=True)) for of_rank in (here, *others)]
        in_order = _in_order(indices, results)
        old_logprobs = [old for old in self._old if old is not None]
        return [metrics for metrics, _ in in_order], [logprobs for _, logprobs in in_order], old_logprobs

    async def divergences(self, batch: StepBatch) -> Sequence[Sequence[float]]:
        """As of one rank, each computing its own."""
        here, replies = await self._executed("divergences", batch, self.divergence_rounds())
        return _in_order(self._indices(batch), [here, *replies])

    async def _executed(
        self, command: str, batch: StepBatch, local: Coroutine[Any, Any, T], *, keep: bool = False
    ) -> tuple[T, list[Any]]:
        """Have all ranks execute a command with their micro-batches; ``keep`` for those that they have already."""
        indices = self._indices(batch)

        def body(rank: int) -> Any:
            return None if keep else [None if i is None else to_plain(batch.micro[i]) for i in indices[rank]]

        if not keep:
            self.take(body(0))
        return await self.ranks.execute(command, body, local)

    def _indices(self, batch: StepBatch) -> list[list[int | None]]:
        """Of each rank the index of its micro-batch in each round; neighbours that share sequences get the same."""
        if not batch.rounds:  # all ranks share all of them
            return [list(range(len(batch.micro)))] * self.ranks.world
        shared_by = self.context_parallel
        return [[round_[rank // shared_by] for round_ in batch.rounds] for rank in range(self.ranks.world)]

    async def every(self, verb: Verb, *arguments: Any) -> Any:
        """Have every rank do it; updated weights are there on all of them when this returns."""
        here = LocalWork.every(self, verb, *arguments)
        return (await self.ranks.execute(verb, lambda rank: list(arguments), here))[0]


def _in_order(indices: Sequence[Sequence[int | None]], results: Sequence[Sequence[T]]) -> list[T]:
    """Results of the ranks' micro-batches, in the order of the batch."""
    by_index: dict[int, T] = {}
    for of_rank, computed in zip(indices, results, strict=True):
        by_index |= dict(zip((i for i in of_rank if i is not None), computed, strict=True))
    return [by_index[i] for i in sorted(by_index)]


def handlers(work: RankWork) -> dict[str, Handler]:
    """A follower's part in each command of a step. Weights are written when it replies, and not only queued."""

    async def micros(body: Any) -> Any:
        if body is not None:
            work.take(body)
        metrics, logprobs = await work.rounds()
        return to_plain(metrics), logprobs

    async def divergences(body: Any) -> Any:
        work.take(body)
        return await work.divergence_rounds()

    def of(verb: Verb) -> Handler:
        async def handle(body: Any) -> None:
            await LocalWork.every(work, verb, *(body or ()))
            await work.policy.compute(finish, work.policy.device)

        return handle

    return {"micros": micros, "divergences": divergences, **{verb: of(verb) for verb in get_args(Verb)}}


_SENT = (Micro, Packed, MicroBatch, TokenHistory, Penalties, Events, Mean, Sum, Max, Share, Histogram)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _SENT}
_FIELDS = {kind: tuple(inspect.signature(kind).parameters) for kind in _SENT}
_KIND = "kind"
"""Key under which a mapping has the class that it is of."""


def to_plain(value: Any) -> Any:
    """Numbers, texts, bytes, lists and mappings of a value; of a tensor its type, shape and bytes."""
    if isinstance(value, Tensor):
        on_host = value.detach().cpu().contiguous()
        dtype = str(on_host.dtype).removeprefix("torch.")
        return {_KIND: "Tensor", "dtype": dtype, "shape": list(on_host.shape), "data": on_host.numpy().tobytes()}
    if isinstance(value, _SENT):
        return {_KIND: type(value).__name__, **{name: to_plain(getattr(value, name)) for name in _FIELDS[type(value)]}}
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    return [to_plain(each) for each in value] if isinstance(value, tuple | list) else value


def of_plain(plain: Any, device: torch.device | None = None) -> Any:
    """The value of ``to_plain``, tensors on a device; lists are tuples."""
    if isinstance(plain, list):
        return tuple(of_plain(each, device) for each in plain)
    if not isinstance(plain, dict):
        return plain
    if plain.get(_KIND) == "Tensor":
        # A copy: what came from the wire may not be written to.
        elements = torch.frombuffer(bytearray(plain["data"]), dtype=getattr(torch, plain["dtype"]))
        return elements.view(plain["shape"]).to(device)
    fields = {key: of_plain(each, device) for key, each in plain.items() if key != _KIND}
    return _KINDS[plain[_KIND]](**fields) if _KIND in plain else fields


def micro_of(plain: dict[str, Any], device: torch.device, *, is_shared: bool = False) -> Micro:
    """A micro-batch on a device.

    Of one that ranks share ``predict_N`` is on the host, where each sees which tokens are its own: to ask the device
    would hold up all that is queued after it.
    """
    micro: Micro = of_plain(plain, device)
    return dataclasses.replace(micro, predict_N=of_plain(plain["predict_N"])) if is_shared else micro
