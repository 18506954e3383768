"""Every example runs from end to end with a tiny model."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["steps=1", "groups_per_step=1", "group_size=2", "sampling.max_tokens=4", "evaluate.tasks=0", "dtype=float32"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(path.name for path in sorted(EXAMPLES.glob("*.yaml"))), "train.py"])
def test_an_example_trains(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """From another folder than its own, as a user would run it."""
    if name.endswith(".py"):
        words = [str(EXAMPLES / name), str(tiny_model), "1"]
    else:
        keep = ["zero_variance_groups=keep", "threads=1", "name=a"]
        words = ["-m", "tandem", "train", str(EXAMPLES / name), f"model={tiny_model}", *SMALL, *keep]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (rollouts,) = (tmp_path / "runs").glob("*/rollouts/000001.jsonl")
    assert rollouts.stat().st_size > 0


def test_guesses_that_are_all_wrong_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a model that is never right has something to learn from."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("guess")
    env = module.Guess()
    task = env.tasks("train")[0]
    replies = (env.check(task), "no idea", "I say 20.", "30")
    rewards = [module.near(SimpleNamespace(messages=[SimpleNamespace(content=r)], task=task)) for r in replies]
    assert rewards[0] == 1.0
    assert len(set(rewards)) == 4


def test_every_module_beside_an_example_belongs_to_one() -> None:
    recipes = "".join(path.read_text() for path in EXAMPLES.glob("*.yaml"))
    modules = {path.stem for path in EXAMPLES.glob("*.py")} - {"train"}
    assert {module for module in modules if f"{module}:" in recipes} == modules != set()
