"""Client side of batched generation: completions requested in one turn of the event loop share one HTTP request.

A request of its own costs each rollout, here and in the engine's HTTP process, as much as all else that the host does
for it. The caller notices nothing: each answer has its own seed, deadline, error and end, and comes when it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from contextvars import Context
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from tandem.engines.vllm.client.http import EngineServer
from tandem.engines.vllm.protocol import Failed, Frame, Generate, Many, Sampled, SiblingRequests, TakeBack, frames
from tandem.errors import EngineError
from tandem.observability import waits

PATH = "/generate/many"
MOST = 64
"""Answers of one request: the engine begins with the first ones while the next are being asked for."""


@dataclass(slots=True)
class _AwaitedSample:
    """One awaited completion."""

    request: bytes
    seed: int | None
    answer: asyncio.Future[Sampled]


class Waves:
    """Batched generation requests, by server."""

    def __init__(self) -> None:
        self._next: dict[EngineServer, _Wave] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def answer(self, server: EngineServer, request: Generate, *, seed: int | None, later: float = 0.0) -> Sampled:
        """One answer of a server.

        Args:
            server: which.
            request: what is asked, but for the seed.
            seed: of its random stream.
            later: by how many seconds it may begin later than now.

        Raises:
            EngineUnreachable: no server responds, or the engine behind it has died.
            EngineError: it answers that something went wrong.
            Deadline: it answers too late.
        """
        wave = self._next.get(server)
        if wave is None or len(wave.requests) >= MOST:
            wave = self._next[server] = _Wave(server)
            asyncio.get_running_loop().call_soon(self._begin, wave)
        number = wave.add(request, seed)
        seconds = server.request_seconds + later
        try:
            async with waits.waiting(waits.actor("trainer"), "POST /generate", on=server.name, deadline=seconds):
                return await wave.requests[number].answer
        except BaseException:
            wave.leave(number)
            raise

    def _begin(self, wave: _Wave) -> None:
        if self._next.get(wave.server) is wave:
            del self._next[wave.server]
        # In a context of its own: it is no wait of its own, each answer's is registered by its caller.
        wave.task = task = asyncio.get_running_loop().create_task(wave.run(), context=Context())
        self._running.add(task)
        task.add_done_callback(self._running.discard)


@dataclass(slots=True)
class _Wave:
    """Requests that are sent together."""

    server: EngineServer
    requests: list[_AwaitedSample] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    _id: str = ""
    _sent: list[int] = field(default_factory=list)
    _buffer: bytearray = field(default_factory=bytearray)
    _taking_back: set[asyncio.Task[None]] = field(default_factory=set)

    def add(self, request: Generate, seed: int | None) -> int:
        """One answer more; its number."""
        future = asyncio.get_running_loop().create_future()
        self.requests.append(_AwaitedSample(msgspec.json.encode(request), seed, future))
        return len(self.requests) - 1

    def leave(self, number: int) -> None:
        """Give up an answer that nobody waits for any more; with the last one the request itself ends."""
        if self.task is None or self.task.done():
            return
        if all(request.answer.done() for request in self.requests):
            self.task.cancel()
        elif number in self._sent:
            task = asyncio.get_running_loop().create_task(self._take_back(self._sent.index(number)), context=Context())
            self._taking_back.add(task)
            task.add_done_callback(self._taking_back.discard)

    async def _take_back(self, place: int) -> None:
        with contextlib.suppress(EngineError):  # what led here is told, and the answers that are awaited tell the rest
            await self.server.post("/generate/take_back", TakeBack(id=self._id, numbers=[place]))

    async def run(self) -> None:
        """Ask, and hand out what comes."""
        try:
            if all(request.answer.done() for request in self.requests):  # no caller waits any more
                return
            await self.server.many(PATH, self._body, self._took)
            if left := [request for request in self.requests if not request.answer.done()]:
                raise self.server.odd(PATH, f"{len(left)} of {len(self.requests)} answers are missing")
        except Exception as error:  # callers get it, whatever it is
            for request in self.requests:
                if not request.answer.done():
                    request.answer.set_exception(error)
        finally:
            for request in self.requests:
                request.answer.cancel()  # where the run ends

    def _body(self) -> bytes:
        """What is not answered yet, siblings together."""
        self._id = secrets.token_hex(8)
        self._sent = [number for number, request in enumerate(self.requests) if not request.answer.done()]
        self._buffer.clear()
        prompts = [
            SiblingRequests(request=msgspec.Raw(request), seeds=[sample.seed for sample in samples])
            for request, samples in groupby((self.requests[number] for number in self._sent), lambda s: s.request)
        ]
        return msgspec.json.encode(Many(id=self._id, prompts=prompts))

    def _took(self, piece: bytes) -> None:
        self._buffer += piece
        try:
            for frame in frames(self._buffer):
                self._hand_out(frame)
        except (msgspec.DecodeError, IndexError) as error:
            raise self.server.odd(PATH, error) from error

    def _hand_out(self, frame: Frame) -> None:
        answer = self.requests[self._sent[frame.number]].answer
        if answer.done():  # taken back meanwhile
            return
        if isinstance(frame, Failed):
            answer.set_exception(self.server.refusal("/generate", frame.status, frame.title, frame.detail))
        else:
            answer.set_result(frame)
