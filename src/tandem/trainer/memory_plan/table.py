"""The memory plan as a table, and what it is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tandem.errors import DoesNotFit
from tandem.machine import Machine, readable

When = Literal["always", "starting", "running", "sampling", "training", "updating"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One thing that takes memory."""

    name: str
    """What it is."""
    bytes: int
    """How much it takes at its largest."""
    why: str
    """How the number comes about."""
    when: When = "always"
    """starting is over before what is running is there; sampling, training and updating are parts of running and take
    turns, unless max_lag lets sampling overlap the others."""
    beside: bool = False
    """It is in the host's memory, and the weights are on an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """An estimate, and what it is held against."""

    lines: tuple[MemoryLine, ...]
    """Everything counted."""
    overlap: bool
    """True if sampling goes on while training does (max_lag above 0)."""
    machine: Machine
    """Where the weights have to fit."""
    beside: Machine | None
    """The host, where the weights are on an accelerator; it is held against its own lines."""
    parameters: int
    """Weights of the model, adapters included."""
    trainable: int
    """Those that are trained."""
    fitted: bool = False
    """What could be chosen was chosen already, so it is no remedy."""

    @property
    def total(self) -> int:
        """Bytes at the peak, where the weights are."""
        return self._peak(line for line in self.lines if not line.beside)

    @property
    def total_beside(self) -> int:
        """Bytes at the peak on the host, where the weights are on an accelerator."""
        return self._peak(line for line in self.lines if line.beside)

    def _peak(self, lines: Iterable[MemoryLine]) -> int:
        """What is always there, and the larger of the start and the run."""
        by: dict[When, int] = dict.fromkeys(get_args(When), 0)
        for line in lines:
            by[line.when] += line.bytes
        step = max(by["training"], by["updating"])
        turns = by["sampling"] + step if self.overlap else max(by["sampling"], step)
        return by["always"] + max(by["starting"], by["running"] + turns)

    @property
    def fits(self) -> bool:
        """True if the peak is within what is free, on the host too."""
        return self.within(1.0)

    def within(self, share: float) -> bool:
        """Whether a share of what is free is enough, on the host too."""
        there = self.beside is None or self.total_beside <= share * self.beside.free
        return self.total <= share * self.machine.free and there

    @property
    def lack(self) -> int:
        """Bytes by which the peaks exceed what is free."""
        there = 0 if self.beside is None else max(0, self.total_beside - self.beside.free)
        return max(0, self.total - self.machine.free) + there

    def table(self) -> str:
        """The plan as text."""
        both = "both at once" if self.overlap else "sampling and training take turns"
        both *= any(line.when == "sampling" for line in self.lines)  # else an engine samples in its own process
        rows = self._rows(self.machine, [line for line in self.lines if not line.beside], self.total, both)
        if self.beside is not None:
            lines = [line for line in self.lines if line.beside]
            rows += self._rows(self.beside, lines, self.total_beside, "on the host")
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"  {name:<{widths[0]}}  {amount:>{widths[1]}}  {when:<{widths[2]}}  {why}".rstrip()
            for name, amount, when, why in rows
        )

    @staticmethod
    def _rows(where: Machine, lines: list[MemoryLine], total: int, peak: str) -> list[tuple[str, str, str, str]]:
        rows: list[tuple[str, str, str, str]] = [
            (line.name, readable(line.bytes), line.when, line.why) for line in lines
        ]
        free = ("free", readable(where.free), "", f"of {readable(where.total)} on {where.name}")
        return [*rows, ("at the peak", readable(total), "", peak), free]

    def require(self) -> None:
        """Refuse what cannot fit.

        Raises:
            DoesNotFit: with the table and what to change.
        """
        if self.fits:
            return
        where, total = self.machine, self.total
        if total <= where.free and self.beside is not None:
            where, total = self.beside, self.total_beside
        advice = "; ".join(self._remedies(where is self.beside, total)) or "use a smaller model"
        raise DoesNotFit(
            f"this run needs about {readable(total)}, and {where.name} has {readable(where.free)} free:\n"
            f"{self.table()}\nto make it fit: {advice}"
        )

    def _remedies(self, beside: bool, total: int) -> list[str]:
        """What would help most where it does not fit, largest line first."""
        advicefor = {
            "optimizer": self._smaller_states(beside),
            "KV cache": "lower sampling.max_tokens, context or the engine's max_rows",
            "activations": "lower sampling.max_tokens or context"
            if self.fitted
            else "lower micro_batch_tokens, set checkpointing: full, or let memory: fit choose",
            "weights": "choose a smaller model, or dtype: bfloat16",
            "logits": "lower the engine's max_rows",
            "engine": "lower engine.gpu_memory_utilization, or engine.kv_cache_gb where it is set",
            "engine's copy": "use sync: shared, which needs no copy",
            "frozen base": "set trainable.merged: false, or trainable.base_on: host (weights on an accelerator)",
            "buckets": "lower sync.bucket_mb",
        }
        largest = sorted((line for line in self.lines if line.beside is beside), key=lambda line: -line.bytes)
        return [advicefor[line.name] for line in largest if line.name in advicefor and line.bytes > total // 10]

    def _smaller_states(self, beside: bool) -> str:
        """What makes an optimizer's states smaller, or brings them elsewhere."""
        ways = ["train an adapter (trainable: lora)" if self.trainable == self.parameters else "lower trainable.rank"]
        if not self.fitted:
            ways.append("take optimizer: adamw8bit")
            ways += ["or adamw_cpu, whose states are on the host"] if self.beside is not None and not beside else []
        return ", ".join(ways)
