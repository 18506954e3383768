"""What the sync benchmark measures with: requests in flight, stopwatches, memory of both processes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from tandem.engines.vllm import protocol as wire
from tandem.errors import EngineError
from tandem.model.policy import Compute, Policy
from tandem.types import Completion, Sampling

P = ParamSpec("P")
T = TypeVar("T")
Ask = Callable[[list[int], int], Awaitable[int]]
"""Prompt and number of tokens wanted; returns how many came."""


def prompt(index: int, length: int = 64) -> list[int]:
    """Bytes that begin like no other prompt, so that no prefix cache spares any work."""
    return random.Random(index).choices(range(256), k=length)


# Throughput


def by_tandem(engine: Any) -> Ask:
    """Through /generate, with logprobs, as a rollout asks."""

    async def ask(ids: list[int], tokens: int) -> int:
        request = wire.Generate(
            prompt=wire.Ids(prompt_token_ids=ids),
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        return len((await engine.servers[0].post("/generate", request, wire.Generated)).token_ids[0])

    return ask


def by_stock(engine: Any, model: str) -> Ask:
    """Through vLLM's own /v1/completions, text alone."""

    async def ask(ids: list[int], tokens: int) -> int:
        body = {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        server = engine.servers[0]
        async with server.opened().post(f"{server.url}/v1/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            raise EngineError(f"/v1/completions answers with {response.status}: {answer}")
        return int(answer["usage"]["completion_tokens"])

    return ask


async def rates(
    asks: Mapping[str, Ask], *, requests: int, tokens: int, waves: int, repeat: int
) -> dict[str, list[float]]:
    """Tokens a second of each route, in turn, over a fixed amount of work with so many requests in flight."""
    keys = iter(range(10**9, 2 * 10**9))

    async def one(ask: Ask, waves: int) -> int:
        return sum([await ask(prompt(next(keys)), tokens) for _ in range(waves)])

    by_route: dict[str, list[float]] = {route: [] for route in asks}
    for ask in asks.values():  # warm
        await asyncio.gather(*(one(ask, 1) for _ in range(requests)))
    for _ in range(repeat):
        for route, ask in asks.items():
            begin = time.perf_counter()
            made = sum(await asyncio.gather(*(one(ask, waves) for _ in range(requests))))
            by_route[route].append(made / (time.perf_counter() - begin))
    return by_route


# Load


@dataclass
class Load:
    """Keeps requests in flight and checks the versions of every answer."""

    engine: Any
    requests: int
    tokens: int
    single: bool
    """An answer must be of one version (adapters by name) rather than of versions that do not fall."""
    latest: int = 0
    """The version that is being published, or was last."""
    served: int = 0
    """The version that was last published and proven."""
    answers: list[tuple[list[int], Completion]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tokens_made: int = 0
    answered: int = 0
    spans: int = 0
    """Answers that were sampled by more than one version."""
    keep: int = 0
    """Answers kept for each version."""
    _begun: dict[int, int] = field(default_factory=dict)
    _kept: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Keep the requests in flight while the block runs; then let them end."""
        over = asyncio.Event()
        tasks = [asyncio.create_task(self._one(i, over)) for i in range(self.requests)]
        try:
            yield self
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def _one(self, lane: int, over: asyncio.Event) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            key = lane + turn * self.requests
            ids, earliest = prompt(key), self.served
            # Lengths differ, so that requests neither begin nor end together.
            length = self.tokens if turn > 1 else 1 + random.Random(key).randrange(self.tokens)
            self._begun[lane] = earliest
            try:
                completion = await self.engine.generate(ids, Sampling(max_tokens=length), key)
            except Exception as error:  # counted and told: a benchmark must not end on the first
                self.failures.append(f"request of version {earliest}: {error}")
                await asyncio.sleep(0.1)
                continue
            finally:
                self._begun.pop(lane, None)
            self._check(ids, completion, earliest)

    def _check(self, ids: list[int], completion: Completion, earliest: int) -> None:
        versions = completion.versions
        right = list(versions) == sorted(versions) and earliest <= versions[0] and versions[-1] <= self.latest
        if not right or (self.single and len(set(versions)) > 1):
            self.failures.append(f"versions {sorted(set(versions))} in an answer asked for at {earliest}")
        if len(completion.tokens) != len(completion.logprobs) or not all(
            -math.inf < lp <= 1e-3 for lp in completion.logprobs
        ):
            self.failures.append("logprobs missing or not numbers")
        self.answered += 1
        self.tokens_made += len(completion.tokens)
        self.spans += len(set(versions)) > 1
        if len(set(versions)) == 1 and self._kept[versions[0]] < self.keep:
            self._kept[versions[0]] += 1
            self.answers.append((ids, completion))

    async def no_older_than(self, version: int) -> None:
        """Wait until no request in flight was asked for under an older version, as max_lag bounds it in a run."""
        while min(self._begun.values(), default=version) < version:
            await asyncio.sleep(0.002)


# Time


class Stopwatch:
    """Seconds of each phase of a publish."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.rows: list[dict[str, float]] = []

    def timed(self, name: str, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """``function``, its time counted as a phase."""

        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = time.perf_counter()
            try:
                return await function(*args, **kwargs)
            finally:
                self.now[name] += time.perf_counter() - begin

        return call

    def lap(self) -> dict[str, float]:
        """Close a publish."""
        row, self.now = dict(self.now), defaultdict(float)
        self.rows.append(row)
        return row


class TimedCompute(Compute):
    """The compute thread, with what runs on it counted by function."""

    watch: Stopwatch | None = None
    phases = {  # noqa: RUF012 - a table
        "fold": "fold",
        "checksums": "sum here",
        "<lambda>": "sum here",
        "probe_gap": "probe here",
        "_write": "save",
    }

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.perf_counter()
        try:
            return await super().__call__(function, *args, **kwargs)
        finally:
            name = self.phases.get(getattr(function, "__name__", ""))
            if self.watch is not None and name is not None:
                self.watch.now[name] += time.perf_counter() - begin


def instrument(watch: Stopwatch, engine: Any, sync: Any) -> None:
    """Count the time of what a publish asks of an engine and of a way."""
    phases = {
        "pause": "pause",
        "checksums": "sum there",
        "probe": "probe there",
        "set_version": "stamp",
        "resume": "resume",
    }
    for method, name in phases.items():
        setattr(engine, method, watch.timed(name, getattr(engine, method)))
    object.__setattr__(sync, "transfer", watch.timed("move", sync.transfer))  # a frozen dataclass


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile (the largest of fewer than 100) and largest."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[len(ordered) // 2], ordered[min(last, math.ceil(0.99 * len(ordered)) - 1)], ordered[-1]


def memory(worker: int | None) -> dict[str, float]:
    """Gigabytes that trainer and engine's worker have for themselves, of each card, and of the trainer's tensors."""
    gigabytes = {"trainer host, private": _private(os.getpid())}
    if worker is not None:
        gigabytes["engine host, private"] = _private(worker)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gigabytes[f"card {index}, used by all"] = (total - free) / 1e9
        gigabytes[f"card {index}, trainer's tensors"] = torch.cuda.memory_allocated(index) / 1e9
    return {name: round(value, 3) for name, value in gigabytes.items()}


def _private(pid: int) -> float:
    """Memory that no other process maps."""
    file = Path(f"/proc/{pid}/smaps_rollup")
    if not file.exists():  # some sandboxes do not tell
        return math.nan
    lines = file.read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e9


class Endless(Policy):
    """A policy whose end tokens end nothing, so that answers have the length that was asked for."""

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset()
