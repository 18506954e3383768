"""The slow way that always works: save the weights, end the engine, start it on them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import ClassVar

from tandem.engines.base import Relaunches
from tandem.errors import bounded
from tandem.lazy import torch
from tandem.types import PolicyVersion
from tandem.weight_sync.base import Periodic, SyncContext


@dataclass(frozen=True, kw_only=True)
class Restart(Periodic):
    """A checkpoint or adapter folder, and a new engine on it. Only an engine that we started is ended."""

    capability: ClassVar[type] = Relaunches

    every: int = bounded(3, least=1)
    """Steps between two restarts; there is one after the last step too."""

    @property
    def finishes(self) -> bool:
        """Requests in flight would die with the engine."""
        return True

    async def transfer(self, session: SyncContext, version: PolicyVersion) -> int:
        """Save, restart; returns the bytes written. An engine that was just started on these weights is left alone."""
        assert isinstance(session.engine, Relaunches)
        adapter = session.trainable.payload == "adapter"
        if session.fresh and not adapter:
            return 0
        folder = session.folder / "weights" / f"step-{version.step:06d}"
        aside = folder.with_name(f".{folder.name}.tmp")  # an engine must not start on half a folder
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if adapter:
            await session.policy.compute(session.trainable.save, session.policy.model, session.policy.tokenizer, aside)
        else:
            await session.trained.save_weights(aside)
            await session.policy.compute(session.policy.tokenizer.save_pretrained, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        await session.policy.compute(torch.cuda.empty_cache)  # the engine needs what the step has used
        if not session.fresh:
            await session.engine.relaunch(None if adapter else folder)
        if adapter:
            await session.engine.load(folder, session.trained.adapter())
        for old in folder.parent.iterdir():
            if old != folder:
                shutil.rmtree(old)
        return sum(entry.bytes for entry in session.trained.manifest)
