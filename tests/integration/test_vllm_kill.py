"""``kill -9`` of either side of a run on a real vLLM: nothing is lost, trained twice, or served on wrong weights."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import build_tiny_model
from integration.vllm_runs import (
    CUDA,
    DTYPE,
    HEAD_DIM,
    Left,
    Trainer,
    alive,
    engine,
    groups_once,
    metrics,
    needs_engine,
    published,
    rollouts,
    same_logprobs,
    until,
)

from tandem.engines.base import EngineRequirements
from tandem.engines.vllm.spec import Vllm
from tandem.processes import identity
from tandem.types import PolicyVersion

pytestmark = [needs_engine, pytest.mark.long]

STEPS = 5
PROMPTS = [[10, 20, 30], list(range(40, 90)), [7] * 12, list(b"1+2="), list(range(200, 120, -3))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for vLLM's attention."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=HEAD_DIM)


def checked(folder: Path, *, steps: int, each: int = 4) -> None:
    """The run is whole: every step once, every group once, every publish proven, every token of known weights."""
    measured = metrics(folder)
    assert set(measured) == set(range(1, steps + 1)) == set(published(folder))
    assert all(event["probe_gap"] is not None for event in published(folder).values())
    assert all(row["versions"] == [row["step"] - 1] * 2 for row in rollouts(folder))
    groups_once(folder, each=each)
    same_logprobs(folder)


APART = engine() if CUDA else engine(args={})
"""The worker has a process of its own, as it has by default."""
KILLED: dict[str, tuple[Callable[[Left], int], dict[str, Any]]] = {
    "server": (lambda left: left.pid, {"trainable": {"kind": "full"}, "sync": "shared"}),
    "core": (Left.core, {"trainable": {"kind": "lora", "rank": 8, "alpha": 16}, "sync": "broadcast"}),
    "server of two ranks": (lambda left: left.pid, {"trainable": {"kind": "full"}, "sync": "broadcast", "ranks": 2}),
    "server, one beside it": (
        lambda left: left.pid,
        {"trainable": {"kind": "full"}, "sync": "shared", "engine": engine(replicas=2)},
    ),
    "server apart": (lambda left: left.pid, {"trainable": {"kind": "full"}, "sync": "shared", "engine": APART}),
    "core apart": (Left.core, {"trainable": {"kind": "full"}, "sync": "shared", "engine": APART}),
    "worker": (Left.worker, {"trainable": {"kind": "full"}, "sync": "shared", "engine": APART}),
}


@pytest.mark.parametrize("process", KILLED)
def test_killed_engine_is_started_again_and_nothing_is_trained_twice(model: Path, tmp_path: Path, process: str) -> None:
    """The HTTP server's process, that of the scheduler or that of the model dies while requests are in flight."""
    which, changes = KILLED[process]
    run = Trainer.fresh(tmp_path, model, steps=STEPS, **changes)
    try:
        left = run.sampling(after=2)
        os.kill(which(left), signal.SIGKILL)
        run.ended()
        assert not any(alive(pid) for pid in (left.pid, *(pid for pid, _ in left.family)))
        assert run.output().count("starting it again") == 1
        checked(run.folder, steps=STEPS)
        assert not (run.folder / "engine-0.json").exists()
    finally:
        run.clean()


@pytest.mark.timeout(1500)  # twenty starts of an engine, half a minute each on two slow cores
def test_an_engine_is_killed_at_any_moment_again_and_again(model: Path, tmp_path: Path) -> None:
    """Whatever the run is at: sampling, a publish, a checkpoint."""
    kills, draw = 20, random.Random(1)
    own = engine(restarts=2 * kills)
    run = Trainer.fresh(tmp_path, model, steps=100_000, trainable={"kind": "full"}, sync="broadcast", engine=own)
    try:
        for _ in range(kills):
            left = run.sampling(after=run.steps() + 2 if run.folder.exists() else 2)
            which = draw.choice([left.pid, left.core()])
            time.sleep(2 * draw.random())
            os.kill(which, signal.SIGKILL)
            run.until(lambda left=left: not alive(left.pid), "the end of what was left of the engine")
        after = run.steps()
        run.until(lambda: run.steps() >= after + 2, "steps after the last kill", 300)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(120)
        assert run.output().count("starting it again") == kills
        checked(run.folder, steps=run.steps())
    finally:
        run.clean()


@pytest.fixture(scope="module")
def orphaned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, Left, int]]:
    """A trainer killed while its engine was sampling; the engine, and the step whose weights it holds."""
    place, waits = tmp_path_factory.mktemp("orphaned"), engine(linger_seconds=240.0)
    long = {"max_tokens": 160}  # so that requests are in flight for most of a step, whatever else this machine does
    run = Trainer.fresh(
        place, model, steps=STEPS, trainable={"kind": "full"}, sync="shared", engine=waits, sampling=long
    )
    try:
        left, step = run.kill_between_publishes(after=2)
        yield run, left, step
    finally:
        run.clean()


def test_engine_goes_on_serving_its_version_when_its_trainer_is_killed(orphaned: tuple[Trainer, Left, int]) -> None:
    run, left, step = orphaned
    assert alive(left.pid)
    until(lambda: left.ask("/health")["running"] == 0, "the end of what nobody waits for any more")
    answer = left.greedy(PROMPTS[0])
    assert answer["versions"] == [[[step, 24]]]
    assert left.ask("/bridge/info")["digest"] == published(run.folder)[step]["digest"]


def test_updated_engine_says_what_a_fresh_one_on_the_checkpoint_says(
    model: Path, orphaned: tuple[Trainer, Left, int], tmp_path: Path
) -> None:
    """Greedy text after some updates in place, one request at a time; then the fresh engine's trainer is gone too, for
    good, and it ends by itself."""
    run, left, step = orphaned
    updated = [left.greedy(prompt) for prompt in PROMPTS]
    before = [answer["token_ids"][0] for answer in updated]
    assert all(answer["versions"] == [[[step, 24]]] for answer in updated)
    at_first, fresh = asyncio.run(_fresh(model, run.folder / f"checkpoints/{step:06d}/model", step, tmp_path))
    assert before == fresh
    assert at_first != fresh, "training changed nothing that is seen in the text"


async def _fresh(model: Path, weights: Path, step: int, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of ``weights`` by the library, as a check of the check, and by a fresh engine that is then left."""
    options = {name: value for name, value in engine(linger_seconds=1.0).items() if name != "kind"}
    requirements = EngineRequirements(model=str(model), weights=weights, dtype=DTYPE, folder=folder)
    before = _by_transformers(model)
    async with Vllm(**options).open(SimpleNamespace(end_tokens=()), context=256, requirements=requirements) as fresh:
        await fresh.set_version(PolicyVersion(step=step, digest=""))
        left = Left.of(folder)
        after = [(await asyncio.to_thread(left.greedy, prompt))["token_ids"][0] for prompt in PROMPTS]
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
            me = identity(stranger.pid)
            assert me is not None
            left.ask("/bridge/adopt", {"trainer": f"{me.pid}:{me.started}"})
            stranger.kill()
        await asyncio.to_thread(until, lambda: not alive(left.pid), "the end of an engine without a trainer")
    return before, after


def _by_transformers(model: Path) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, DTYPE))
    out = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(24):
                tokens.append(int(policy(torch.tensor([tokens])).logits[0, -1].argmax()))
        out.append(tokens[len(prompt) :])
    return out


def test_resumed_trainer_adopts_the_engine_and_finishes(orphaned: tuple[Trainer, Left, int]) -> None:
    run, left, step = orphaned
    assert step < STEPS
    resumed = Trainer(run.place, "runs/run")
    try:
        resumed.until(lambda: resumed.steps() > step, "a step after the resume")
        assert Left.of(run.folder) == left or Left.of(run.folder).pid == left.pid
        assert alive(left.pid)
        resumed.ended()
    finally:
        resumed.clean()
    assert "which an earlier trainer started" in (run.folder / "logs/run.log").read_text()
    assert not alive(left.pid)
    checked(run.folder, steps=STEPS)
