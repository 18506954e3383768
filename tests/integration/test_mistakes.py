"""Each mistake that people make ends with one message on stderr, no traceback, and the exit code of its kind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.full_disk import small_files

from tandem.cli.app import main

RECIPE: dict[str, Any] = {
    "steps": 2,
    "env": "arithmetic",
    "rewards": {"marks:odd": 1.0},
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

def not_installed(completions, **columns):
    import nothing_of_this_name

def picky(completions, answer, **columns):
    # Understands gold answers alone.
    return [float(messages[-1]["content"].rsplit("= ", 1)[1] == right) for messages, right in zip(completions, answer)]
"""
DATA = {"kind": "dataset", "prompt": "{question}", "answer": "answer"}

Train = Callable[..., tuple[int, str]]


@pytest.fixture
def train(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Train:
    """Writes a recipe and trains by it as the command line does; returns the exit code and what it said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marks.py").write_text(REWARD)

    def run(target: str = "recipe.yaml", *overrides: str, **changed: Any) -> tuple[int, str]:
        recipe = {"model": str(tiny_model), **RECIPE, **changed}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["train", target, *overrides])
        assert isinstance(ended.value.code, int)
        return ended.value.code, capfd.readouterr().err

    return run


def one_message(stderr: str) -> str:
    """The message, if it is the only thing that was said."""
    lines = stderr.splitlines()
    assert "Traceback" not in stderr
    assert len(lines) == 1, stderr
    assert lines[0].startswith("tandem: ")
    return lines[0]


ROW = '{"question": "1 + 1?", "answer": "2"}\n'
ROWS = {"env": {**DATA, "path": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("changed", "overrides", "code", "words"),
    [
        ({"group_sise": 4}, [], 2, ["recipe.yaml:16", "group_sise", "did you mean 'group_size'"]),
        ({}, ["optimizer.lrr=1"], 2, ["did you mean"]),
        ({"group_size": "four"}, [], 2, ["recipe.yaml:7", "group_size", "four"]),
        ({"rewards": {"nothing_of_this_name:score": 1.0}}, [], 4, ["nothing_of_this_name"]),
        ({"rewards": {"marks:evn": 1.0}}, [], 4, ["evn"]),
        ({"model": "./models/nowhere"}, [], 2, ["./models/nowhere"]),
        ({"model": "nobody/nothing-of-this-name"}, [], 2, ["nobody/nothing-of-this-name"]),
        ({"context": 16}, [], 2, ["the context is 16", "raise context"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict | int) else "",
)
def test_a_mistake_in_a_recipe_is_told_before_a_folder_is_made(
    train: Train, changed: dict[str, Any], overrides: list[str], code: int, words: list[str]
) -> None:
    status, stderr = train("recipe.yaml", *overrides, **changed)
    message = one_message(stderr)
    assert [word for word in words if word not in message] == []
    assert status == code
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, ["rows.jsonl"]),
        ("", ["rows.jsonl"]),
        (f"{ROW}{ROW}{{'question': 1}}\n{ROW}", ["rows.jsonl:3"]),
        (ROW + '{"answer": "2"}\n' + ROW, ["rows.jsonl:2", "question"]),
    ],
    ids=["missing", "empty", "not JSON", "without a question"],
)
def test_a_data_set_that_cannot_be_read_is_told_by_its_line(train: Train, rows: str | None, words: list[str]) -> None:
    if rows is not None:
        Path("rows.jsonl").write_text(rows)
    code, stderr = train(**ROWS)
    message = one_message(stderr)
    assert [word for word in words if word not in message] == []
    assert code == 3
    assert not Path("runs").exists()


def test_model_folder_without_weights(train: Train, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, "hollow")
    Path("hollow/model.safetensors").unlink()
    code, stderr = train(model="hollow")
    assert code == 2
    assert "hollow" in one_message(stderr)


def test_one_long_prompt_met_later_costs_its_group_and_not_the_run(train: Train) -> None:
    rows = [{"question": f"{n} + 1?" + " please" * 40 * (n == 70), "answer": "2"} for n in range(80)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {**DATA, "path": "rows.jsonl", "test_share": 0.0}
    code, stderr = train(env=data, context=128, steps=30, zero_variance_groups="keep", checkpoint={"every": 30})
    assert code == 0, stderr
    assert "Traceback" not in stderr
    assert "the context is 128; shorten it" in stderr
    events = [json.loads(line) for line in Path("runs/a/events.jsonl").read_text().splitlines()]
    (dropped,) = [e for e in events if e["event"] == "group_dropped"]
    assert dropped["reason"] == "failed"
    assert 1 <= dropped["step"] <= 30
    assert "shorten it" in dropped["error"]


def test_run_that_exists_already(train: Train) -> None:
    Path("runs/a/checkpoints/000001").mkdir(parents=True)
    code, stderr = train()
    assert code == 2
    assert "go on with it by: tandem train runs/a" in one_message(stderr)


def test_a_run_that_failed_remembers_why(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    code, stderr = train(rewards={"overlong": {"weight": 1.0, "max_tokens": 500, "cache": 1}}, groups_per_step=1)
    assert code == 9
    run = Path("runs/a")
    reason = one_message(stderr).removeprefix("tandem: ")
    assert "zero_variance_groups: keep" in reason
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["error"], last["message"]) == ("run_failed", "Starved", reason)
    assert f"the run failed: {reason}" in (run / "logs" / "run.log").read_text()
    assert "Traceback" in (run / "logs" / "run.log").read_text()
    for verb in ("show", "why"):
        with pytest.raises(SystemExit):
            main([verb, str(run)])
        output = " ".join(capfd.readouterr().out.split())
        assert "failed" in output
        assert " ".join(reason.split()) in output
    assert reason[:40] in (run / "report.html").read_text()


def test_reward_that_always_fails(train: Train) -> None:
    code, stderr = train(rewards={"marks:not_installed": 1.0})
    assert code == 4
    assert "Traceback" not in stderr
    assert "nothing_of_this_name" in stderr.splitlines()[-1]


def test_reward_that_fails_on_whatever_the_model_says(train: Train) -> None:
    code, stderr = train(rewards={"marks:picky": 1.0}, groups_per_step=1)
    assert code == 9
    assert "Traceback" not in stderr
    assert "IndexError" in stderr.splitlines()[-1]


@pytest.mark.parametrize("place", [{"runs": "taken/runs"}, {"name": "a" * 300}])
def test_a_runs_folder_that_cannot_be_made(train: Train, place: dict[str, str]) -> None:
    Path("taken").write_text("a file")
    code, stderr = train(**place)
    assert code == 2
    folder = f"{place.get('runs', 'runs')}/{place.get('name', 'a')}"
    assert f"the run's folder {folder} cannot be made" in one_message(stderr)


def test_disk_full_while_saving(train: Train) -> None:
    with small_files(200_000):  # the weights are larger
        code, stderr = train(checkpoint={"every": 1})
    assert code == 8
    message = one_message(stderr)
    assert "checkpoint of step 1 cannot be written" in message
    assert "there is no checkpoint yet" in message
    assert "tandem train runs/a" in message
    assert list(Path("runs/a/checkpoints").iterdir()) == []
    # With room again it goes on.
    assert train("runs/a") == (0, "")
    assert sorted(path.name for path in Path("runs/a/checkpoints").iterdir()) == ["000001", "000002"]


def test_disk_full_keeps_the_older_checkpoint(train: Train) -> None:
    assert train(steps=1) == (0, "")
    before = {path: path.read_bytes() for path in Path("runs/a/checkpoints").rglob("*") if path.is_file()}
    with small_files(200_000):
        code, stderr = train("runs/a", "steps=2")
    assert code == 8
    assert "the newest checkpoint is step 1" in one_message(stderr)
    assert {path: path.read_bytes() for path in Path("runs/a/checkpoints").rglob("*") if path.is_file()} == before


def test_disk_full_from_the_start_of_a_resume(train: Train) -> None:
    assert train(steps=1) == (0, "")
    recipe = Path("runs/a/config.yaml").read_bytes()
    with small_files(300):  # smaller than the recipe, which the override changes
        code, stderr = train("runs/a", "steps=2")
    assert code == 1
    assert "Traceback" not in stderr
    assert "tandem: the run's folder runs/a cannot be written" in stderr.splitlines()[-1]
    assert Path("runs/a/config.yaml").read_bytes() == recipe
    assert train("runs/a", "steps=2") == (0, "")


@pytest.mark.parametrize("file", ["state.json", "optimizer.safetensors", "model/model.safetensors"])
def test_unreadable_checkpoint(train: Train, file: str) -> None:
    assert train(steps=1) == (0, "")
    damaged = Path("runs/a/checkpoints/000001") / file
    damaged.write_bytes(damaged.read_bytes()[:100])
    code, stderr = train("runs/a", "steps=2")
    assert code == 8
    assert "runs/a/checkpoints/000001" in one_message(stderr)


def test_checkpoint_whose_weights_are_not_its_own(train: Train) -> None:
    assert train(steps=1) == (0, "")
    damaged = Path("runs/a/checkpoints/000001/model/model.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    code, stderr = train("runs/a", "steps=2")
    assert code == 6
    assert "weights and its state do not belong together" in one_message(stderr)


def test_recipe_changed_under_a_run(train: Train) -> None:
    assert train(steps=1) == (0, "")
    recipe = Path("runs/a/config.yaml")
    recipe.write_text(recipe.read_text().replace("group_size: 4", "group_size: 5"))
    code, stderr = train("runs/a", "steps=2")
    assert code == 8
    assert "other settings" in one_message(stderr)


def test_resuming_what_is_not_a_run(train: Train) -> None:
    Path("empty").mkdir()
    code, stderr = train("empty")
    assert code == 2
    assert "no config.yaml" in one_message(stderr)


def test_in_a_process_of_its_own(train: Train, tiny_model: Path, tmp_path: Path) -> None:
    """Where nothing of the tests' own stands in between."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), **RECIPE}))
    ended = subprocess.run(
        [sys.executable, "-m", "tandem", "train", "recipe.yaml", "rewards={nowhere:score: 1.0}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (4, ""), ended.stderr
    assert "nowhere" in one_message(ended.stderr)
