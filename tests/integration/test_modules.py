"""A run finds the modules that lay beside its recipe again, whatever folder it goes on in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REWARD = """
def odd(completions, **columns):
    return [float(len(messages[-1]["content"]) % 2) for messages in completions]
"""


def tandem(place: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *words], cwd=place, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_run_goes_on_from_another_folder(tiny_model: Path, tmp_path: Path) -> None:
    project, start, elsewhere = (tmp_path / name for name in ("project", "start", "elsewhere"))
    for folder in (project, start, elsewhere):
        folder.mkdir()
    (project / "beside_recipe.py").write_text(REWARD)
    (start / "in_working_directory.py").write_text(REWARD)
    recipe = {
        "model": str(tiny_model),
        "runs": str(tmp_path / "runs"),
        "name": "run",
        "steps": 1,
        "env": {"kind": "arithmetic", "max_number": 4},
        "rewards": {"beside_recipe:odd": 1.0, "in_working_directory:odd": 1.0},
        "groups_per_step": 1,
        "group_size": 2,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 2},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "loggers": [],
        "threads": 1,
    }
    (project / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    tandem(start, "train", str(project / "recipe.yaml"))
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "modules.json").read_text()) == [str(start), str(project)]
    tandem(elsewhere, "train", str(run), "steps=2")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
