"""Alarms in whole runs of a tiny model: what is planted is named, told everywhere, and ends the run where asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.show import show
from tandem.config import loading as config
from tandem.errors import Alarmed
from tandem.observability.report import page
from tandem.trainer import assemble as run

STEPS = 40


def recipe(model: Path, runs: Path, **changes: Any) -> config.RunConfig:
    """A run that learns to say digits, of sums that it does not learn."""
    options: dict[str, Any] = {
        "model": str(model),
        "runs": str(runs),
        "name": "run",
        "steps": STEPS,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"number": 1.0, "learns.shaping:near": 1.0},
        "groups_per_step": 4,
        "group_size": 16,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 2},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "loggers": [],
        "threads": 1,
    }
    return config.from_options({**options, **changes}, [], Path("test")).config


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["event"] == name]


def trained(recipe: config.RunConfig) -> Path:
    return asyncio.run(run.train(recipe, resume=None))


# Sums of three terms of two digits, in answers of two tokens: "number" never pays.
UNSOLVED: dict[str, Any] = {
    "env": {"kind": "arithmetic", "terms": 3, "min_number": 30, "max_number": 60, "prompt": "{expression}="},
    "rewards": {"number": 1.0},
}


def test_tasks_of_which_none_is_solved(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The alarm is an event, a metric, in the report and in tandem show; a stop says how to go on."""
    with pytest.raises(Alarmed, match=r"alarm \w+ stopped the run at step \d+.*alarms=warn") as raised:
        trained(recipe(tiny_model, tmp_path, **UNSOLVED, alarms={"action": "stop", "ignore": IGNORED}))
    folder = tmp_path / "run"
    (alarm,) = events(folder, "alarm")
    assert alarm["alarm"] == "zero_variance"
    assert "of groups have zero variance" in alarm["seen"]
    assert raised.value.exit_code == 12
    assert str(folder) in str(raised.value)
    assert (folder / "checkpoints" / f"{alarm['step']:06d}").is_dir(), "everything is saved"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == alarm["step"]
    assert metrics[-1]["metrics"]["alarms/zero_variance"] == 1.0
    assert alarm["seen"] in json.dumps(json.loads(page_data(folder))["alarms"], ensure_ascii=False)
    show(folder, write_report=False)
    assert "ALARM zero_variance" in capsys.readouterr().out

    on = config.load(folder / "config.yaml", ["alarms=warn", f"steps={alarm['step'] + 2}"]).config
    asyncio.run(run.train(on, resume=folder))
    assert len(events(folder, "alarm")) == 1, "told once in an episode"
    assert events(folder, "run_done")


IGNORED = ["length", "entropy", "loss"]


def page_data(folder: Path) -> str:
    text = page.build(folder).read_text(encoding="utf-8")
    return text.partition('id="data"')[2].partition(">")[2].partition("</script>")[0]
