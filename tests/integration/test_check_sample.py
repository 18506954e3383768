"""``tandem check --sample``: the groups that a run would begin with, played before it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.app import main

RECIPE: dict[str, Any] = {
    "steps": 1,
    "env": "arithmetic",
    "groups_per_step": 2,
    "group_size": 4,
    "dtype": "float32",
    "sampling": {"max_tokens": 6},
    "evaluate": {"tasks": 0},
    "loggers": [],
    "threads": 1,
    "name": "a",
}
REWARD = """
def odd(completions, **columns):
    return [float(sum(messages[-1]["content"].encode()) % 2) for messages in completions]

def never(completions, **columns):
    return [0.0] * len(completions)
"""
BRITTLE = """
def knows(rollout):
    if rollout.text and " = " not in rollout.text:
        raise ValueError("not a sum")
    return float(rollout.text.endswith(f" = {rollout.task.answer}."))
"""


def tandem(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sampled_marks.py").write_text(REWARD)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": str(tiny_model), **RECIPE}))
    return path


def test_it_tells_the_share_of_groups_with_signal_which_is_that_of_the_run(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tandem("check", str(recipe), "rewards={sampled_marks:odd: 1.0}", "--sample", "2") == 0
    output = capfd.readouterr().out
    assert "played 2 groups of 4 answers" in output
    assert "of 2 groups (" in output
    assert tandem("train", str(recipe), "rewards={sampled_marks:odd: 1.0}", "zero_variance_groups=keep") == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/a/rollouts/000001.jsonl").read_text().splitlines()]
    groups: dict[str, set[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["reward"])
    assert f"signal: {sum(len(some) > 1 for some in groups.values())} of 2 groups" in output
    assert not list(tmp_path.glob("runs/*/checkpoints/*.tmp"))


def test_where_nothing_has_signal_it_says_what_to_change_and_shows_an_answer(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tandem("check", str(recipe), "rewards={sampled_marks:never: 1.0}", "--sample", "3") == 0
    output = capfd.readouterr().out
    assert "signal: 0 of 3 groups (0%) have different rewards; 3 with every reward 0" in output
    assert "  change: " in output
    assert "the best answer of a group, reward 0" in output
    assert not (tmp_path / "runs").exists(), "nothing is trained or kept"


def test_answers_that_a_reward_fails_on_are_counted_and_their_tracebacks_kept_in_a_file(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "brittle.py").write_text(BRITTLE)
    assert tandem("check", str(recipe), "rewards={brittle:knows: 1.0}", "--sample", "1") == 0
    output = capfd.readouterr().out
    line = "  4 answers failed and have no reward; 4 of them: reward 'brittle:knows' raised ValueError: not a sum"
    assert line in output
    assert "Traceback" not in output
    log = Path(output.rpartition("their tracebacks: ")[2].strip())
    assert "Traceback" in log.read_text()


def test_a_recipe_that_is_wrong_is_told_before_anything_is_played(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tandem("check", str(recipe), "group_sise=3", "--sample", "2") == 2
    assert "played" not in capfd.readouterr().out
