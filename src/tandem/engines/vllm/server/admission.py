"""What may be asked of an engine, and how much of it at a time.

Limits are looked at before vLLM sees a request: token ids that the model does not have would end its process.

Places are a few requests fewer than vLLM's scheduler could run, so that a probe never queues. A scheduler that is full
begins what comes next when something ends, and what has waited longest goes first. A probe of new weights would stand
behind every request of a step, and the trainer with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from tandem.engines.vllm.protocol import Generate, Refusal

PROBES = 3
"""Places that are kept for a probe, whose questions are asked all at once."""


class Places:
    """Requests in flight: which are admitted, which wait, and which adapter samples each.

    Args:
        number: of answers at a time; a request for more has all places to itself.
    """

    def __init__(self, number: int):
        self.running = 0
        """Requests with vLLM."""
        self.waiting = 0
        """Requests that have no place yet."""
        self.users: Counter[str] = Counter()
        """Those of each adapter, by name; of none: the empty name."""
        self._number = number
        self._free = asyncio.Semaphore(number)
        self._turn = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def taken(self, answers: int) -> AsyncIterator[None]:
        """Within it so many places are the request's; first come, first served. For none nothing waits."""
        wanted, places = min(answers, self._number), 0
        try:
            if wanted:
                self.waiting += 1
                try:
                    async with self._turn:  # one request at a time, so that two do not wait for each other's places
                        while places < wanted:
                            await self._free.acquire()
                            places += 1
                finally:
                    self.waiting -= 1
            yield
        finally:
            for _ in range(places):
                self._free.release()

    @contextlib.asynccontextmanager
    async def counted(self, adapter: Any = None) -> AsyncIterator[None]:
        """Around the life of one request with vLLM."""
        self.running += 1
        self._empty.clear()
        try:
            with self.using(adapter):
                yield
        finally:
            self.running -= 1
            if not self.running:
                self._empty.set()

    @contextlib.contextmanager
    def using(self, adapter: Any) -> Iterator[None]:
        """Around what an adapter must stay loaded for."""
        name = adapter.lora_name if adapter is not None else ""
        self.users[name] += 1
        try:
            yield
        finally:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name]

    async def empty(self) -> None:
        """Return once vLLM has no request."""
        while self.running:
            await self._empty.wait()


class EngineLimits:
    """Request limits of one engine; ``client`` is vLLM's."""

    def __init__(self, client: Any):
        self._client = client
        self.context = int(client.vllm_config.model_config.max_model_len)
        """Most tokens of a prompt and its answer together."""
        self.vocabulary = int(client.vllm_config.model_config.get_vocab_size())
        """Token ids are below this."""

    async def ids(self, text: str) -> list[int]:
        """A text's tokens."""
        return list(await asyncio.to_thread(self._client.get_tokenizer().encode, text))

    def check(self, prompt: Sequence[int], request: Generate) -> None:
        """Raise Refusal unless this may be asked of the engine."""
        self.prompt(prompt)
        self.tokens("stop_token_ids", request.stop_token_ids or ())
        self.length("max_tokens", request.max_tokens)

    def prompt(self, tokens: Sequence[int]) -> None:
        """The same, of a prompt."""
        if not tokens:
            raise Refusal(400, "prompt is empty: it needs at least one token")
        if len(tokens) > self.context:
            raise Refusal(400, f"prompt is longer than the engine's context: {len(tokens)} tokens, {self.context} fit")
        self.tokens("prompt", tokens)

    def tokens(self, name: str, tokens: Sequence[int]) -> None:
        """The same, of token ids."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            odd = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise Refusal(400, f"{name} has token {odd}, which is out of vocabulary: ids are below {self.vocabulary}")

    def length(self, name: str, number: int) -> None:
        """The same, of how long an answer may be."""
        if number > self.context:
            raise Refusal(400, f"{name} is {number}, longer than the engine's context of {self.context} tokens")
