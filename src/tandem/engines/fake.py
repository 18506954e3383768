"""An engine without a model: uniform tokens, deterministic, honest about its probabilities.

For trying an environment, a broker or a pipeline without weights. It lends none, so nothing can be trained through it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tandem.engines.base import Engine, EngineRequirements, EngineSpec, Health
from tandem.errors import EngineError
from tandem.types import Completion, PolicyVersion, Sampling


@dataclass(frozen=True, kw_only=True)
class Fake(EngineSpec):
    """Draws each token uniformly from a vocabulary; the last id of it ends an answer."""

    vocab: int = 128
    """Token ids are drawn from 0 to vocab - 1."""
    seconds_per_token: float = 0.0
    """How long each token takes; 0 answers at once."""

    def __post_init__(self) -> None:
        if self.vocab < 2:
            raise ValueError("vocab must be at least 2")
        if self.seconds_per_token < 0:
            raise ValueError("seconds_per_token must not be negative")

    @asynccontextmanager
    async def open(
        self, policy: Any, *, context: int, requirements: EngineRequirements | None = None
    ) -> AsyncIterator[Engine]:
        """Nothing starts; ``policy`` is not read."""
        engine = FakeEngine(self, context)
        try:
            yield engine
        finally:
            await engine.close()


class FakeEngine(Engine):
    """Samples uniformly from a vocabulary; its logprobs are exact."""

    def __init__(self, spec: Fake, context: int):
        self._spec = spec
        self._context = context
        self._version = PolicyVersion(step=0, digest="")
        self._gate = asyncio.Event()
        self._gate.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._paused_at: float | None = None
        self._running: set[asyncio.Task[Completion]] = set()
        self._waiting = 0
        self._closed: bool = False

    @property
    def context(self) -> int:
        return self._context

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        if self._closed:
            raise EngineError("the engine is closed")
        room = self.room(prompt)
        if sampling.penalised:
            raise EngineError("engine: fake draws uniformly; leave out penalties and min_tokens, or use another engine")
        self._waiting += 1
        try:
            await self._admitting.wait()
        finally:
            self._waiting -= 1
        if self._closed:
            raise EngineError("the engine is closed")
        stream = key if sampling.temperature else 0  # all tokens are equally likely: greedy takes any, always the same
        task = asyncio.ensure_future(self._sample(tuple(prompt), sampling, min(sampling.max_tokens, room), stream))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by close, not by what awaits us
                raise EngineError("the engine is closed") from None
            task.cancel()
            raise

    async def _sample(self, prompt: tuple[int, ...], sampling: Sampling, limit: int, key: int) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        ends = {self._spec.vocab - 1, *sampling.stop_token_ids}
        ended = False
        while len(tokens) < limit and not ended:
            await asyncio.sleep(self._spec.seconds_per_token)
            await self._gate.wait()
            seed = f"{prompt}/{key}/{len(tokens)}/{self._version.step}".encode()
            bits = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "big")
            token = bits % self._spec.vocab
            tokens.append(token)
            logprobs.append(-math.log(self._spec.vocab))
            versions.append(self._version.step)
            ended = token in ends
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish="stop" if ended else "length",
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [-math.log(self._spec.vocab)] * (len(tokens) - 1)

    def version(self) -> PolicyVersion:
        return self._version

    async def set_version(self, version: PolicyVersion) -> None:
        self._version = version

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        if finish and self._gate.is_set():
            self._admitting.clear()
            if self._running:
                await asyncio.wait(self._running)  # which, cancelled, leaves them running
        self._gate.clear()
        self._paused_at = self._paused_at or time.monotonic()

    async def resume(self) -> float:
        began, self._paused_at = self._paused_at, None
        self._admitting.set()
        self._gate.set()
        return 0.0 if began is None else time.monotonic() - began

    async def health(self) -> Health:
        return Health(ok=not self._closed, running=len(self._running), waiting=self._waiting)

    async def close(self) -> None:
        self._closed = True
        self._admitting.set()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
