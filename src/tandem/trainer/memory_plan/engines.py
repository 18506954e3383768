"""What engines that sample in processes of their own hold, as far as it is taken from what is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.loading import RunConfig
from tandem.engines.base import CanAttest, CanLend
from tandem.machine import Machine, readable
from tandem.trainer.memory_plan.table import MemoryLine, When

if TYPE_CHECKING:
    from tandem.engines.vllm.spec import Vllm

ENGINE = 1_700_000_000
"""Bytes of one vLLM engine's processes without weights and cache, measured on Linux with its build for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a run. Those that run already took their memory before anybody asked what is free."""

    apart: bool
    """They sample in processes of their own."""
    lent: bool
    """The trainer's weights are those in an engine's memory."""
    started: int = 0
    """How many are started on this machine."""
    near: int = 0
    """How many of these are where the trainer's weights are: on its accelerator, or on the host."""
    ranks: int = 1
    """Into how many slices each of these cuts its weights."""
    held: int = 1
    """How many of the slices are where the trainer's weights are."""
    share: float = 0.0
    """Share of the accelerator that each near one fills, weights and cache; 0 where they are counted apart."""
    sleeps: int = 0
    """How deep they sleep while a step is trained."""
    cache: int = 0
    """Bytes of keys and values beside each slice, where they are counted apart."""

    @classmethod
    def of(cls, config: RunConfig, machine: Machine, resumed: Path | None) -> Engines:
        """Those of a recipe, or those that the run in ``resumed`` left running."""
        apart = CanAttest in config.engine.capabilities
        lent = apart and config.sync.capability is CanLend
        if not apart:
            return cls(apart=False, lent=False)
        from tandem.engines.vllm.spec import CPU_CACHE_GB, Vllm

        engine = config.engine
        left = resumed is not None and any(_runs(file) for file in resumed.glob("engine-*.json"))
        if not isinstance(engine, Vllm) or engine.urls or left:
            return cls(apart=True, lent=lent)
        apart_from_share = machine.is_host or engine.kv_cache_gb > 0
        return cls(
            apart=True,
            lent=lent,
            started=engine.replicas,
            near=engine.replicas if machine.is_host or lent else _on_our_card(engine),
            ranks=engine.tensor_parallel_size,
            held=engine.tensor_parallel_size if machine.is_host else 1,
            sleeps=engine.sleep,
            share=0.0 if apart_from_share else engine.gpu_memory_utilization,
            cache=int((engine.kv_cache_gb or CPU_CACHE_GB) * 1e9) if apart_from_share else 0,
        )

    @property
    def weights_counted(self) -> bool:
        """True if what an engine lends is part of another line, or of what is not free."""
        return not self.near or self.share > 0

    def lines(self, weights: int, machine: Machine) -> list[MemoryLine]:
        """What they take where the trainer's weights are.

        Args:
            weights: bytes of one whole copy of what they load.
            machine: where that is.
        """
        if not self.apart:
            return []
        if not self.near:
            why = "it runs already, or elsewhere: what it holds is not among what is free here"
            return [MemoryLine(name="engine", bytes=0, why=why)]
        when: When = "sampling" if self.sleeps else "always"
        copy = weights * self.held // self.ranks
        lines = []
        if self.sleeps == 1:
            why = _times(self.near, f"its weights of {readable(copy)} while it sleeps")
            lines.append(MemoryLine(name="engine asleep", bytes=self.near * copy, why=why, beside=True))
        if self.share:
            why = f"gpu_memory_utilization {self.share:g} of {readable(machine.total)}, for its weights and cache"
            held = int(self.near * self.share * machine.total)
            return [MemoryLine(name="engine", bytes=held, why=_times(self.near, why), when=when), *lines]
        slices = self.near * self.held
        why = _times(slices, f"keys and values of {readable(self.cache)}")
        lines.append(MemoryLine(name="engine", bytes=slices * self.cache, why=why, when=when))
        if not self.lent:
            why = _times(self.near, f"its own weights of {readable(copy)}, where new ones are sent to")
            lines.append(MemoryLine(name="engine's copy", bytes=self.near * copy, why=why, when=when))
        return lines


def _times(number: int, what: str) -> str:
    return f"{number} × {what}" if number > 1 else what


def _on_our_card(engine: Vllm) -> int:
    """How many replicas have the trainer's accelerator, which is the first that it sees."""
    if not engine.devices:
        return engine.replicas
    ours = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
    return sum(ours in [device.strip() for device in devices.split(",")] for devices in engine.devices)


def _runs(file: Path) -> bool:
    """Whether the engine of a record still runs."""
    from tandem.engines.vllm.client.process import EngineRecord
    from tandem.processes import alive_after

    record = EngineRecord.read(file)
    return record is not None and alive_after(record.pid, record.started)
