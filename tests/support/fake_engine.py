"""An engine's HTTP server a page long: Tandem's, Atropos' example or stock vLLM's, without a model.

Answer number k is k % 5 + 2 tokens of the byte alphabet and an end token, each of logprob -1 / (k + 1).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Literal, Self

import msgspec
from aiohttp import web

from tandem.engines.vllm import protocol as wire

END = 257
"""End token of the tiny model's tokenizer."""


class FakeEngine:
    """``faults`` befall the next samplings, one each: ``cut`` breaks the connection, a number is a status."""

    def __init__(self, dialect: Literal["tandem", "atropos", "openai"], *, model: str = "m") -> None:
        self.dialect = dialect
        self.model = model
        self.version = 0
        self.port = 0
        self.context = 512
        self.faults: deque[Any] = deque()
        self.requests: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.down()

    async def up(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        if self.dialect == "tandem":
            app.router.add_get("/bridge/info", self._info)
        route = "/v1/completions" if self.dialect == "openai" else "/generate"
        app.router.add_post(route, self._sample)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def down(self) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.context}]})

    async def _info(self, request: web.Request) -> web.Response:
        about = wire.EngineInfo(
            engine="e", state="", reason="", step=self.version, digest="", updates=0, running=0, adapter=None,
            model=self.model, context=self.context, logprobs="processed_logprobs", adapters=False, workers=[],
        )  # fmt: skip
        return web.json_response(msgspec.to_builtins(about))

    async def _sample(self, request: web.Request) -> web.Response:
        body = await request.json()
        limit = body.get("max_tokens", 16)
        if limit > 1:  # not the question what it is
            self.requests.append(body)
            await self.gate.wait()
            fault = self.faults.popleft() if self.faults else None
            if fault == "cut":
                assert request.transport is not None
                request.transport.abort()
            elif fault is not None:
                return web.json_response({"error": "a fault"}, status=fault)
        number = len(self.requests)
        tokens = [*(97 + (number + i) % 26 for i in range(number % 5 + 2)), END][:limit]
        finish = "stop" if tokens[-1] == END else "length"
        logprobs = [-1 / (number + 1)] * len(tokens)
        if self.dialect == "openai":
            choice = {"finish_reason": finish, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            return web.json_response({"choices": [choice]})
        answer: dict[str, Any] = {
            "text": [""], "prompt": "", "finish_reasons": [finish], "prompt_token_ids": [], "token_ids": [tokens],
            "logprobs": [[[{str(t): p}] for t, p in zip(tokens, logprobs, strict=True)]],
        }  # fmt: skip
        if self.dialect == "tandem":
            answer |= {"versions": [[[self.version, len(tokens)]]], "engine": "e"}
        return web.json_response(answer)
