"""Who may call what: a trainer's key, and one for environments. Without keys everybody may."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Literal

from tandem.broker._bodies import Answer

Role = Literal["trainer", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """API keys, sent as ``Authorization: Bearer KEY``."""

    trainer: str = ""
    """May call everything; empty: no key is asked for."""
    environments: str = ""
    """May call what environments need; empty: they use the trainer's."""

    def __post_init__(self) -> None:
        if self.environments and not self.trainer:
            raise ValueError("a key for environments without one for the trainer would protect nothing; set both")

    def check(self, header: str, role: Role) -> None:
        """Let a request pass or not.

        Args:
            header: its Authorization header; empty if it has none.
            role: who may make it; a trainer may do everything.

        Raises:
            Answer: 401 without a known key, 403 with the environments' where the trainer's is needed.
        """
        if not self.trainer:
            return
        scheme, _, key = header.partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        # Both are compared always, each in constant time: how long it takes says nothing of either.
        trainer = _same(given, self.trainer)
        environment = bool(self.environments) and _same(given, self.environments)
        if trainer or (environment and role == "environment"):
            return
        if environment:
            raise Answer(403, "this needs the trainer's key, and the environments' was given")
        raise Answer(401, "a key is needed: Authorization: Bearer KEY")


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
