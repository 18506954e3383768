"""One broadcast group between a trainer (rank 0) and its engines' workers, in which every wait has a deadline.

The group stands beside ``torch.distributed``'s default group, which the engine uses for itself.

A publish: the trainer tells its engines over HTTP what comes, and they answer once they have it. The bytes travel in
buckets, each packed in one of two buffers, so that packing and unpacking overlap with the wire. With NCCL all of it is
ordered by streams, some buckets ahead of what has arrived, and this thread only watches. A group in which anything
failed is of no further use to any member: the first to notice leaves a note in the store, by which the others give up
too, and a new group has to be opened.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import TransportError
from tandem.transport.buckets import BUCKET_BYTES, BucketPlan, TensorEntry, manifest
from tandem.transport.rendezvous import Rendezvous, first_line, open_group, own_address, serve, visit

BUFFERS = 2
"""Buckets whose memory is in use at a time: one is packed or unpacked while another is on the wire."""
AHEAD = 64
"""Buckets that a GPU is given before the first has arrived: a large model's, before the trainer's next requests, which
are let in meanwhile, hold this thread up between any two."""


Pack = Callable[[Sequence[tuple[str, Tensor]]], None]
"""Writes a bucket's tensors where they travel from, on the current stream."""


class Flight(NamedTuple):
    """A bucket in flight."""

    work: Any
    """torch's handle of it."""
    views: list[tuple[str, Tensor]]
    """What it carries, by name; keeps the memory."""


def _behind(flight: Flight) -> None:
    """Have the current stream wait for it; for gloo, which has none, this thread. Raises what went wrong."""
    flight.work.wait()


_LOOK_SECONDS = 0.1
"""Between two looks for a note of another member's."""


class Sender:
    """Rank 0's way to send tensors from where they lie."""

    def send(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> int:
        """Hand every tensor to all others; returns the bytes.

        On CUDA the tensors are read after what the current stream was given so far.
        """
        tensors = {name: tensor.detach() for name, tensor in named}

        def pack(views: Sequence[tuple[str, Tensor]]) -> None:
            torch._foreach_copy_([view for _, view in views], [tensors[name] for name, _ in views])

        return self.send_packed(manifest(tensors.items()), pack, bucket_bytes)

    def send_packed(self, entries: Sequence[TensorEntry], pack: Pack, bucket_bytes: int = BUCKET_BYTES) -> int:
        """The same of tensors that ``pack`` writes."""
        raise NotImplementedError


class Member(Sender):
    """Member of a broadcast group.

    Its calls block, each wait for at most ``rendezvous.seconds``: make them from a thread.

    Every failure is a ``TransportError`` that names the ranks concerned. After one, only ``close`` makes sense.
    """

    @classmethod
    def host(cls, rendezvous: Rendezvous, device: torch.device | str = "cpu") -> Member:
        """Rank 0: serve the store and return at once. ``.rendezvous``, with the port, is for the others.

        Call ``connect`` next. ``device`` is where the tensors are.

        Raises:
            TransportError: the address or the port cannot be had, or the backend not on this device.
        """
        server, rendezvous = serve(rendezvous)
        return cls(rendezvous, 0, device, who="trainer", server=server)

    @classmethod
    def join(cls, rendezvous: Rendezvous, rank: int, device: torch.device | str = "cpu", *, who: str = "") -> Member:
        """Another rank: find the store, announce itself by the name ``who`` and wait for all others.

        Raises:
            TransportError: names the ranks that never came.
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
        self.rendezvous, self.rank = rendezvous, rank
        device = torch.device(device)
        nccl = rendezvous.backend == "nccl"
        if nccl and (device.type != "cuda" or not dist.is_nccl_available()):
            raise TransportError(f"backend nccl needs CUDA and a torch built with it; on {device} use backend gloo")
        if device == torch.device("cuda"):  # as tensors name theirs
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._wire = device if nccl else torch.device("cpu")
        """Where what is transferred must be."""
        self._stream = torch.cuda.Stream(device) if nccl else None
        """Has NCCL's transfers, which this thread need not wait for; gloo's are through host memory."""
        self._group: Any = None
        self._buffers: dict[int, Tensor] = {}
        self._names = {rank: who}
        self._others = [other for other in range(rendezvous.world) if other != rank]
        self._plan: BucketPlan | None = None
        self._broken = ""
        self._doing = ""
        self._server = server
        self._address = own_address(rendezvous)
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="tandem-group", daemon=True)
        self._listener.start()
        atexit.register(self._silence)  # a thread that is inside torch while the interpreter shuts down aborts it

    def connect(self) -> None:
        """Wait until all ranks have announced themselves, then build the process group; ``join`` does it itself.

        Raises:
            TransportError: names the ranks that never came.
        """
        with self._reporting("joining"):
            store = visit(self.rendezvous)
            store.set(f"who/{self.rank}", self._names[self.rank])
            try:
                store.wait([f"who/{rank}" for rank in self._others], timedelta(seconds=self.rendezvous.seconds))
            except RuntimeError as error:
                absent = [rank for rank in self._others if not store.check([f"who/{rank}"])]
                why = f"waited {self.rendezvous.seconds:g} s for {self._called(absent)}"
                raise self._broke(why) from error
            self._names |= {rank: store.get(f"who/{rank}").decode() for rank in self._others}
        with self._reporting("connecting"):
            self._group = open_group(self.rendezvous, self.rank, self._address)
            one_byte = torch.zeros(1, dtype=torch.uint8, device=self._wire)  # with which nccl makes its connections
            self._finish(Flight(self._group.broadcast(one_byte, 0), []))

    def _listen(self) -> None:
        """Give up as soon as another member has; a thread of its own, since a store that is lost may never answer."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: what is under way ends with it, or at its deadline
            store = visit(self.rendezvous)
            while not self._closed.wait(_LOOK_SECONDS):
                if not self._broken and store.check(["note"]):
                    self._broken = store.get("note").decode()

    def _silence(self) -> None:
        self._closed.set()
        self._listener.join(timeout=1)

    def send_packed(self, entries: Sequence[TensorEntry], pack: Pack, bucket_bytes: int = BUCKET_BYTES) -> int:
        """Rank 0: hand what ``pack`` writes to all others, bucket by bucket, while those before are on the wire.

        When this returns, all of it has left; that receivers have it where they want it, they say themselves.

        Raises:
            TransportError: a rank does not take it, or was lost.
        """
        plan = self._planned(list(entries), bucket_bytes)
        with self._reporting("sending"):
            flying: deque[Flight] = deque()
            for index in range(len(plan.buckets)):
                self._launch(plan, index, flying, pack=pack)
            while flying:
                self._finish(flying.popleft())
        return plan.bytes

    def receive(
        self, entries: Iterable[tuple[str, Sequence[int], str]], bucket_bytes: int = BUCKET_BYTES, *, keep: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Every other rank: the tensors, some at a time, in memory that is used again once more are asked for.

        Copy each out on the current stream. ``entries`` and ``bucket_bytes`` must be the sender's. Leaving the loop
        early breaks the group.

        Args:
            entries: name, shape and type of each tensor that comes.
            bucket_bytes: most bytes of a bucket.
            keep: use no memory again, so that all tensors can be held at the end.

        Raises:
            TransportError: the sender does not send, or was lost.
        """
        plan = self._planned([TensorEntry(name, tuple(shape), kind) for name, shape, kind in entries], bucket_bytes)
        with self._reporting("receiving"):
            flying: deque[Flight] = deque()
            posted: deque[Flight] = deque()
            for index in range(len(plan.buckets) + BUFFERS):
                if index >= BUFFERS:
                    flight = posted.popleft()
                    if self._stream is None:
                        self._finish(flying.popleft())
                    else:
                        _behind(flight)
                    yield flight.views
                    if self._wire != self._device:  # copies out of this host memory may still be queued
                        torch.cuda.current_stream(self._device).synchronize()
                if index < len(plan.buckets):
                    posted.append(self._launch(plan, index, flying, keep=keep))
            while flying:
                self._finish(flying.popleft())
            if self._stream is not None:
                self._doing = "copying out"
                self._until(torch.cuda.current_stream(self._device).record_event().query)

    def abort(self) -> None:
        """Give the group up, from any thread: calls in progress, here and at other members, raise. Idempotent."""
        self._give_up(f"{self._called([self.rank])} left the group")

    def close(self) -> None:
        """Leave for good; on rank 0 the port is free afterwards. Idempotent."""
        self.abort()
        if self._server is not None and not self._closed.is_set():
            time.sleep(2 * _LOOK_SECONDS)  # the store stays until the others have read the note
        self._silence()
        atexit.unregister(self._silence)
        group, self._group, self._server = [self._group], None, None
        # Gloo's destructor waits for operations in progress, which end at their own deadline. An idle one is quick.
        self._aside(group.clear).join(timeout=1)
        self._buffers.clear()

    def _planned(self, entries: list[TensorEntry], bucket_bytes: int) -> BucketPlan:
        plan = self._plan
        if plan is None or (plan.entries, plan.bucket_bytes) != (entries, bucket_bytes):
            plan = self._plan = BucketPlan(entries, bucket_bytes)
        return plan

    def _launch(
        self, plan: BucketPlan, index: int, flying: deque[Flight], *, pack: Pack | None = None, keep: bool = False
    ) -> Flight:
        """Put a bucket on the wire, behind those in flight, of which as many are waited for as is due.

        Args:
            plan: the publish.
            index: which bucket.
            flying: buckets in flight.
            pack: rank 0's, which fills it.
            keep: use memory that nothing else will use.
        """
        bucket = plan.buckets[index]
        large = bucket.size > plan.bucket_bytes  # in memory of its own, of which little is held
        while len(flying) >= (AHEAD if self._stream is not None and not large else BUFFERS):
            self._finish(flying.popleft())
        self._doing = f"bucket {index + 1} of {len(plan.buckets)}"
        memory = self._memory(index, bucket.size, plan.bucket_bytes, keep=keep)
        views = bucket.views(memory)
        with self._side():
            if pack is not None:
                for flight in list(flying)[-BUFFERS : 1 - BUFFERS]:  # used the same memory; of a host's, it is over
                    _behind(flight)
                pack(views)
            flying.append(Flight(self._group.broadcast(memory[: bucket.size], 0), views))
        return flying[-1]

    def _memory(self, index: int, size: int, most: int, *, keep: bool) -> Tensor:
        """Bytes for one bucket: one of two that are kept, or memory of its own for a tensor larger than those."""
        memory = self._buffers.get(index % BUFFERS)
        if keep or memory is None or memory.numel() < size:
            pinned = self._wire != self._device
            memory = torch.empty(size, dtype=torch.uint8, device=self._wire, pin_memory=pinned)
            if size <= most and not keep:
                self._buffers[index % BUFFERS] = memory
        return memory

    @contextlib.contextmanager
    def _side(self) -> Iterator[None]:
        """With NCCL, on a stream beside the caller's, behind all that the caller's was given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _finish(self, flight: Flight) -> None:
        """Return once it is over; raise what went wrong, of torch's errors as they are: RuntimeError."""
        self._until(flight.work.is_completed)
        with self._side():
            _behind(flight)
        if self._stream is not None and (state := self._group.get_error().name) != "SUCCESS":
            raise RuntimeError(f"nccl reports {state}")

    def _until(self, is_over: Callable[[], bool]) -> None:
        """Return when it is over; raise when that takes too long, or a member has given up."""
        begin = time.monotonic()
        while not is_over():
            waited = time.monotonic() - begin
            if self._broken:
                raise self._broke("")
            if waited > self.rendezvous.seconds:
                raise self._broke(f"waited {self.rendezvous.seconds:g} s for {self._called(self._others)}")
            time.sleep(min(max(waited / 50, 2e-5), 1e-3))  # late by little, in relation to what was waited for

    def _broke(self, why: str) -> TransportError:
        """The error to raise, after the others were told; of several causes the first that was told is the one."""
        self._give_up(why)
        return TransportError(
            f"group {self.rendezvous.name!r} broke at {self._called([self.rank])}, {self._doing}: {self._broken}. What "
            "was being sent has arrived in part or not at all; open a new group when everybody is there"
        )

    @contextlib.contextmanager
    def _reporting(self, doing: str) -> Iterator[None]:
        """Whatever goes wrong inside, the other members learn of it."""
        self._doing = doing
        if self._broken:
            raise self._broke("")
        try:
            yield
        except TransportError:
            raise
        except (RuntimeError, AttributeError) as error:  # torch's; the latter if another thread closed the group
            raise self._broke(f"{first_line(error)}; awaited: {self._called(self._others)}") from error
        except BaseException as error:
            self._give_up(f"{self._called([self.rank])} stopped {doing} ({type(error).__name__})")
            raise

    def _give_up(self, why: str) -> None:
        if self._broken:
            return
        self._broken = why
        self._aside(self._note).join(timeout=5)
        if self._stream is not None and self._group is not None:
            self._aside(self._group.abort).join(timeout=5)  # ends kernels that wait for a peer; may itself wait

    def _note(self) -> None:
        """Tell the others why, unless one has told before."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            visit(self.rendezvous).compare_set("note", "", self._broken)

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
