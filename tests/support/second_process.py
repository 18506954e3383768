"""A second process that lends tensors and borrows them, forked from one that has torch loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from support.rank_processes import forkserver
from torch import Tensor

from tandem.transport.sharing import attach, export_host


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines if "Rss" in line)}


class Jobs:
    """What a second process does."""

    held: ClassVar[dict[str, Tensor]] = {}
    lent: Any = None

    def attach(self, description: dict[str, Any]) -> None:
        self.held.update(attach(description))

    def read(self, name: str) -> Any:
        return self.held[name].double().tolist()

    def fill(self, name: str, value: float) -> None:
        self.held[name].fill_(value)
        if self.held[name].is_cuda:
            torch.cuda.synchronize()

    def add_everywhere(self) -> dict[str, int]:
        before = _memory()
        for tensor in self.held.values():
            tensor.add_(1)
        return {key: value - before[key] for key, value in _memory().items()}

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def lend(self, path: str) -> dict[str, Any]:
        self.lent = export_host({"w": torch.arange(6.0)}, Path(path))
        return dict(self.lent.description)

    def forget(self) -> None:
        self.held.clear()


def obey(connection: Connection) -> None:
    jobs = Jobs()
    while True:
        name, options = connection.recv()
        connection.send(getattr(jobs, name)(**options))


class Peer:
    """A second process that does what it is told."""

    def __init__(self) -> None:
        self._connection, theirs = forkserver().Pipe()
        self.process = forkserver().Process(target=obey, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, do: str, **options: Any) -> Any:
        self._connection.send((do, options))
        return self._connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def second_process() -> Iterator[Peer]:
    peer = Peer()
    try:
        yield peer
    finally:
        peer.kill()
