"""Ranks as threads of one process, each with a data group of its own over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from tandem.distributed.group import DataGroup
from tandem.transport.rendezvous import Rendezvous, serve

T = TypeVar("T")


@contextmanager
def rank_threads(world: int, *, seconds: float = 30.0) -> Iterator[Callable[[Callable[[DataGroup], T]], list[T]]]:
    """Ranks that have met: a function that has every rank work, and returns what each did, in order of rank."""
    store, rendezvous = serve(Rendezvous(host="127.0.0.1", world=world, backend="gloo", seconds=seconds))
    groups: dict[int, DataGroup] = {}

    def joined(number: int) -> None:
        groups[number] = DataGroup(rendezvous, number, torch.device("cpu"))

    def every(threads: ThreadPoolExecutor, work: Callable[[int], T]) -> list[T]:
        futures = [threads.submit(work, number) for number in range(world)]
        return [future.result(timeout=4 * seconds) for future in futures]

    with ThreadPoolExecutor(world, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        every(threads, joined)
        yield lambda work: every(threads, lambda number: work(groups[number]))
    del store


def on_ranks(world: int, work: Callable[[DataGroup], T], *, seconds: float = 30.0) -> list[T]:
    """What every rank's ``work`` returns, in order of rank; the first error is raised."""
    with rank_threads(world, seconds=seconds) as run:
        return run(work)
