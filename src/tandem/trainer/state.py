"""All of resume."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from tandem.rollout.feed import Cursor, Draw, group_from_json, group_to_json
from tandem.types import Json, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where training stands; with the weights and the optimizer's tensors it is everything a resume needs."""

    step: int
    """Optimizer steps taken."""
    version: PolicyVersion
    """What the engine serves."""
    tokens_seen: int
    """Trained tokens so far."""
    cursor: Cursor
    """Of the feed."""
    config_digest: str
    """Of everything in the recipe that decides what a step computes."""
    rng: tuple[int, ...] = ()
    """State of torch's generator, for objectives that draw from it."""

    def advanced(self, num_tokens: int, version: PolicyVersion, cursor: Cursor) -> Self:
        """After one more step."""
        return dataclasses.replace(
            self, step=version.step, version=version, tokens_seen=self.tokens_seen + num_tokens, cursor=cursor
        )

    def to_json(self) -> dict[str, Json]:
        """Plain data."""
        return {
            "step": self.step,
            "version": {"step": self.version.step, "digest": self.version.digest},
            "tokens_seen": self.tokens_seen,
            "config_digest": self.config_digest,
            "rng": list(self.rng),
            "cursor": {
                "taken": self.cursor.taken,
                "drawn": dict(self.cursor.drawn),
                "admitted": self.cursor.admitted,
                "again": [list(draw) for draw in self.cursor.again],
                "ready": [[list(draw), group_to_json(group)] for draw, group in self.cursor.ready],
                "resting": dict(self.cursor.resting),
                "batches": list(self.cursor.batches),
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of ``to_json``; raises KeyError, TypeError or ValueError where something is missing."""
        cursor = data["cursor"]
        return cls(
            step=data["step"],
            version=PolicyVersion(**data["version"]),
            tokens_seen=data["tokens_seen"],
            config_digest=data["config_digest"],
            rng=tuple(data["rng"]),
            cursor=Cursor(
                taken=cursor["taken"],
                drawn=cursor["drawn"],
                admitted=cursor["admitted"],
                again=tuple(Draw(*draw) for draw in cursor["again"]),
                ready=tuple((Draw(*draw), group_from_json(group)) for draw, group in cursor["ready"]),
                resting=cursor.get("resting", {}),
                batches=tuple(cursor.get("batches", ())),
            ),
        )
