"""Trainer state: with the weights and the optimizer's tensors, everything a resume needs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.rollout.source import DataState
from tandem.types import Json, PolicyVersion


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in a run's ``checkpoints`` folder by step, oldest first; other names are let be."""
    folders = {int(path.name): path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()}
    return {step: path for step, path in sorted(folders.items()) if path.name == f"{step:06d}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of training: step, published version, data state and random state."""

    step: int
    """Optimizer steps taken."""
    version: PolicyVersion
    """Policy version that the engine serves."""
    tokens_seen: int
    """Trained tokens so far."""
    data_state: DataState
    """Data state of the rollout source."""
    config_digest: str
    """Digest of everything in the recipe that decides what a step computes."""
    rng: tuple[int, ...] = ()
    """State of torch's generator, for objectives that draw from it."""

    @classmethod
    def fresh(cls, config: RunConfig) -> Self:
        """The state of a run that begins."""
        return cls(
            step=0,
            version=PolicyVersion(step=0, digest=""),
            tokens_seen=0,
            data_state=DataState(),
            config_digest=recipes.digest(config),
        )

    def advanced(self, num_tokens: int, version: PolicyVersion, data_state: DataState) -> Self:
        """The state after one more step."""
        return dataclasses.replace(
            self, step=version.step, version=version, tokens_seen=self.tokens_seen + num_tokens, data_state=data_state
        )

    def to_json(self) -> dict[str, Json]:
        """The state as JSON values."""
        plain: dict[str, Json] = msgspec.to_builtins(self, str_keys=True)
        return {**plain, "cursor": plain.pop("data_state")}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of ``to_json``; raises KeyError, TypeError or ValueError where something is missing."""
        return msgspec.convert({**data, "data_state": data["cursor"]}, cls, str_keys=True)
