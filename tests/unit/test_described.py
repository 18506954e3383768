"""Data and rewards as scripts have them, as options of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.api import described
from tandem.config.loading import from_options
from tandem.errors import ConfigError


class Table:
    """As ``datasets.Dataset``: it is iterated by rows."""

    def __iter__(self) -> Any:
        return iter([{"problem": "1 + 1?", "solution": "2"}])


def brief(rollout: Any) -> float:
    return 0.0


def right(rollout: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("data", "row", "columns"),
    [
        ([{"question": "1 + 1?", "answer": "2"}], {"question": "1 + 1?", "answer": "2"}, ("question", "answer")),
        (["1 + 1?"], {"prompt": "1 + 1?"}, ("prompt", "")),
        ([("1 + 1?", "2")], {"prompt": "1 + 1?", "answer": "2"}, ("prompt", "answer")),
        (Table(), {"problem": "1 + 1?", "solution": "2"}, ("problem", "solution")),
    ],
)
def test_rows_become_a_file_in_the_folder_of_runs(data: Any, row: Any, columns: Any, tmp_path: Path) -> None:
    env = described.environment(data, tmp_path)
    assert (env["kind"], (env["prompt"], env["answer"])) == ("dataset", columns)
    assert json.loads(Path(env["path"]).read_text()) == row
    assert described.environment(data, tmp_path) == env
    assert described.environment(env["path"], tmp_path) == env
    test = described.environment({"train": data, "test": ["?"]}, tmp_path)["test_path"]
    assert json.loads(Path(test).read_text()) == {"prompt": "?"}


def test_data_by_name_is_an_environment_or_a_data_set_on_the_hub(tmp_path: Path) -> None:
    assert described.environment("gsm8k", tmp_path) == {"kind": "gsm8k"}
    assert described.environment("org/rows", tmp_path) == {"kind": "dataset", "path": "org/rows"}
    with pytest.raises(ConfigError, match=r"no column called prompt, .* but text; name the one with the prompt"):
        described.environment([{"text": "?"}], tmp_path)
    with pytest.raises(ConfigError, match=r"data is a int without rows; expected rows"):
        described.environment(3, tmp_path)


@pytest.mark.parametrize(
    ("forms", "options"),
    [
        (right, {"right": {"kind": right, "weight": 1.0}}),
        ([right, "number"], {"right": {"kind": right, "weight": 1.0}, "number": 1.0}),
        ({right: 1.0, brief: 0.2}, {"right": {"kind": right, "weight": 1.0}, "brief": {"kind": brief, "weight": 0.2}}),
        ({"good": right, "number": 0.5}, {"good": {"kind": right, "weight": 1.0}, "number": 0.5}),
    ],
)
def test_rewards_are_functions_lists_and_mappings(forms: Any, options: Any) -> None:
    assert described.rewards(forms) == options


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="have one name; give each its own"):
        described.rewards([right, right])


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (0.1, 1), (2.5, 13)])
def test_epochs_are_steps_by_the_tasks_of_the_data(epochs: float, steps: int, tmp_path: Path) -> None:
    env = {**described.environment([f"{n}?" for n in range(10)], tmp_path), "test_share": 0.0}
    options = {"model": "m", "steps": 1, "env": env, "rewards": {"repetition": 1.0}, "groups_per_step": 2}
    config = from_options({**options, "evaluate": {"tasks": 0}}, [], Path("recipe")).config
    assert described.steps_of(epochs, config) == steps
    with pytest.raises(ConfigError, match="epochs must be above 0"):
        described.steps_of(0, config)
