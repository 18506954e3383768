"""API keys of the broker: the trainer's, and those of environments. Without keys every call is allowed."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from tandem_broker.server.bodies import RequestRejected

Role = Literal["trainer", "environment"]
NOBODY, TRAINER = "", "trainer"
"""Owners of what was made without keys, and with the trainer's; others are named by a digest of their key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """API keys, sent as ``Authorization: Bearer KEY``."""

    trainer: str = ""
    """May call everything; empty: no key is asked for."""
    environments: str = ""
    """May call what environments need; empty: they use the trainer's. Several, with commas between, are as many owners:
    what one of them registers and submits is out of the others' reach."""

    def check(self, header: str, role: Role) -> str:
        """Let a request pass or not.

        Args:
            header: its Authorization header; empty if it has none.
            role: the role that may make it; a trainer may do everything.

        Returns:
            Name of the caller: ``NOBODY`` without keys, ``TRAINER``, or the name of an environments' key.

        Raises:
            RequestRejected: 401 without a known key, 403 with the environments' where the trainer's is needed.
        """
        if not self.trainer:
            return NOBODY
        scheme, _, word = header.partition(" ")
        presented = word.strip() if scheme.lower() == "bearer" else ""
        # All are compared always, each in constant time: how long it takes says nothing of any.
        trainer = _same(presented, self.trainer)
        keys = filter(None, map(str.strip, self.environments.split(",")))
        known = [key for key in keys if _same(presented, key)]
        if trainer:
            return TRAINER
        if known and role == "environment":
            return hashlib.blake2b(presented.encode(errors="replace"), digest_size=8).hexdigest()
        if known:
            raise RequestRejected(403, "this needs the trainer's key, and the environments' was given")
        raise RequestRejected(401, "a key is needed: Authorization: Bearer KEY")


def may(owner: str, whose: str) -> bool:
    """True if the holder of a key (by its name, see ``Keys.check``) may act for another's environment."""
    return owner in (NOBODY, TRAINER) or whose in (NOBODY, owner)


def scoped(owner: str, key: str | None) -> str | None:
    """An idempotency key within its owner's."""
    return key if key is None or owner in (NOBODY, TRAINER) else f"{owner}/{key}"


def _same(presented: str, key: str) -> bool:
    return hmac.compare_digest(presented.encode(errors="replace"), key.encode(errors="replace"))
