"""Server side of batched generation: one HTTP request for many completions, streamed as they are finished.

A step's rollouts are asked for in the same moment. To read, route and answer hundreds of requests takes this process
and the trainer's longer than the forward pass that they wait for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.protocol import KIND, Failed, Many, Refusal, Sampled, SiblingRequests, TakeBack, framed
from tandem.engines.vllm.server.adapters import Adapters
from tandem.engines.vllm.server.admission import EngineLimits
from tandem.engines.vllm.server.asgi import Receive, Send, disconnected, problem, unless
from tandem.engines.vllm.server.frontend import Frontend, Stopped
from tandem.together import cancel

TICK = 0.02
"""Seconds between the moments at which answers are sent, those of all requests alike: a turn of the client's event loop
costs it about as much as an answer, and takes all that came."""


class ManyAnswers:
    """The routes /generate/many and /generate/take_back."""

    def __init__(self, frontend: Frontend, adapters: Adapters, limits: EngineLimits):
        self._frontend = frontend
        self._adapters = adapters
        self._limits = limits
        self._live: dict[str, _Answers] = {}

    async def take_back(self, request: TakeBack) -> Any:
        """Cancel answers that are no longer wanted; finished ones stay."""
        if (live := self._live.get(request.id)) is not None:
            live.take_back(request.numbers)
        return {}

    async def generate(self, body: bytes, receive: Receive, send: Send) -> None:
        """Ask vLLM for all, and give each out.

        Raises:
            Refusal: the request is not as it should be; nothing was sent yet.
            ClientDisconnected: the client went away.
        """
        request = wire.parsed(body, Many)
        if not any(siblings.seeds for siblings in request.prompts):
            raise Refusal(400, "prompts is empty: no answer is asked for")
        live = self._live[request.id] = _Answers(self._frontend)
        try:
            for siblings in request.prompts:
                live.begin(siblings, self._adapters, self._limits)
            await unless(live.give_out(send), disconnected(receive), live.tell_stops())
        finally:
            self._live.pop(request.id, None)
            await live.close()


class _Answers:
    """Those of one request."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: list[bytes] = []
        self._number = 0
        self._changed = asyncio.Event()

    def begin(self, siblings: SiblingRequests, adapters: Adapters, limits: EngineLimits) -> None:
        """Ask vLLM for the answers to one prompt. What is wrong with it costs these alone."""
        numbers = range(self._number, self._number + len(siblings.seeds))
        self._number += len(numbers)
        try:
            request = wire.parsed(bytes(siblings.request), wire.Generate)
            if isinstance(request.prompt, str) or not request.prompt.prompt_token_ids or request.n != 1:
                raise Refusal(400, "many answers are asked for by the token ids of their prompts, one by one")
            limits.check(request.prompt.prompt_token_ids, request)
            adapter = None if request.adapter is None else adapters.named(request.adapter)
            options = request.sampling()
            params = {seed: self._frontend.params({**options, "seed": seed}) for seed in set(siblings.seeds)}
        except Exception as error:
            for number in numbers:
                self._failed(number, error)
            return
        for number, seed in zip(numbers, siblings.seeds, strict=True):
            work = self._answer(number, request.prompt.prompt_token_ids, params[seed], adapter, request.min_step)
            self._tasks[number] = asyncio.ensure_future(work)

    async def _answer(self, number: int, prompt: list[int], params: Any, adapter: Any, min_step: int) -> None:
        try:
            record = await self._frontend.generate(prompt, params, adapter=adapter, min_step=min_step)
            (completion,) = record.completions
            frame = Sampled(
                number=number,
                tokens=tuple(completion.tokens),
                logprobs=tuple(completion.own_logprobs),
                versions=wire.runs(self._frontend.steps_of(completion)),
                finish=completion.finish,
                engine=self._frontend.id,
                experts=completion.experts,
            )
            self._give(number, framed(frame))
        except Exception as error:  # of this answer alone
            self._failed(number, error)

    def take_back(self, numbers: list[int]) -> None:
        """End the answers of these numbers."""
        for number in numbers:
            if (task := self._tasks.pop(number, None)) is not None:
                task.cancel()
        self._changed.set()

    def _failed(self, number: int, error: Exception) -> None:
        status, title, detail = problem(error)
        self._give(number, framed(Failed(number=number, status=status, title=title, detail=detail)))

    def _give(self, number: int, frame: bytes) -> None:
        self._tasks.pop(number, None)
        self._ready.append(frame)
        if not self._tasks:  # a request's last answer waits for no other
            self._changed.set()
        elif len(self._ready) == 1:
            loop = asyncio.get_running_loop()
            loop.call_at((loop.time() // TICK + 1) * TICK, self._changed.set)

    async def give_out(self, send: Send) -> None:
        """Send what is there, until nothing is left."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", KIND)]})
        while self._tasks or self._ready:
            await self._changed.wait()
            self._changed.clear()
            if self._ready:
                ready, self._ready = b"".join(self._ready), []
                await send({"type": "http.response.body", "body": ready, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def tell_stops(self) -> None:
        """Whenever weights are in doubt, end what is not there yet by that; for as long as it is awaited."""
        while True:
            try:
                await self._frontend.broken_off()
            except Stopped as error:
                for number, task in list(self._tasks.items()):
                    task.cancel()
                    self._failed(number, error)

    async def close(self) -> None:
        """End all that is under way."""
        await cancel(*self._tasks.values())  # what was sampled is aborted by now
