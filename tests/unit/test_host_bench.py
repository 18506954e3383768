"""The benchmarks of the host: no model's pass is in what they count, and nothing outlives them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from nursery import Nursery
from plays import make_group, make_rollout

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.optimizers.adamw import AdamW
from tandem.trainer.objective import Objective
from tandem.trainer.pack import Packer
from tandem.trainer.step import Step
from tandem.trainer.work import LocalWork
from tandem.types import Sampling

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 20.0
"""Seconds in which an engine that was killed is gone."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import host

    return host


def test_a_step_of_the_benchmark_computes_nothing(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for (owner, name), value in host.stubs(mock.Mock()).items():
        monkeypatch.setattr(owner, name, value)  # raises where there is no such method to stand in for

    async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    # Whatever would compute raises: a policy has more than these.
    policy: Any = SimpleNamespace(compute=compute, model=torch.nn.Module(), device=torch.device("cpu"))
    work = LocalWork(policy=policy, objective=Objective(loss=Grpo()), stepper=mock.Mock(spec=[]), sampling=Sampling())
    pack = Packer(
        advantage=DrGrpo(), reduction="token", max_tokens=4, budget=99, mask_truncated=False, device=policy.device
    )
    rollouts = [make_rollout(f"a@0/{i}", [((1, 2), (3, 4), (-0.5, -0.25 - i))], float(i)) for i in range(2)]
    batch, step = pack([make_group("a@0", rollouts)], version=0), Step(work=work, optimizer=AdamW(), steps=1)

    async def one() -> Any:
        stats = await step.forward_backward(batch)
        return stats, await step.apply(1, batch, stats)

    stats, applied = asyncio.run(one())
    assert stats.logprobs == {"a@0/0": (-0.5, -0.25), "a@0/1": (-0.5, -1.25)}
    assert applied["grad_norm"].value == 0.0


@pytest.mark.slow
def test_an_engine_ends_with_the_benchmark_that_was_asked_to_end(nursery: Nursery, tmp_path: Path) -> None:
    # In place of vLLM's interpreter: it never says whether vLLM is there.
    python, note = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {note}.new && mv {note}.new {note}\nexec sleep 300\n")
    python.chmod(0o755)
    words = ["--model", str(tmp_path), "--data", str(tmp_path), "--python", str(python)]
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with nursery.start(words, cwd=tmp_path, out=tmp_path / "said", environment=environment, module="host_gpu") as bench:
        try:
            while not note.exists():
                assert bench.poll() is None
                time.sleep(0.05)
            engine = os.pidfd_open(int(note.read_text()))  # readable once it has ended, whoever reaps it
            bench.send_signal(signal.SIGTERM)
            bench.wait()
            ended, _, _ = select.select([engine], [], [], PATIENCE)
            if not ended:
                signal.pidfd_send_signal(engine, signal.SIGKILL)
            os.close(engine)
            assert ended
        finally:
            bench.kill()
