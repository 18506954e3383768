"""Rendezvous of a broadcast group: a key-value store served by rank 0, with heartbeats of its members.

The store is unencrypted and has no password: it is for a network that is trusted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from tandem.errors import TransportError
from tandem.transport.sharing import gpu_uuid

# NCCL's own watchdog answers an error by ending the process. Here errors and deadlines are this module's.
_UNSUPERVISED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # of which it sleeps four, and the process would wait for it to end
}


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address and options by which the members of a group meet; ``dataclasses.asdict`` makes it JSON."""

    host: str
    """Rank 0's address as the others reach it; it listens on no other."""
    port: int = 0
    """Its port; 0 lets rank 0 find a free one."""
    world: int
    """Members, the trainer included."""
    backend: Literal["gloo", "nccl"]
    """gloo moves bytes through host memory; nccl needs a GPU of its own for every member."""
    name: str = "weights"
    """Tells groups apart in messages and in the store."""
    seconds: float = 60.0
    """The longest wait for any rank: to join, to begin a publish, or for one bucket."""


def serve(rendezvous: Rendezvous) -> tuple[Store, Rendezvous]:
    """The store, listening on the given address alone, and the rendezvous with the port it has.

    Raises:
        TransportError: the address is not this machine's or the port is taken.
    """
    host, family = rendezvous.host, socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
    try:
        listener = socket.create_server((host, rendezvous.port), family=family, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host}:{rendezvous.port} for group {rendezvous.name!r}: {error}; expected an address of "
            "this machine that the engines reach, and a free port (0 finds one)"
        ) from error
    bound = replace(rendezvous, port=listener.getsockname()[1])
    return _store(bound, is_master=True, master_listen_fd=listener.detach()), bound


def visit(rendezvous: Rendezvous) -> Store:
    """A connection of its own to the store: one that waits inside torch then delays no other."""
    return PrefixStore(rendezvous.name, _store(rendezvous, is_master=False))


def accelerator(device: torch.device) -> str:
    """UUID of a GPU, which is the same in every process that sees it; nothing on a host."""
    return gpu_uuid(device) if device.type == "cuda" else ""


def own_address(rendezvous: Rendezvous) -> str:
    """This machine's address on the way to rank 0, the one that other members can reach it by.

    Raises:
        TransportError: nothing listens there in time.
    """
    deadline = time.monotonic() + rendezvous.seconds
    while True:
        try:
            with socket.create_connection((rendezvous.host, rendezvous.port), timeout=rendezvous.seconds) as way:
                return str(way.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"rank 0 of group {rendezvous.name!r} does not answer on {rendezvous.host}:{rendezvous.port} "
                    f"after {rendezvous.seconds:g} s ({error}); start the trainer first, and let the port through"
                ) from error
        time.sleep(0.05)


def _store(rendezvous: Rendezvous, **options: Any) -> TCPStore:
    timeout = timedelta(seconds=rendezvous.seconds)
    return TCPStore(rendezvous.host, rendezvous.port, None, timeout=timeout, wait_for_workers=False, **options)


def open_group(rendezvous: Rendezvous, rank: int, address: str, *, watched: bool = False) -> Any:
    """A process group of all ranks, which knows nothing of torch's default one. For gloo all must call it to return.

    Args:
        rendezvous: where they meet.
        rank: of this member.
        address: this machine's, at which gloo listens.
        watched: whether NCCL's watchdog notes a collective that takes longer than ``rendezvous.seconds``, which
            ``get_error`` then tells; it ends nothing by itself.
    """
    store = PrefixStore("group", visit(rendezvous))
    if rendezvous.backend == "gloo":
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=rendezvous.seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(store, rank, rendezvous.world, options)
    with unsupervised():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=rendezvous.seconds) if watched else timedelta(days=1)
        options.group_name = rendezvous.name
        return dist.ProcessGroupNCCL(store, rank, rendezvous.world, options)


class GroupStore:
    """One member's view of the group's store: status texts, heartbeats and a failure note.

    It is asked by one daemon thread, so that a store that does not answer holds nothing else up. The thread also counts
    this member's beats into the store, and reads the others' and the first note of a failure, with which it ends.

    Raises:
        ConnectionError: from every question, once the store is lost.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int):
        self.interval = min(1.0, rendezvous.seconds / 20)
        """Seconds between two beats."""
        self.note = ""
        """Why a rank gave the group up."""
        self.lost = ""
        """Why the store cannot be asked any more."""
        self._rendezvous, self._rank = rendezvous, rank
        self._others = [other for other in range(rendezvous.world) if other != rank]
        self._questions: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]]] = SimpleQueue()
        self._heard = dict.fromkeys(self._others, (0, 0.0))
        self._beaten = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tandem-board", daemon=True)
        self._thread.start()
        atexit.register(
            self.stop
        )  # a thread that ends inside torch while the interpreter shuts down aborts the process

    def announce(self, who: str) -> bool:
        """Appear to the others; False if this rank already has."""

        def question(store: Store) -> bool:
            if store.add(f"joined/{self._rank}", 1) > 1:
                return False
            for key, text in (("ready", "0"), ("done", "0"), ("who", who)):
                store.set(f"{key}/{self._rank}", text)
            return True

        return bool(self._ask(question))

    def absent(self) -> list[int]:
        """Ranks that have not announced themselves."""
        return list(self._ask(lambda store: [r for r in self._others if not store.check([f"who/{r}"])]))

    def say(self, key: str, text: str) -> None:
        """Replace what this rank says under a key, one of ``ready`` and ``done``."""
        self._ask(lambda store: store.set(f"{key}/{self._rank}", text))

    def read(self, key: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """What others, by default all, say under a key; those have announced themselves."""
        whose = self._others if ranks is None else list(ranks)
        texts = self._ask(lambda store: store.multi_get([f"{key}/{r}" for r in whose]))
        return {rank: text.decode() for rank, text in zip(whose, texts, strict=True)}

    def tell(self, why: str) -> None:
        """Leave the note of a failure, unless there is one; does not wait."""
        self._questions.put((lambda store: store.compare_set("note", "", why), Future()))

    def silent(self, seconds: float) -> list[int]:
        """Members that were heard once and not for that long. Time is counted to this member's own last beat."""
        return [rank for rank, (beats, at) in self._heard.items() if beats and self._beaten - at > seconds]

    def stop(self) -> None:
        """End the thread after what it was asked so far, rank 0's when the others' have; wait for it briefly."""
        atexit.unregister(self.stop)
        self._questions.put((lambda _: setattr(self, "_stopped", True), Future()))
        self._thread.join(timeout=4 * self.interval)

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        deadline = time.monotonic() + self._rendezvous.seconds
        while not self.lost:
            with contextlib.suppress(TimeoutError):
                return answer.result(timeout=self.interval)
            if time.monotonic() > deadline:
                self.lost = f"rank 0's store did not answer for {self._rendezvous.seconds:g} s"
        raise ConnectionError(self.lost)

    def _run(self) -> None:
        due = 0.0
        try:
            store = visit(self._rendezvous)
            while not (self._stopped or self.note):
                if time.monotonic() >= due:
                    self._beat(store)
                    due = time.monotonic() + self.interval
                with contextlib.suppress(Empty):
                    question, answer = self._questions.get(timeout=max(0.0, due - time.monotonic()))
                    answer.set_result(question(store))
            self._leave(store)
        except RuntimeError as error:  # as all errors of a store are
            self.lost = f"rank 0 is gone: its store broke off ({first_line(error)})"
        else:
            self.lost = self.note or "this member has left the group"

    def _leave(self, store: Store) -> None:
        """Rank 0 takes the store away only when the others have read its note, or will not."""
        left, deadline = store.add("left", 1), time.monotonic() + 2 * self.interval
        members = 1 + sum(store.check([f"who/{rank}"]) for rank in self._others)
        while self._rank == 0 and left < members and time.monotonic() < deadline:
            time.sleep(self.interval / 20)
            left = store.add("left", 0)

    def _beat(self, store: Store) -> None:
        store.add(f"beats/{self._rank}", 1)
        now = time.monotonic()
        for rank, (beats, _) in self._heard.items():
            count = store.add(f"beats/{rank}", 0)
            if count != beats:
                self._heard[rank] = (count, now)
        self._beaten = now
        if not self.note and store.check(["note"]):
            self.note = store.get("note").decode()


def first_line(error: Exception) -> str:
    """The part of torch's message that is not a stack trace."""
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def unsupervised() -> Iterator[None]:
    """Have NCCL groups that are made meanwhile leave errors and deadlines to their maker, and never end the process."""
    before = {name: os.environ.get(name) for name in _UNSUPERVISED}
    os.environ.update(_UNSUPERVISED)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
