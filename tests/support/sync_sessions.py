"""A weight-sync session as a run opens it, in one call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.engines.base import Engine
from tandem.model.policy import Policy
from tandem.types import PolicyVersion
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.transaction.session import Commit, Published, WeightSyncSession


@asynccontextmanager
async def open_session(
    sync: WeightSync, policy: Policy, engine: Engine, start: PolicyVersion, trainable: Any, folder: Path = Path()
) -> AsyncIterator[WeightSyncSession]:
    """Bind, publish the starting version and verify it."""
    async with WeightSyncSession(
        sync=sync, policy=policy, engine=engine, trainable=trainable, folder=folder
    ) as session:
        await session.bind(fresh=True)
        async with session.open(start):
            yield session


async def publish(session: WeightSyncSession, version: PolicyVersion) -> Published:
    """Publish a version as a commit does after its optimizer."""
    async with session._lock:
        return await session._publish(version, Commit())
