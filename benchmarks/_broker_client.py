"""The client of the broker's benchmark: bytes made beforehand, written to sockets by one loop that parses no body.

It runs in a process of its own, and tells how much of a core it used: a rate is the server's only where that is well
below one.
"""

from __future__ import annotations

import heapq
import multiprocessing
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

Address = tuple[str, int]


@dataclass
class Outcome:
    """What a client saw."""

    answers: int = 0
    """With status 200 and a body that says more than that there is nothing."""
    empty: int = 0
    """With status 200 and ``{"batch":null}`` or its like."""
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu: float = 0.0
    """Share of a core."""
    received: int = 0
    """Bytes of bodies."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each call, where they were asked for."""
    first: bytes = b""
    """Begin of the last body that was refused."""


class Line:
    """One connection: a request at a time."""

    def __init__(self, address: Address, selector: selectors.BaseSelector):
        self.address, self.selector = address, selector
        self.socket: socket.socket | None = None
        self.begun = 0.0
        self.left = -1

    def send(self, request: bytes) -> None:
        """Begin a call."""
        self.begun = time.perf_counter()
        self.out, self.sent = memoryview(request), 0
        self.head, self.body, self.left, self.length, self.chunked = bytearray(), bytearray(), -1, 0, False
        if self.socket is None:
            self.socket = socket.socket()
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.connect_ex(self.address)
            self.selector.register(self.socket, selectors.EVENT_WRITE, self)
        else:
            self.selector.modify(self.socket, selectors.EVENT_WRITE, self)

    def step(self, scratch: bytearray) -> bool:
        """Do what can be done at once; True once the answer is complete."""
        assert self.socket is not None
        if self.sent < len(self.out):
            self.sent += self.socket.send(self.out[self.sent :])
            if self.sent == len(self.out):
                self.selector.modify(self.socket, selectors.EVENT_READ, self)
            return False
        got = self.socket.recv_into(scratch)
        if got == 0:
            raise ConnectionError(f"the server closed the connection after {bytes(self.head[:200])!r}")
        data = memoryview(scratch)[:got]
        if self.left >= 0 or self.chunked:
            return self._more(data)
        self.head += data
        end = self.head.find(b"\r\n\r\n")
        return end >= 0 and self._headed(end)

    def _headed(self, end: int) -> bool:
        fields = bytes(self.head[:end]).lower().split(b"\r\n")
        self.status = int(fields[0].split()[1])
        self.keep = b"connection: close" not in fields
        sizes = [int(line[15:]) for line in fields if line.startswith(b"content-length:")]
        self.chunked = b"transfer-encoding: chunked" in fields
        self.left = sizes[0] if sizes else 0
        return self._more(memoryview(bytes(self.head[end + 4 :])))

    def _more(self, data: memoryview) -> bool:
        self.length += len(data)
        if self.chunked:  # only its end is looked for
            self.body = (self.body + data)[-400:]
            return self.body.endswith(b"0\r\n\r\n")
        if len(self.body) < 400:
            self.body += data[:400]
        self.left -= len(data)
        return self.left <= 0

    def close(self) -> None:
        if self.socket is not None:
            self.selector.unregister(self.socket)
            self.socket.close()
            self.socket = None


def flood(
    address: Address, requests: Sequence[bytes], *, lines: int, count: int, seconds: float, rate: float = 0.0
) -> Outcome:
    """Make calls one after another on each of some connections, up to ``count`` or for ``seconds``.

    Args:
        address: of the server.
        requests: whole requests, made in turn.
        lines: connections.
        count: of calls, at most.
        seconds: after which no call begins.
        rate: calls a second at most; 0 does not hold back.
    """
    outcome, selector, scratch = Outcome(), selectors.DefaultSelector(), bytearray(1 << 20)
    begin, cpu, made = time.perf_counter(), time.process_time(), 0
    idle = [Line(address, selector) for _ in range(lines)]
    while True:
        now = time.perf_counter() - begin
        while idle and made < count and now < seconds and (not rate or made < rate * now + 1):
            idle.pop().send(requests[made % len(requests)])
            made += 1
        if len(idle) == lines and (made >= count or now >= seconds):
            break
        for key, _ in selector.select(0.01 if idle else 5.0):
            if key.data.step(scratch):
                _count(outcome, key.data)
                idle.append(key.data)
    return _ended(outcome, begin, cpu, idle)


def poll(address: Address, requests: Sequence[bytes], *, every: float, seconds: float, fresh: bool) -> Outcome:
    """Make each of the calls again and again, as environments ask for their status.

    Args:
        address: of the server.
        requests: one of each client.
        every: seconds from the begin of a client's call to that of its next.
        seconds: in all.
        fresh: a new connection for each call, as BaseEnv has it.
    """
    outcome, selector, scratch = Outcome(), selectors.DefaultSelector(), bytearray(1 << 16)
    begin, cpu = time.perf_counter(), time.process_time()
    lines = [Line(address, selector) for _ in requests]
    due = [(begin + every * i / len(lines), i) for i in range(len(lines))]
    number = {id(line): i for i, line in enumerate(lines)}
    while (now := time.perf_counter()) < begin + seconds:
        while due and due[0][0] <= now:
            _, i = heapq.heappop(due)
            lines[i].send(requests[i])
        wait = min(due[0][0] - now, 0.05) if due else 0.05
        for key, _ in selector.select(max(wait, 0.0)):
            line = key.data
            if line.step(scratch):
                now = time.perf_counter()
                outcome.latencies.append(now - line.begun)
                _count(outcome, line, close=fresh)
                heapq.heappush(due, (max(now, line.begun + every), number[id(line)]))
    return _ended(outcome, begin, cpu, lines)


def _count(outcome: Outcome, line: Line, *, close: bool = False) -> None:
    outcome.statuses[line.status] += 1
    outcome.received += line.length
    if line.status != 200:
        outcome.first = bytes(line.body[:300])
    elif line.length < 40 and b"batch" in line.body:
        outcome.empty += 1
    else:
        outcome.answers += 1
    if close or not line.keep:
        line.close()


def _ended(outcome: Outcome, begin: float, cpu: float, lines: list[Line]) -> Outcome:
    outcome.seconds = time.perf_counter() - begin
    outcome.cpu = (time.process_time() - cpu) / outcome.seconds
    for line in lines:
        line.close()
    return outcome


class Apart:
    """A call of ``flood`` or ``poll`` in a process of its own, under way."""

    def __init__(self, function: Callable[..., Outcome], *args: Any, **options: Any):
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_apart, args=(theirs, function, args, options))
        self._process.start()
        theirs.close()

    def result(self) -> Outcome:
        """Wait for its end.

        Raises:
            RuntimeError: it failed; the message says how.
        """
        outcome: Outcome | str = self._pipe.recv()
        self._process.join()
        if isinstance(outcome, str):
            raise RuntimeError(f"the client failed: {outcome}")
        return outcome


def _apart(pipe: Pipe, function: Callable[..., Outcome], args: Any, options: Any) -> None:
    try:
        pipe.send(function(*args, **options))
    except Exception as error:  # told to whoever waits
        pipe.send(f"{type(error).__name__}: {error}")
