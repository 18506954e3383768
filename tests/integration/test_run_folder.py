"""A run's folder has one trainer, is watched, and outlives a terminal that goes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import start

REWARD = """
import time

def odd(completions, **columns):
    time.sleep(0.05)
    return [float(sum(messages[-1]["content"].encode()) % 2) for messages in completions]
"""
RECIPE: dict[str, Any] = {
    "steps": 10_000,
    "env": {"kind": "arithmetic", "max_number": 12},
    "rewards": {"marks:odd": 1.0},
    "groups_per_step": 2,
    "group_size": 4,
    "dtype": "float32",
    "sampling": {"max_tokens": 8},
    "evaluate": {"tasks": 0},
    "loggers": [],
    "threads": 1,
    "name": "a",
}


@dataclass
class Place:
    """A folder in which ``tandem train`` is run."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "runs" / "a"

    def start(self, *words: str, out: str = "out.txt") -> subprocess.Popen[str]:
        return start(["train", *words], out=self.path / out, cwd=self.path)

    def output(self, out: str = "out.txt") -> str:
        return (self.path / out).read_text()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0

    def code(self, run: subprocess.Popen[str]) -> int:
        self.until(lambda: run.poll() is not None)
        return run.wait()


@pytest.fixture
def place(tiny_model: Path, tmp_path: Path) -> Place:
    (tmp_path / "marks.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), **RECIPE}))
    return Place(tmp_path)


@pytest.mark.long
def test_a_second_trainer_is_refused_and_a_dead_ones_lock_is_none(place: Place) -> None:
    first = place.start("recipe.yaml")
    place.until(lambda: place.steps() >= 1)
    second = place.start("runs/a", out="second.txt")
    assert place.code(second) == 2
    assert f"pid {first.pid} on " in place.output("second.txt")
    assert "is at work in runs/a; see what it does with" in place.output("second.txt")
    assert "Traceback" not in place.output("second.txt")
    before = place.steps()
    place.until(lambda: place.steps() > before)
    first.kill()
    assert place.code(first) == -signal.SIGKILL
    third = place.start("runs/a", "steps=2", out="third.txt")
    assert place.code(third) == 0, place.output("third.txt")


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True], ids=["deleted", "moved"])
def test_a_run_whose_folder_is_gone_is_an_error(place: Place, moved: bool) -> None:
    run = place.start("recipe.yaml", "steps=100000")
    place.until(lambda: place.steps() >= 1)
    if moved:
        place.run.rename(place.path / "elsewhere")
    else:
        aside = place.run.rename(place.path / "gone")
        shutil.rmtree(aside)
    assert place.code(run) == 1
    assert "the run's folder runs/a was deleted or moved" in place.output()
    assert "Traceback" not in place.output()
    assert "done:" not in place.output()
    assert not place.run.exists(), "nothing is made anew in its place"


@pytest.mark.long
def test_a_sighup_saves_however_many_come_and_one_that_is_ignored_stays_ignored(place: Place) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # programs inherit it, as from nohup
    try:
        run = place.start("recipe.yaml")
        place.until(lambda: place.steps() >= 1)
        run.send_signal(signal.SIGHUP)
        reached = place.steps()
        place.until(lambda: place.steps() >= reached + 3)
        run.send_signal(signal.SIGTERM)
        place.until(lambda: run.poll() == 130)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        run = place.start("runs/a", out="again.txt")
    finally:
        signal.signal(signal.SIGHUP, before)
    reached = place.steps()
    place.until(lambda: place.steps() > reached)
    for _ in range(3):  # the kernel's, the shell's and the multiplexer's
        run.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    assert place.code(run) == 130, place.output("again.txt")
    saved = sorted(path.name for path in (place.run / "checkpoints").iterdir())
    assert int(saved[-1]) == place.steps()


@pytest.mark.slow
def test_sigquit_writes_stacks_and_saves(place: Place) -> None:
    run = place.start("recipe.yaml")
    place.until(lambda: place.steps() >= 1)
    run.send_signal(signal.SIGQUIT)
    assert place.code(run) == 130, place.output()
    assert "everything is saved; go on with: tandem train runs/a" in place.output()
    stacks = (place.run / "logs" / "stacks.txt").read_text()
    assert f"== stacks of process {run.pid}" in stacks
    assert "-- task" in stacks
    events = [json.loads(line)["event"] for line in (place.run / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "interrupted"
