"""Requests to vLLM's own routes: cache-salted, and held back while weights are verified."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tandem.engines.vllm.protocol import Refusal, parsed
from tandem.engines.vllm.server.adapters import allowed, require_free_name
from tandem.engines.vllm.server.asgi import ClientDisconnected, Message, Receive, Scope, Send, read, refuse, replayed
from tandem.engines.vllm.server.frontend import Frontend, Stopped

SALTED = frozenset((
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
    "/invocations", "/generative_scoring",
))  # fmt: skip
"""Stock routes that sample."""
LOADS = "/v1/load_lora_adapter"
"""The stock route that loads an adapter."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def number_of_answers(tree: Mapping[str, Any]) -> int:
    """How many answers a request asks for; what is wrong with it vLLM says itself."""
    n, prompt = tree.get("n"), tree.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return max(1, n if isinstance(n, int) else 1) * prompts


def salted(tree: dict[str, Any], salt: str) -> bytes:
    """The body with a cache salt, its own one mixed in; as it is where vLLM itself must say what is wrong."""
    given_salt = tree.get("cache_salt")
    if given_salt is not None and (not isinstance(given_salt, str) or not given_salt):
        return json.dumps(tree).encode()
    if given_salt:  # as a digest, for the length and the characters of a salt are limited
        salt = f"{salt}-{hashlib.blake2b(given_salt.encode(), digest_size=16).hexdigest()}"
    return json.dumps({**tree, "cache_salt": salt}).encode()


class Stock:
    """Middleware before vLLM's own routes (``app``): cache salts, pauses, and where adapters may come from."""

    def __init__(self, app: App, frontend: Frontend):
        self._app = app
        self._front = frontend

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["method"] != "POST" or not (path in SALTED or path == LOADS):
            await self._app(scope, receive, send)
            return
        try:
            body = await read(receive)
            tree = parsed(body, dict[str, Any])
            if path == LOADS:
                require_free_name(str(tree.get("lora_name", "")))
                allowed(str(tree.get("lora_path", "")))
        except Exception as error:
            await refuse(send, error)
            return
        await self._held(tree, number_of_answers(tree) if path in SALTED else 0, scope, receive, send)

    async def _held(self, tree: dict[str, Any], answers: int, scope: Scope, receive: Receive, send: Send) -> None:
        """What must not be answered from weights that are not proven; ``answers`` above 0 is what samples."""
        begun, front = False, self._front

        async def verified(message: Message) -> None:
            nonlocal begun
            await front.deliverable(None if front.generation != generation else generation)
            begun = True
            await send(message)

        try:
            async with front.admitted(answers), front.places.counted():
                generation = front.generation
                body = salted(tree, front.salt) if answers else json.dumps(tree).encode()
                headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
                headers.append((b"content-length", str(len(body)).encode()))
                await self._app({**scope, "headers": headers}, replayed(body, receive, front.broken_off), verified)
        except (Refusal, Stopped, ClientDisconnected) as error:
            if begun:
                raise  # too late for a status: the connection breaks off, which no client takes for a whole answer
            await refuse(send, error)
