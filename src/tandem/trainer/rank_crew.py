"""A step on several ranks: the lead's crew, and what a follower does for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tandem.distributed.crew import Ranks
from tandem.distributed.follower import Handler
from tandem.metrics import Value
from tandem.pending import PendingMetrics
from tandem.trainer.objective import OldLogprobs
from tandem.trainer.pack import Micro, StepBatch
from tandem.trainer.rank_wire import metrics_of, metrics_to_plain, micro_of, micro_to_plain
from tandem.trainer.step import BatchPass
from tandem.trainer.work import LocalWork
from tandem.transport.sharing import finish


class RankWork:
    """One rank's micro-batches of a step, round after round, and what later updates on them take over."""

    def __init__(self, work: LocalWork):
        self.work = work
        self._compute = work.policy.compute
        self._micros: list[Micro | None] = []
        self._old: list[OldLogprobs | None] = []

    def take(self, plains: Sequence[Mapping[str, Any] | None]) -> None:
        """Micro-batches of a new step, as plain data; None for a round in which this rank has none."""
        device, is_shared = self.work.policy.device, self.work.context is not None
        self._micros = [None if plain is None else micro_of(plain, device, is_shared=is_shared) for plain in plains]
        self._old = [None] * len(plains)

    async def passed(
        self, queued: Callable[[], None] = lambda: None
    ) -> tuple[list[dict[str, Value]], list[list[float]]]:
        """Forward and backward over them; metrics and logprobs of those that there are."""
        work, passes = self.work, list[tuple[PendingMetrics, Tensor]]()
        work.hook()
        await self._compute(work.begin_pass, len(self._micros))
        for i, micro in enumerate(self._micros):
            if micro is None:
                await self._compute(work.reduce)
                continue
            pending, logprobs_N, self._old[i] = await self._compute(work.micro, micro, self._old[i])
            passes.append((pending, logprobs_N))
        await self._compute(work.end_pass)
        queued()
        return await self._compute(work.settle, passes)

    @property
    def old_logprobs(self) -> list[OldLogprobs]:
        """Of the micro-batches that there are."""
        return [old for old in self._old if old is not None]


class RankCrew:
    """All ranks, as the lead's step sees them."""

    def __init__(self, work: LocalWork, ranks: Ranks, *, context_parallel: int = 1):
        self._shared = context_parallel
        self._mine = RankWork(work)
        self._work, self._compute, self._ranks = work, work.policy.compute, ranks

    async def passed(self, batch: StepBatch, old: Sequence[OldLogprobs], queued: Callable[[], None]) -> BatchPass:
        """Every rank computes its micro-batches; results are in the batch's order."""
        # Ranks that share sequences are neighbours, and get the same.
        dealt = [self._dealt(batch, rank) for rank in range(self._ranks.world)]
        if not old:
            self._mine.take([None if i is None else micro_to_plain(batch.micro[i]) for i in dealt[0]])

        def body(rank: int) -> Any:
            if old:
                return None
            return [None if i is None else micro_to_plain(batch.micro[i]) for i in dealt[rank]]

        (metrics, logprobs), replies = await self._ranks.execute("micros", body, self._mine.passed(queued))
        of_ranks = [(metrics, logprobs)]
        of_ranks += [([metrics_of(plain) for plain in reply["metrics"]], reply["logprobs"]) for reply in replies]
        results: dict[int, tuple[Mapping[str, Value], Sequence[float]]] = {}
        for indices, (its_metrics, its_logprobs) in zip(dealt, of_ranks, strict=True):
            there = [i for i in indices if i is not None]
            results |= dict(zip(there, zip(its_metrics, its_logprobs, strict=True), strict=True))
        every = [results[i] for i in range(len(batch.micro))]
        return BatchPass(
            metrics=[m for m, _ in every], logprobs=[p for _, p in every], old_logprobs=self._mine.old_logprobs
        )

    def _dealt(self, batch: StepBatch, rank: int) -> list[int | None]:
        """Index of a rank's micro-batch in each round."""
        if not batch.rounds:  # all ranks share all of them
            return list(range(len(batch.micro)))
        return [round_[rank // self._shared] for round_ in batch.rounds]

    async def apply(self, lr: float, max_grad_norm: float) -> Tensor:
        """Every rank updates its part, and has all weights when it returns."""
        work = self._compute(self._work.apply, lr, max_grad_norm)
        return (await self._ranks.execute("apply", lambda rank: [lr, max_grad_norm], work))[0]

    async def norms(self, queued: Sequence[Tensor]) -> list[float]:
        """The same on all ranks: the lead's."""
        return await self._compute(self._work.norms, queued)

    async def fold(self) -> None:
        """Fold the trained parameters into the model of every rank."""
        await self._ranks.execute("fold", None, self._compute(self._work.fold))

    async def move(self) -> None:
        """Have every rank's reference follow the policy."""
        await self._ranks.execute("move", None, self._compute(self._work.move))


def handlers(work: LocalWork) -> dict[str, Handler]:
    """What a follower does for each command of a step. Weights are written when it replies, and not only queued."""
    mine, compute = RankWork(work), work.policy.compute

    async def micros(body: Any) -> Any:
        if body is not None:
            mine.take(body)
        metrics, logprobs = await mine.passed()
        return {"metrics": [metrics_to_plain(one) for one in metrics], "logprobs": logprobs}

    async def apply(body: Any) -> None:
        await compute(work.apply, *body)
        await compute(finish, work.policy.device)

    async def fold(body: Any) -> None:
        await compute(work.fold)
        await compute(finish, work.policy.device)

    async def move(body: Any) -> None:
        await compute(work.move)

    return {"micros": micros, "apply": apply, "fold": fold, "move": move}
