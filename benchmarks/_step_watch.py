"""One step of a run under torch's profiler."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from _step_profile import floor, kept, measured, pairs
from _versus import append, synchronize

from tandem.distributed.state_shards import SharesStates
from tandem.trainer.step import Step


def profiled(at: int, trace: Path, lines: Path) -> None:
    """Profile the step ``at`` (from 1), forward pass to optimizer; what it shows is a line of ``lines``.

    Args:
        at: the step; enough steps before it that everything is compiled.
        trace: where the device's events are written, gzipped.
        lines: JSON lines.
    """
    train, apply, seen = Step.forward_backward, Step.apply, 0
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)

    # On the thread that computes: the profiler sees the one that it was started on.
    def begin() -> None:
        synchronize()
        profiler.start()

    def end() -> None:
        synchronize()
        profiler.stop()

    async def watched(self: Step, batch: Any, queued: Any = lambda: None) -> Any:
        nonlocal seen
        seen += 1
        if seen == at:
            _name_updates(self.work.stepper)
            await self.work.policy.compute(begin)
        return await train(self, batch, queued)

    async def ended(self: Step, step: int, batch: Any, first: Any) -> Any:
        metrics = await apply(self, step, batch, first)
        if seen == at:
            await self.work.policy.compute(end)
            _tell(self, batch, profiler, trace, lines)
        return metrics

    Step.forward_backward, Step.apply = watched, ended  # type: ignore[method-assign]


def _tell(step: Step, batch: Any, profiler: Any, trace: Path, lines: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        events = json.loads(whole.read_text(encoding="utf-8", errors="replace"))
    work = _work(step, batch)
    profile = {**measured(events), "floor_ms": floor(step.work.policy.config, work), "work": work}
    append(lines, kind="profile", profile={**profile, "events_kept": kept(events, trace)})


def _name_updates(stepper: Any) -> None:
    """Let the profile tell the optimizer's kernels from the others."""
    step = stepper.step

    def named(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("optimizer"):
            return step(*args, **kwargs)

    stepper.step = named


def _work(step: Step, batch: Any) -> dict[str, int]:
    """What ``floor`` asks for."""
    trained = [p for p in step.work.policy.model.parameters() if p.requires_grad]
    stepper = step.work.stepper
    # A rank's own share: whole states would be gathered from the others, which are not asked.
    held = stepper.local_states() if isinstance(stepper, SharesStates) else stepper.state_dict()
    states = [t for t in held.values() if isinstance(t, torch.Tensor)]
    return {
        "tokens": sum(len(m.tokens_T) for m in batch.micro),
        "trained": sum(len(m.targets_N) for m in batch.micro),
        "pairs": sum(pairs(m.plan.lengths, m.plan.parents) for m in batch.micro),
        "parameters": sum(p.numel() for p in trained),
        "weight_bytes": sum(p.nbytes for p in trained),
        "state_bytes": sum(t.nbytes for t in states),
        "micro_batches": len(batch.micro),
    }
