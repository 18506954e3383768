"""Ranks as processes of their own, each on a GPU of this machine, with the groups that a run's ranks have."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from tandem.config.sections import Distributed
from tandem.distributed import gradient_sums, sharding
from tandem.distributed.group import DataGroup
from tandem.model.context import heads_of_row, joined, named, tokens_of_rank
from tandem.optimizers.adamw import AdamW
from tandem.trainer.ranks.parts import RankParts
from tandem.transport.rendezvous import Rendezvous, serve

SHAPES = ((640, 256), (70_001,), (33, 7))
"""Of parameters: cut evenly, cut with a rest, and updated whole by every rank."""


class Ranks:
    """As many processes as ranks, which have loaded torch once and connect anew for each piece of work."""

    def __init__(self, world: int):
        self.world = world
        self._processes = ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("spawn"))

    def __call__(self, work: Callable[..., Any], *arguments: Any, context: int = 1, seconds: float = 60.0) -> list[Any]:
        """What every rank's ``work`` returns, in order of rank."""
        store, rendezvous = serve(Rendezvous(host="127.0.0.1", world=self.world, backend="gloo", seconds=seconds))
        # One for each process: a rank's connecting ends with that of all others.
        submit = self._processes.submit
        futures = [submit(_rank, rendezvous, rank, context, work, arguments) for rank in range(self.world)]
        results = [future.result(timeout=4 * seconds) for future in futures]
        del store
        return results

    def close(self) -> None:
        """End them."""
        self._processes.shutdown(cancel_futures=True)


def _rank(rendezvous: Rendezvous, rank: int, context: int, work: Callable[..., Any], arguments: Any) -> Any:
    parts = _connected(rendezvous, rank, context)
    result = work(parts, *arguments)
    torch.cuda.synchronize()
    parts.abort()
    return result


def _connected(rendezvous: Rendezvous, rank: int, context: int = 1) -> RankParts:
    device = torch.device("cuda", rank)
    return RankParts.connect(rendezvous, rank, device, Distributed(context_parallel=context))


def values(rank: int, *shape: int, device: torch.device) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    made = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, shape, generator=made).float().to(device)


# What ranks do


def sums(parts: RankParts) -> dict[str, Any]:
    """Reductions of every kind that a run has."""
    group, device = parts.group, parts.group.device
    whole = values(group.rank, 7, device=device)
    square = torch.tensor(float(group.rank + 1), dtype=torch.float64, device=device)
    started = torch.tensor([group.rank == 0, group.rank == 1, False], dtype=torch.uint8, device=device)
    rows = values(group.rank, group.world, 5, device=device)
    own = {dtype: torch.empty(5, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
    works = [group.all_reduce(whole), group.all_reduce(square), group.all_reduce(started, largest=True)]
    works += [group.reduce_scatter(row, rows.to(dtype)) for dtype, row in own.items()]
    for work in works:
        work.wait()
    return {
        "whole": whole.tolist(),
        "square": square.item(),
        "started": started.tolist(),
        "own": [row.tolist() for row in own.values()],
    }


def gathered(parts: RankParts) -> list[Any]:
    """Wholes of several sizes and dtypes in one kernel, and one alone, each in place."""
    group = parts.group
    gathers = []
    for sizes in ((4, 1, 3), (2,)):
        memory = [torch.full((group.world * size + 1,), -1.0, device=group.device).bfloat16() for size in sizes]
        wholes = [whole[1:] for whole in memory]  # as unaligned as a rest of a parameter
        for whole in wholes:
            whole.chunk(group.world)[group.rank].fill_(float(group.rank))
        group.all_gather(wholes)
        gathers += [whole.float().tolist() for whole in memory]
    return gathers


def updated(group: DataGroup, dtype: torch.dtype, bucket: int) -> list[Tensor]:
    """Weights after three updates by gradients of backward passes, as the update's own thread has them."""
    device = group.device
    named = [(str(i), Parameter((values(9, *shape, device=device) / 64).to(dtype))) for i, shape in enumerate(SHAPES)]
    sharding.SMALL, gradient_sums.BUCKET = 1024, bucket
    stepper = sharding.ShardedStepper(AdamW(lr=0.01), named, group)
    for _, parameter in named:
        parameter.register_post_accumulate_grad_hook(stepper.accumulate)
    for step in range(3):
        for micro in range(2):
            if micro == 0 or group.rank == 0:  # the other ranks have none in this round
                factors = [values(100 * step + 10 * micro + group.rank, *p.shape, device=device) for _, p in named]
                sum((p.float() * f).sum() for (_, p), f in zip(named, factors, strict=True)).backward()  # type: ignore[union-attr]
            stepper.flush()
        stepper.step(0.01, 1.0)
    return [parameter.detach().float().cpu() for _, parameter in named]


def updated_on_gpu(parts: RankParts, dtype: torch.dtype, bucket: int) -> list[Tensor]:
    """The same over NCCL."""
    return updated(parts.group, dtype, bucket)


def exchanged(parts: RankParts, rank: int | None = None) -> list[Any]:
    """Tokens for heads and back, with gradients, and values of all ranks."""
    return exchanges(parts.context, parts.group.rank if rank is None else rank, parts.group.device)


def exchanges(group: ProcessGroup, rank: int, device: torch.device) -> list[Any]:
    """The same of a group of whatever backend."""
    query, key, value = (
        (values(10 * part + rank, 1, heads, 6, 8, device=device) / 8).requires_grad_()
        for part, heads in enumerate((4, 2, 2))
    )
    q, k, v = heads_of_row(query, key, value, named(group))
    out = tokens_of_rank((q + k.repeat_interleave(2, 1) * v.repeat_interleave(2, 1)).transpose(1, 2), named(group))
    logprobs = joined(out.sum((0, 2, 3)), torch.arange(6, device=device) + 6 * rank, 12, group)
    (logprobs * torch.arange(12, device=device)).sum().backward()
    return [one.detach().cpu().tolist() for one in (q, k, v, out, logprobs, query.grad, key.grad, value.grad)]  # type: ignore[union-attr]


# A rank that is gone, or does not come


def lost(rendezvous: Rendezvous, rank: int, results: Any) -> None:
    """Rank 1 is killed before a collective that rank 0 is in; tells the seconds until rank 0 was free."""
    parts = _connected(rendezvous, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(1 << 20, device=parts.group.device)

    def wait() -> None:
        parts.group.all_reduce(tensor).wait()
        tensor.sum().item()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(3.0)
    in_it = waiting.is_alive()
    begin = time.perf_counter()
    parts.give_up()
    waiting.join(60.0)
    results.put((in_it, waiting.is_alive(), time.perf_counter() - begin))


def late(rendezvous: Rendezvous, rank: int, results: Any) -> None:
    """Rank 1 does not come to a collective; tells what rank 0 is told, when, and what was under way."""
    parts = _connected(rendezvous, rank)
    if rank == 1:
        time.sleep(6 * rendezvous.seconds)
        return
    begin = time.perf_counter()
    parts.group.all_reduce(torch.ones(8, device=parts.group.device))
    fault = asyncio.run(asyncio.wait_for(parts.fault(), 5 * rendezvous.seconds))
    seconds = time.perf_counter() - begin
    parts.abort()
    results.put((fault, seconds))
