"""An engine without a model: uniform tokens, deterministic, honest about its probabilities."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tandem.engines.base import Engine, EngineRequirements, EngineSpec, Health
from tandem.types import Completion, PolicyVersion, Sampling


@dataclass(frozen=True, kw_only=True)
class Fake(EngineSpec):
    """Draws each token uniformly from a vocabulary; the last id of it ends an answer."""

    vocab: int = 128

    @asynccontextmanager
    async def open(
        self, policy: Any, *, context: int, requirements: EngineRequirements | None = None
    ) -> AsyncIterator[Engine]:
        yield FakeEngine(self, context)


class FakeEngine(Engine):
    """Samples uniformly from a vocabulary; its logprobs are exact."""

    def __init__(self, spec: Fake, context: int):
        self._vocab = spec.vocab
        self._context = context

    @property
    def context(self) -> int:
        return self._context

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        limit, stream = min(sampling.max_tokens, self.room(prompt)), key if sampling.temperature else 0
        tokens: list[int] = []
        ends = {self._vocab - 1, *sampling.stop_token_ids}
        while len(tokens) < limit and not ends.intersection(tokens[-1:]):
            await asyncio.sleep(0)
            seed = f"{tuple(prompt)}/{stream}/{len(tokens)}/0".encode()
            tokens.append(int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "big") % self._vocab)
        return Completion(
            tokens=tuple(tokens),
            logprobs=(-math.log(self._vocab),) * len(tokens),
            versions=(0,) * len(tokens),
            finish="stop" if ends.intersection(tokens[-1:]) else "length",
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [-math.log(self._vocab)] * (len(tokens) - 1)

    def version(self) -> PolicyVersion:
        return PolicyVersion(step=0, digest="")

    async def set_version(self, version: PolicyVersion) -> None:
        raise NotImplementedError

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        raise NotImplementedError

    async def resume(self) -> float:
        raise NotImplementedError

    async def health(self) -> Health:
        return Health(ok=True, running=0, waiting=0)

    async def close(self) -> None:
        """Nothing to end."""
