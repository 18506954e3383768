"""What the tests of the proxy share: an engine that samples what it is told, and a session that is posted to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
from support.fake_engine import END

from tandem.agents.server import Proxy, Session
from tandem.rollout.template import Template
from tandem.types import Completion, Sampling

T = TypeVar("T")
USER = {"role": "user", "content": "hello"}


class Scripted:
    """Samples what it is told, and keeps what it was asked."""

    context = 400

    def __init__(self, *answers: Sequence[int]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[tuple[int, ...], Sampling, int]] = []

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        self.requests.append((tuple(prompt), sampling, key))
        tokens = tuple(self.answers[(len(self.requests) - 1) % len(self.answers)])
        finish: Any = "stop" if tokens[-1] == END else "length"
        return Completion(tokens=tokens, logprobs=(-0.5,) * len(tokens), versions=(4,) * len(tokens), finish=finish)


def served(
    template: Template, engine: Any, talk: Callable[[Any, Session, Proxy], Coroutine[Any, Any, T]], **sampling: Any
) -> T:
    """Have ``talk`` post to a session's /v1/chat/completions; it gets (post, session, proxy)."""

    async def go() -> T:
        session = Session(engine, template, Sampling(**{"max_tokens": 8, **sampling}), "s")
        proxy = Proxy(session, model="m")
        async with asyncio.timeout(20), proxy.serving() as url, aiohttp.ClientSession() as http:
            name = proxy.key

            async def post(*messages: Any, path: str = "v1/chat/completions", status: int = 200, **body: Any) -> Any:
                payload = {"model": "m", "messages": list(messages), **body}
                async with http.post(f"{url}/{name}/{path}", json=payload) as response:
                    text = await response.text()
                    assert response.status == status, text
                    return text if body.get("stream") else json.loads(text)

            post.http, post.url, post.name = http, url, name  # type: ignore[attr-defined]
            return await talk(post, session, proxy)

    return asyncio.run(go())


def message_of(answer: Any) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message
