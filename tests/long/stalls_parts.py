"""Parts that stall when they are told to: what ``stalls.py`` puts into the recipes of its runs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalls_rewards import FOR_EVER, spell, strikes
from torch import Tensor, nn

from tandem.algorithms.advantages.grpo import GroupStandardised
from tandem.algorithms.losses.base import MicroBatch, TokenLoss
from tandem.algorithms.losses.reinforce import Reinforce
from tandem.engines.base import Engine, EngineRequirements
from tandem.engines.embedded.engine import EmbeddedEngine
from tandem.engines.embedded.spec import Embedded
from tandem.envs.arithmetic import Arithmetic
from tandem.envs.base import Split
from tandem.model.policy import Policy
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.trainable.full import Full
from tandem.types import Completion, Group, Json, Sampling, Task


@dataclass(frozen=True, kw_only=True)
class Playing(Arithmetic):
    """Sums, played by an environment that gets lost."""

    async def play(self, task: Task, chat: Any) -> Mapping[str, float]:
        if strikes("lost rollout", after=2) or strikes("evaluation hangs"):
            await asyncio.get_running_loop().create_future()
        if strikes("environment awaits an event", after=2):
            await asyncio.Event().wait()
        if strikes("environment deadlocked", after=2):
            lock = asyncio.Lock()
            async with lock, lock:
                pass
        if strikes("environment blocks the event loop", after=2):
            time.sleep(FOR_EVER)
        if strikes("environment loops for ever", after=2):
            while True:
                pass
        if strikes("environment holds the interpreter", after=2):
            spell()
        if os.environ.get("STALL") == "slow but living":
            for _ in range(4):
                await asyncio.sleep(0.5)
                await chat.reply() if not chat.turns else None
        return await super().play(task, chat) if not chat.turns else {}

    def tasks(self, split: Split) -> Sequence[Task]:
        if strikes("data set never loads"):
            time.sleep(FOR_EVER)
        return super().tasks(split)


@dataclass(frozen=True, kw_only=True)
class Losing(Reinforce):
    """A loss whose thread gets stuck."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        if strikes("compute thread in native code", after=1):
            ctypes.CDLL(None).sleep(FOR_EVER)
        if strikes("compute thread loops", after=1):
            while True:
                pass
        if strikes("compute thread holds the interpreter", after=1):
            ctypes.PyDLL(None).sleep(FOR_EVER)
        return super().__call__(logprobs_N, micro)


@dataclass(frozen=True, kw_only=True)
class Advancing(GroupStandardised):
    """An advantage that does not come back to the event loop."""

    def __call__(self, group: Group) -> list[float]:
        if strikes("call on the event loop", after=2):
            socket.create_server(("127.0.0.1", 0)).accept()
        return super().__call__(group)


@dataclass(frozen=True, kw_only=True)
class Saving(Full):
    """Weights that load, and are saved, for ever."""

    def prepare(self, model: nn.Module) -> nn.Module:
        if strikes("model never loads"):
            time.sleep(FOR_EVER)
        return super().prepare(model)

    def write(self, model: nn.Module, tensors: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
        if strikes("checkpoint on a hung disk", after=1):
            folder.mkdir(parents=True)
            os.mkfifo(folder / "model.safetensors")
            (folder / "model.safetensors").open("wb")
        super().write(model, tensors, tokenizer, folder)

    def load(self, model: nn.Module, folder: Path) -> None:
        if strikes("checkpoint never read"):
            time.sleep(FOR_EVER)
        super().load(model, folder)


class _Written(Writer):
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if strikes("logger hangs", after=1):
            time.sleep(FOR_EVER)

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        return

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        return

    def close(self) -> None:
        if strikes("logger never closes"):
            time.sleep(FOR_EVER)


@dataclass(frozen=True, kw_only=True)
class Sinking(MetricsLogger):
    """A logger that hangs."""

    def open(self, info: RunInfo) -> Writer:
        if strikes("logger never opens"):
            time.sleep(FOR_EVER)
        return _Written()


class _Stalling(EmbeddedEngine):
    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        if strikes("one endless generation", after=2):
            await asyncio.get_running_loop().create_future()
        return await super().generate(prompt, sampling, key)

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        if strikes("engine never stands still", after=2):
            await asyncio.get_running_loop().create_future()
        await super().pause(finish=finish, step=step)

    async def resume(self) -> float:
        if strikes("engine paused and never resumed", after=1):
            return 0.0
        return await super().resume()

    async def close(self) -> None:
        if strikes("engine never closes"):
            await asyncio.get_running_loop().create_future()
        await super().close()


@dataclass(frozen=True, kw_only=True)
class Stalling(Embedded):
    """The embedded engine, with stalls."""

    @asynccontextmanager
    async def open(
        self, policy: Policy, *, context: int, requirements: EngineRequirements | None = None
    ) -> AsyncIterator[Engine]:
        engine = _Stalling(policy, context, self)
        try:
            yield engine
        finally:
            await engine.close()
