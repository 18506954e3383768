"""One broadcast group between a trainer (rank 0) and its engines' workers, in which every wait has a deadline.

The group stands beside ``torch.distributed``'s default group, which the engine uses for itself.

A publish: each receiver says in the store which tensors it expects; when all expect what rank 0 is about to send, the
bytes travel in buckets, two at a time, so that packing and unpacking overlap with the wire; each receiver says when
it has everything. So nothing is put on the wire unless everybody is there, and who is missing has a name. A group in
which anything failed is of no further use to any member: they all learn why, and a new one has to be opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import TransportError
from tandem.weights.rendezvous import Board, Rendezvous, first_line, open_group, own_address, serve

__all__ = ["BUCKET_BYTES", "Entry", "Member", "Rendezvous", "manifest"]

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; more than any dtype or vector load needs
_SILENT = 15.0  # seconds without a beat after which a member is taken for dead


class Entry(NamedTuple):
    """One tensor of a publish."""

    name: str
    """Its name for both sides."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """torch's name of its dtype, such as ``bfloat16``."""


def manifest(named: Iterable[tuple[str, Tensor]]) -> list[Entry]:
    """What ``receive`` must be told about the tensors that ``send`` is given, in the same order."""
    return [Entry(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named]


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def of(self, buffer: Tensor) -> Tensor:
        """This tensor's place in its bucket's bytes."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


def _plan(entries: Iterable[Entry], bucket_bytes: int) -> list[list[_Part]]:
    """Tensors in order, bucket by bucket; one that is larger than a bucket gets its own, as large as itself."""
    buckets: list[list[_Part]] = []
    start = 0
    for name, shape, kind in entries:
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype) or min(shape, default=1) < 1:
            raise TransportError(f"{name!r} cannot travel: expected a torch dtype and elements, got {kind}{[*shape]}")
        size = math.prod(shape) * dtype.itemsize
        if not buckets or start + size > bucket_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append(_Part(name, shape, dtype, start, start + size))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return buckets


class Member:
    """One member of a group. Its calls block, each wait for at most ``rendezvous.seconds``: make them from a thread.

    Every failure is a ``TransportError`` that names the ranks concerned. After one, only ``close`` makes sense.
    """

    @classmethod
    def host(cls, rendezvous: Rendezvous, device: torch.device | str = "cpu", *, who: str = "trainer") -> Member:
        """Rank 0: serve the store and return at once. ``.rendezvous``, with the port, is for the others.

        Call ``connect`` next. ``device`` is where the tensors are.

        Raises:
            TransportError: the address or the port cannot be had, or the backend not on this device.
        """
        server, rendezvous = serve(rendezvous)
        return cls(rendezvous, 0, device, who=who, server=server)

    @classmethod
    def join(cls, rendezvous: Rendezvous, rank: int, device: torch.device | str = "cpu", *, who: str = "") -> Member:
        """Another rank: find the store, announce itself as ``who`` and wait for all others.

        Raises:
            TransportError: names who never came.
        """
        member = cls(rendezvous, rank, device, who=who)
        try:
            member.connect()
        except BaseException:
            member.close()
            raise
        return member

    def __init__(
        self, rendezvous: Rendezvous, rank: int, device: torch.device | str, *, who: str, server: Any = None
    ) -> None:
        if not 0 <= rank < rendezvous.world:
            raise ValueError(f"rank must be from 0 to {rendezvous.world - 1}, not {rank}")
        self.rendezvous, self.rank, self.device = rendezvous, rank, torch.device(device)
        nccl = rendezvous.backend == "nccl"
        if nccl and (self.device.type != "cuda" or not dist.is_nccl_available()):
            raise TransportError(f"backend nccl needs CUDA and a torch built with it; on {device} use backend gloo")
        if self.device == torch.device("cuda"):  # as tensors name theirs
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._wire = self.device if nccl else torch.device("cpu")
        self._stream = torch.cuda.Stream(self.device) if nccl else None
        self._names = {rank: who}
        self._others = [other for other in range(rendezvous.world) if other != rank]
        self._slots: list[Tensor | None] = [None, None]
        self._publishes = 0
        self._broken = ""
        self._group: Any = None
        self._server = server
        self._address = own_address(rendezvous)
        self._board = Board(rendezvous, rank)

    def connect(self) -> None:
        """Wait until all ranks have announced themselves, then build the process group; ``join`` does it itself.

        Raises:
            TransportError: names who never came.
        """
        with self._told("joining"):
            if not self._board.announce(self._names[self.rank]):
                self._broken = f"rank {self.rank} has joined before; every member needs its own rank"
                raise TransportError(f"group {self.rendezvous.name!r}: {self._broken}")  # it goes on without this one
            self._until(self._board.absent, "joining")
            self._names |= self._board.said("who")
            opened: Future[tuple[Any, Any]] = Future()
            self._aside(lambda: _resolve(opened, self._open))
            self._until(lambda: [] if opened.done() else self._others, "connecting")
            try:
                self._group, first = opened.result()
            except RuntimeError as error:
                raise self._broke("connecting", first_line(error), look=True) from error
            self._finish(first, "connecting")

    def send(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> int:
        """Rank 0: hand every tensor to all others, who must be in ``receive``; returns the bytes.

        On CUDA the tensors are read after what the current stream was given so far. When this returns, every receiver
        has asked for more after the last tensor, so it has copied all of them.

        Raises:
            TransportError: somebody is not there, expects other tensors, or was lost.
        """
        tensors = {name: tensor.detach() for name, tensor in named}
        entries = manifest(tensors.items())
        buckets = _plan(entries, bucket_bytes)
        with self._told("sending"):
            number = self._begin(entries, bucket_bytes)
            flying: deque[tuple[Any, str, Tensor]] = deque()
            for index, parts in enumerate(buckets):
                if len(flying) == len(self._slots):
                    self._finish(*flying.popleft()[:2])  # its memory is needed again
                doing = f"publish {number}, bucket {index + 1} of {len(buckets)}"
                with self._side():
                    buffer = self._pack(index, parts, tensors, bucket_bytes)
                flying.append((self._broadcast(buffer, doing), doing, buffer))
            while flying:
                self._finish(*flying.popleft()[:2])
            self._until(lambda: self._behind("done"), f"publish {number}, waiting for receivers to finish")
        return sum(part.stop - part.start for parts in buckets for part in parts)

    def receive(
        self, entries: Iterable[tuple[str, Sequence[int], str]], bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """Every other rank: the tensors in turn, each in memory that is used again once the next one is asked for.

        Copy each out on the current stream. ``entries`` and ``bucket_bytes`` must be the sender's. Leaving the loop
        early breaks the group.

        Raises:
            TransportError: the sender is not there, sends other tensors, or was lost.
        """
        rows = [Entry(name, tuple(shape), kind) for name, shape, kind in entries]
        buckets = _plan(rows, bucket_bytes)
        flying: deque[tuple[Any, str, Tensor]] = deque()

        def post(index: int) -> None:
            if index < len(buckets):
                doing = f"publish {number}, bucket {index + 1} of {len(buckets)}"
                buffer = self._buffer(index, buckets[index][-1].stop, bucket_bytes)
                flying.append((self._broadcast(buffer, doing), doing, buffer))

        with self._told("receiving"):
            number = self._begin(rows, bucket_bytes)
            for index in range(len(self._slots)):
                post(index)
            for index, parts in enumerate(buckets):
                work, doing, buffer = flying.popleft()
                self._finish(work, doing)
                for part in parts:
                    yield part.name, part.of(buffer)
                if self._wire != self.device:  # copies to the GPU from this host memory may still be queued
                    torch.cuda.current_stream(self.device).synchronize()
                del work, buffer  # a tensor's own memory goes before the next one's is taken
                post(index + len(self._slots))
            self._board.say("done", str(number))

    def abort(self) -> None:
        """Give the group up, from any thread: calls in progress, here and at other members, raise. Idempotent."""
        self._give_up(f"{self._called([self.rank])} left the group")

    def close(self) -> None:
        """Leave for good; on rank 0 the port is free afterwards. Idempotent."""
        self.abort()
        self._board.stop()
        group, self._group, self._server = [self._group], None, None
        # Gloo's destructor waits for operations in progress, which end at their own deadline. An idle one is quick.
        self._aside(group.clear).join(timeout=1)
        self._slots = [None, None]

    def _open(self) -> tuple[Any, Any]:
        group = open_group(self.rendezvous, self.rank, self._address)
        first = torch.zeros(1, dtype=torch.uint8, device=self._wire)
        return group, _from_rank_0(group, first)  # with which nccl makes its connections

    def _begin(self, entries: list[Entry], bucket_bytes: int) -> int:
        """Return the publish's number when every member stands ready for it."""
        if self._group is None:
            raise self._broke("beginning", "the group is not connected: call connect first")
        self._publishes += 1
        number = self._publishes
        doing = f"publish {number}, waiting for everybody to begin"
        expected = hashlib.blake2b(json.dumps([entries, bucket_bytes]).encode(), digest_size=8).hexdigest()
        if self.rank:
            self._board.say("ready", f"{number} {expected}")
            self._until(lambda: [] if self._board.begun() >= number else [0], doing)
            return number
        self._until(lambda: self._behind("ready"), doing)
        other = [rank for rank, text in self._board.said("ready").items() if text.split()[1] != expected]
        if other:
            raise self._broke(doing, f"{self._called(other)} expects other tensors or buckets than rank 0 sends")
        self._board.begin(number)
        return number

    def _behind(self, key: str) -> list[int]:
        return [rank for rank, text in self._board.said(key).items() if int(text.split()[0]) < self._publishes]

    def _pack(self, index: int, parts: list[_Part], tensors: dict[str, Tensor], bucket_bytes: int) -> Tensor:
        first = tensors[parts[0].name]
        if len(parts) == 1 and first.device == self._wire and first.is_contiguous():
            return first.reshape(-1).view(torch.uint8)  # alone in its bucket: it needs no copy
        buffer = self._buffer(index, parts[-1].stop, bucket_bytes)
        for part in parts:
            part.of(buffer).copy_(tensors[part.name])
        return buffer

    def _buffer(self, index: int, size: int, bucket_bytes: int) -> Tensor:
        """Bytes for one bucket: one of two that are kept, or memory of its own for a tensor larger than those."""
        slot = index % len(self._slots)
        buffer = self._slots[slot]
        if buffer is None or buffer.numel() < size:
            pinned = self._wire != self.device
            buffer = torch.empty(size, dtype=torch.uint8, device=self._wire, pin_memory=pinned)
            if size <= bucket_bytes:
                self._slots[slot] = buffer
        return buffer[:size]

    def _broadcast(self, buffer: Tensor, doing: str) -> Any:
        try:
            with self._side():
                return _from_rank_0(self._group, buffer)
        except (RuntimeError, AttributeError) as error:  # the latter if another thread closed the group
            raise self._broke(doing, first_line(error), look=True) from error

    def _finish(self, work: Any, doing: str) -> None:
        self._until(lambda: [] if work.is_completed() else self._others, doing)
        try:
            with self._side():
                work.wait()  # it is over: gloo raises what went wrong, nccl puts the side stream behind it
            state = "SUCCESS" if self._stream is None else self._group.get_error().name
        except (RuntimeError, AttributeError) as error:
            why = f"{first_line(error)}; awaited: {self._called(self._others)}"
            raise self._broke(doing, why, look=True) from error
        if state != "SUCCESS":
            raise self._broke(doing, f"nccl reports {state}", look=True)

    @contextlib.contextmanager
    def _side(self) -> Iterator[None]:
        """On CUDA, a stream beside the caller's, behind all that the caller's was given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def _until(self, awaited: Callable[[], list[int]], doing: str) -> None:
        """Return when ``awaited`` names no rank any more; raise when that takes too long or cannot happen."""
        deadline = time.monotonic() + self.rendezvous.seconds
        late, pause = self._others, 2e-5
        while True:
            try:
                late = awaited()
            except ConnectionError as error:
                raise self._broke(doing, f"{error}; still awaited: {self._called(late)}") from error
            if not late:
                return
            silent = self._board.silent(min(_SILENT, 0.75 * self.rendezvous.seconds))
            if self._broken or self._board.note or self._board.lost or silent:
                why = self._board.lost or f"gave up waiting for {self._called(late)}"
                raise self._broke(doing, why)
            if time.monotonic() > deadline:
                raise self._broke(doing, f"waited {self.rendezvous.seconds:g} s for {self._called(late)}")
            time.sleep(pause)
            pause = min(1.25 * pause, 1e-3)

    def _broke(self, doing: str, why: str, *, look: bool = False) -> TransportError:
        """The error to raise, after the others were told; with ``look``, take a moment to see who is gone."""
        until = time.monotonic() + (4 * self._board.interval if look else 0)
        while time.monotonic() < until and not (self._board.note or self._board.lost):
            time.sleep(self._board.interval / 4)
        if self._broken or self._board.note:  # the first cause, which somebody has looked into
            why = self._broken or self._board.note
        else:
            gone = self._board.silent(3 * self._board.interval)
            why += f"; {self._board.lost}" if self._board.lost not in why else ""
            why += f"; no sign of life from {self._called(gone)}" if gone else ""
        self._give_up(why)
        return TransportError(
            f"group {self.rendezvous.name!r} broke at {self._called([self.rank])}, {doing}: {why}. Whatever was being "
            "sent has arrived in part or not at all; open a new group when everybody is there"
        )

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Whatever goes wrong inside, the other members learn of it."""
        try:
            yield
        except ConnectionError as error:
            raise self._broke(doing, str(error)) from error
        except BaseException as error:
            self._give_up(f"{self._called([self.rank])} stopped {doing} ({type(error).__name__})")
            raise

    def _give_up(self, why: str) -> None:
        if self._broken:
            return
        self._broken = why
        self._board.tell(why)
        if self._stream is not None and self._group is not None:
            self._aside(self._group.abort).join(timeout=5)  # ends kernels that wait for a peer; may itself wait

    def _aside(self, call: Callable[[], None]) -> threading.Thread:
        """Run what torch returns from late or never in a thread that can be left behind.

        The interpreter waits for gloo's at its end: it keeps its deadline, and a thread that comes out of torch while
        the interpreter shuts down aborts the process. It cannot wait for nccl's.
        """
        thread = threading.Thread(target=call, name="tandem-group", daemon=self._stream is not None)
        thread.start()
        return thread

    def _called(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {r} ({self._names[r]})" if self._names.get(r) else f"rank {r}" for r in ranks)


def _from_rank_0(group: Any, buffer: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([buffer], options)


def _resolve(answer: Future[Any], work: Callable[[], Any]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # raised again where the answer is awaited
        answer.set_exception(error)
