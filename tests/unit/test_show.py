"""``tandem show``: a run in a screenful."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from unit.report_run import make_run, write

from tandem.cli.show import show


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    show(folder, False)
    return capsys.readouterr().out


def test_it_counts_the_phases_of_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("max_lag: 0\nsteps: 2\n")
    spans = {"seconds/step": 100.0, "seconds/wait": 70.0, "seconds/forward_backward": 20.0, "seconds/optimizer": 5.0}
    rows = [{"step": step, "time": 120.0 * step, "metrics": {**spans, "seconds/sync": 5.0}} for step in (1, 2)]
    write(tmp_path / "metrics.jsonl", rows)
    write(tmp_path / "eval.jsonl", [{"step": 0, "time": 30.0, "seconds": 20.0, "env": "e", "mean": 0.5}])
    write(tmp_path / "events.jsonl", [{"time": 0.0, "event": "run_started"}, {"time": 250.0, "event": "run_done"}])
    assert (
        "time: sampling 2 m 20 s (56%), training 50 s (20%), evaluation 20 s (8%), publish 10 s (4%), "
        "start and the rest 30 s (12%)" in shown(tmp_path, capsys)
    )


def test_a_run_of_steps_that_overlap_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")  # with max_lag: 1
    match = re.search(r"^time: (.*)$", shown(folder, capsys), re.MULTILINE)
    assert match
    assert "waiting " in match[1]
    assert "training " in match[1]
    assert "sampling" not in match[1]


def test_a_run_that_is_not_over_has_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("steps: 2\nmax_lag: 0\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": 0.0, "event": "run_started"}) + "\n")
    assert "0 of 2 steps" in shown(tmp_path, capsys)
