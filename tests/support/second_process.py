"""Another process that lends tensors, borrows or receives them, forked from one that has torch loaded."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from support.rank_processes import forkserver
from torch import Tensor

from tandem.errors import TransportError
from tandem.transport.collective import Member
from tandem.transport.rendezvous import Rendezvous
from tandem.transport.sharing import attach, export_host


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines if "Rss" in line)}


class Jobs:
    """What another process does."""

    held: ClassVar[dict[str, Tensor]] = {}
    lent: Any = None
    member: Member

    def host(self, rendezvous: dict[str, Any]) -> int:
        self.member = Member.host(Rendezvous(**rendezvous))
        return self.member.rendezvous.port

    def connect(self, then: int) -> None:
        self.member.connect()
        os.kill(os.getpid(), then)

    def join(
        self, rendezvous: dict[str, Any], rank: int, publishes: Sequence[Any], bucket: int, dies_at: str = ""
    ) -> list[list[Any]] | str:
        """What arrives in each publish, or why nothing more does."""
        out = []
        try:
            member = Member.join(Rendezvous(**rendezvous), rank, who=f"engine {rank}")
            for entries in publishes:
                for name, tensor in (pair for some in member.receive(entries, bucket) for pair in some):
                    if name == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    out.append(described(name, tensor))
            member.close()
        except TransportError as error:
            return str(error)
        return out

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


def described(name: str, tensor: Tensor) -> list[Any]:
    """Its name, shape, type and bytes."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [name, list(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()]


def obey(connection: Connection, output: Path) -> None:
    with output.open("wb") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    jobs = Jobs()
    for name, options in iter(connection.recv, None):
        connection.send(getattr(jobs, name)(**options))


class Peer:
    """Another process that does what it is told; what it says is in a file."""

    def __init__(self, output: Path = Path(os.devnull)) -> None:
        # What is forked from a process that has looked at the cards cannot use them.
        context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else forkserver()
        self._connection, theirs = context.Pipe()
        self._output = output
        self.process = context.Process(target=obey, args=(theirs, output), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, do: str, **options: Any) -> Any:
        self.give(do, **options)
        return self.answer()

    def give(self, do: str, **options: Any) -> None:
        self._connection.send((do, options))

    def answer(self) -> Any:
        return self._connection.recv()

    def leave(self) -> tuple[str, int | None]:
        """End it; what it output, and how it ended."""
        self._connection.send(None)
        self.process.join()
        return self._output.read_text(), self.process.exitcode

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
