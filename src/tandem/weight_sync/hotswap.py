"""Adapters by name: each version is loaded beside the last, without a pause."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import ClassVar, Literal

from tandem.engines.base import LoadsVersions
from tandem.transport.adapters import write_adapter
from tandem.types import PolicyVersion
from tandem.weight_sync.base import Periodic, SyncContext

SPARE = 3
"""Folders kept beyond the versions that may be needed: an engine reads one again when it loads it back."""


@dataclass(frozen=True, kw_only=True)
class Hotswap(Periodic):
    """A new adapter name for every version, over HTTP. Requests in flight end on the version they began with."""

    payloads: ClassVar[frozenset[str]] = frozenset({"adapter"})
    capability: ClassVar[type] = LoadsVersions
    pause: ClassVar[Literal["step", "transfer", "never"]] = "never"

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Save a PEFT folder and have it loaded under a name of its own; returns the bytes loaded."""
        assert isinstance(session.engine, LoadsVersions)
        folders = session.folder / "adapters"
        folder = folders / f"step-{version.step:06d}"
        for later in folders.glob("step-*"):  # of a life of this run that got further than its last checkpoint
            if later.name >= folder.name:
                shutil.rmtree(later)
        adapter = session.trained.adapter()
        # What an engine reads and nothing for people, which takes longer than all the tensors.
        tensors = {name.replace(".default.", "."): tensor.detach() for name, tensor in adapter.tensors}
        await session.policy.compute(write_adapter, folder, tensors, adapter.config)
        loaded = await session.engine.swap(folder, version, adapter)
        for old in sorted(folders.iterdir())[: -(session.versions + SPARE)]:
            shutil.rmtree(old)
        return loaded
