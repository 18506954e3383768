"""Weights & Biases with the names that Atropos' trainer gives its numbers, beside Tandem's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.observability.loggers.base import RunInfo, Writer
from tandem.observability.loggers.wandb import Wandb
from tandem.types import Json

NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "logprob/positive": "train/pos_logp",
    "logprob/negative": "train/neg_logp",
    "seconds/step": "train/step_time",
    "seconds/sync": "train/sync_time",
    "seconds/wait": "train/data_fetch_time",
    "memory/gpu_gb": "train/gpu_memory_gb",
    "memory/gpu_reserved_gb": "train/gpu_memory_reserved_gb",
    "ratio": "grpo/mean_ratio",
    "clip_fraction": "grpo/clipped_fraction",
}
"""Tandem's metric: Atropos' name of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposWandb(Wandb):
    """Send numbers to Weights & Biases under Tandem's names and, where Atropos has one, under its too."""

    def open(self, info: RunInfo) -> Writer:
        """Start the run, or continue it."""
        # Not super(): a dataclass with slots is another class than the one that this function was written in.
        return _Renaming(Wandb.open(self, info))


class _Renaming:
    """Writes every number with both names."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        theirs = {name: scalars[ours] for ours, name in NAMES.items() if ours in scalars}
        self._writer.write(step, {**scalars, **theirs})

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        self._writer.evaluation(step, record, scalars)

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        self._writer.event(name, fields)

    def close(self) -> None:
        self._writer.close()
