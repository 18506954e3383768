"""What leaves a run: merged once per step, whole lines, and a past that a resume can rely on."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ConfigError, Deadline
from tandem.metrics import Histogram, Mean, Sum
from tandem.observability import json_lines, waits
from tandem.observability.alarms import AlarmWatch
from tandem.observability.emit import Telemetry, evaluation_scalars
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.trainer.record import TokenRecord

EVALUATION = {
    "step": 2,
    "env": "arithmetic",
    "tasks": 40,
    "samples": 4,
    "mean": 0.25,
    "mean_ci": [0.2, 0.3],
    "pass_at": {"1": 0.25, "4": 0.5},
    "pass_ci": [0.4, 0.6],
    "truncated": 0.0,
    "tokens": 30.5,
    "rollouts": [],
}


def info(folder: Path, resumed_step: int = 0) -> RunInfo:
    return RunInfo(name="run", folder=folder, steps=10, config={}, resumed_step=resumed_step)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorder:
    """A logger's writer that remembers, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def _call(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name == self.fails:
            raise RuntimeError("the network is gone")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._call("write", (step, dict(scalars)))

    def evaluation(self, step: int, record: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        self._call("evaluation", (step, dict(scalars)))

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        self._call("event", (name, dict(fields)))

    def close(self) -> None:
        self._call("close", None)


@dataclass(frozen=True)
class Recording(MetricsLogger):
    writer: Recorder

    def open(self, info: RunInfo) -> Writer:
        return self.writer


@dataclass(frozen=True)
class Broken(MetricsLogger):
    def open(self, info: RunInfo) -> Writer:
        raise PermissionError("not logged in")


def test_a_step_is_merged_once_and_reaches_every_writer(tmp_path: Path) -> None:
    writer = Recorder()
    with Telemetry(info(tmp_path), [Recording(writer)]) as telemetry:
        scalars = telemetry.emit(
            1, [{"loss": Mean(1.0, 1), "seconds/pack": Sum(1)}, {"loss": Mean(5.0, 2), "seconds/pack": Sum(2)}]
        )
    assert scalars == {"loss": 2.0, "seconds/pack": 3}
    assert writer.calls == [("write", (1, scalars)), ("close", None)]
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 1
    assert row["metrics"] == scalars
    assert row["time"] > 1e9


def test_loggers_get_trls_names_too_and_the_folder_does_not(tmp_path: Path) -> None:
    writer = Recorder()
    named = dataclasses.replace(info(tmp_path), config={"metric_names": "trl"})
    metrics = {"reward/rewards.accuracy": Histogram((0.0, 1.0)), "length": Histogram((2.0, 4.0)), "lr": Sum(0.5)}
    with Telemetry(named, [Recording(writer)]) as telemetry:
        scalars = telemetry.emit(1, [metrics])
    _, (_, logged) = writer.calls[0]
    assert {name: value for name, value in logged.items() if name not in scalars} == {
        "rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 0.5, "completions/mean_length": 3.0,
        "completions/min_length": 2.0, "completions/max_length": 4.0, "learning_rate": 0.5,
    }  # fmt: skip
    assert rows(tmp_path / "metrics.jsonl")[0]["metrics"] == scalars


def test_a_step_cannot_be_emitted_twice(tmp_path: Path) -> None:
    with Telemetry(info(tmp_path, resumed_step=3)) as telemetry:
        telemetry.emit(4, [])
        for step in (4, 3):
            with pytest.raises(ValueError, match="once per step"):
                telemetry.emit(step, [])


def test_a_failing_logger_is_warned_of_once_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder(fails="write"), Recorder()
    with Telemetry(info(tmp_path), [Recording(bad), Recording(good)]) as telemetry:
        for step in (1, 2, 3):
            telemetry.emit(step, [{"loss": Sum(1)}])
    assert [name for name, _ in bad.calls] == ["write"]
    assert [name for name, _ in good.calls] == ["write"] * 3 + ["close"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "off for the rest of this run" in warnings[0]
    assert "the network is gone" in warnings[0]
    assert len(rows(tmp_path / "metrics.jsonl")) == 3


def test_a_logger_that_cannot_open_stops_the_run_at_once_and_closes_the_others(tmp_path: Path) -> None:
    writer = Recorder()
    with (
        pytest.raises(ConfigError, match=r"not logged in; repair that or take"),
        Telemetry(info(tmp_path), [Recording(writer), Broken()]),
    ):
        pytest.fail("opened")
    assert writer.calls == [("close", None)]


def test_a_full_disk_loses_rows_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = os.write, [False]

    def write(fd: int, data: bytes) -> int:
        if full[0]:
            return real(fd, data[:5])  # what a full disk does: part of it fits
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with Telemetry(info(tmp_path)) as telemetry:
        telemetry.emit(1, [{"loss": Sum(1)}])
        full[0] = True
        telemetry.emit(2, [{"loss": Sum(2)}])
        telemetry.emit(3, [{"loss": Sum(3)}])
        full[0] = False
        telemetry.emit(4, [{"loss": Sum(4)}])
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 4]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "cannot be written" in errors[0]
    assert "free disk space" in errors[0]


def test_resume_forgets_what_did_not_happen(tmp_path: Path) -> None:
    with Telemetry(info(tmp_path)) as telemetry:
        telemetry.event("run_started")
        for step in (1, 2, 3, 4):
            telemetry.emit(step, [{"loss": Sum(step)}])
            telemetry.rollouts(step, [{"step": step}])
            telemetry.evaluation(EVALUATION | {"step": step})
    for name in ("metrics.jsonl", "eval.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "torn')
    (tmp_path / "rollouts" / "000005.jsonl.tmp").write_text("{")
    with Telemetry(info(tmp_path, resumed_step=2)) as telemetry:
        assert [telemetry.evaluated(step) for step in (1, 2, 3)] == [True, True, False]
        telemetry.event("resumed", step=2)
        telemetry.emit(3, [{"loss": Sum(30)}])
    assert [(row["step"], row["metrics"]["loss"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 30),
    ]
    assert [row["step"] for row in rows(tmp_path / "eval.jsonl")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["000001.jsonl", "000002.jsonl"]
    assert [row["event"] for row in rows(tmp_path / "events.jsonl")] == ["run_started", "resumed"], "history is kept"


def test_rows_survive_kill_9(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tandem.metrics import Sum
from tandem.observability.loggers.base import RunInfo
from tandem.observability.emit import Telemetry
telemetry = Telemetry(RunInfo(name="r", folder=Path({str(tmp_path)!r}), steps=9, config={{}})).__enter__()
for step in (1, 2, 3):
    telemetry.emit(step, [{{"loss": Sum(step)}}])
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert ended.returncode == -9
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_rollouts_are_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    token = TokenRecord(t="\udfff", id=7, lp=None, tp=float("nan"), adv=0.5, m=1)
    with Telemetry(info(tmp_path)) as telemetry:
        telemetry.rollouts(1, [{"text": "a\u2028b \ud800", "tokens": [token]}, {"text": "c", "reward": float("nan")}])
        monkeypatch.setattr(os, "replace", no_room)
        telemetry.rollouts(2, [{"text": "d"}])
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["000001.jsonl"]
    lines = (tmp_path / "rollouts" / "000001.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": "a\u2028b ?", "tokens": [{"t": "?", "id": 7, "lp": None, "tp": None, "adv": 0.5, "m": 1}]},
        {"text": "c", "reward": None},
    ]
    assert "No space left" in caplog.text


def test_an_evaluation_is_kept_whole_and_its_numbers_are_shown(tmp_path: Path) -> None:
    writer = Recorder()
    with Telemetry(info(tmp_path), [Recording(writer)]) as telemetry:
        telemetry.evaluation(EVALUATION)
    (row,) = rows(tmp_path / "eval.jsonl")
    assert {key: row[key] for key in EVALUATION} == EVALUATION
    assert "time" in row
    expected = {
        "eval/mean": 0.25,
        "eval/mean/low": 0.2,
        "eval/mean/high": 0.3,
        "eval/pass/low": 0.4,
        "eval/pass/high": 0.6,
        "eval/pass@1": 0.25,
        "eval/pass@4": 0.5,
        "eval/truncated": 0.0,
        "eval/tokens": 30.5,
    }
    assert writer.calls[0] == ("evaluation", (2, expected))
    assert evaluation_scalars({"step": 0, "mean": 1}) == {"eval/mean": 1.0}
    parts = {"a": {"mean": 0.5, "pass_at": {"2": 0.75}}, "b": {"mean": 1, "mean_ci": [0.5, 1]}}
    assert evaluation_scalars({"step": 0, "mean": 0.75, "envs": parts}) == {
        "eval/mean": 0.75, "eval/a/mean": 0.5, "eval/a/pass@2": 0.75,
        "eval/b/mean": 1.0, "eval/b/mean/low": 0.5, "eval/b/mean/high": 1.0,
    }  # fmt: skip
    assert not (tmp_path / "metrics.jsonl").read_text(), "one line a step there, nothing else"


def test_numbers_that_are_not_finite_are_strict_json(tmp_path: Path) -> None:
    with Telemetry(info(tmp_path)) as telemetry:
        for step in (1, 2):
            telemetry.emit(step, [{"grad_norm": Sum(float("nan")), "loss": Histogram((1.0, 3.0))}])
    assert [row["metrics"]["grad_norm"] for row in rows(tmp_path / "metrics.jsonl")] == [None, None]
    assert rows(tmp_path / "metrics.jsonl")[0]["metrics"]["loss"] == 2.0


def test_a_late_wait_becomes_an_event(tmp_path: Path) -> None:
    with Telemetry(info(tmp_path)), pytest.raises(Deadline), waits.blocking("sync", "an engine", "engine", 9) as wait:
        raise wait.late()
    states = [(row["event"], row["owner"], row["on"], row["state"]) for row in rows(tmp_path / "events.jsonl")]
    assert states == [("wait", "sync", "engine", "deadline")]


def collapsing(step: int) -> dict[str, Mean]:
    """Answers that get short at step 20, with a reward that stays."""
    return {"length": Mean(4.0 if step >= 20 else 100.0, 1), "reward": Mean(0.5, 1)}


def test_an_alarm_is_an_event_and_a_metric(tmp_path: Path) -> None:
    writer = Recorder()
    with Telemetry(info(tmp_path), [Recording(writer)], AlarmWatch({})) as telemetry:
        for step in range(1, 31):
            telemetry.emit(step, [collapsing(step)])
    (alarm,) = [row for row in rows(tmp_path / "events.jsonl") if row["event"] == "alarm"]
    assert alarm["alarm"] == "length"
    assert "4 tokens" in alarm["seen"]
    assert ("event", ("alarm", {k: v for k, v in alarm.items() if k not in ("time", "event")})) in writer.calls
    metrics = {row["step"]: row["metrics"] for row in rows(tmp_path / "metrics.jsonl")}
    assert [metrics[step]["alarms"] for step in (19, 30)] == [0.0, 1.0]
    assert "alarms/length" not in metrics[19]
    assert metrics[30]["alarms/length"] == 1.0


def test_broken_rows_in_the_middle_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\nnot json\n[1]\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in json_lines.read(path)] == [1, 2]
    assert "rows.jsonl is damaged: line 2 is no row of it" in caplog.text
    assert "and 1 more; that is skipped" in caplog.text


@pytest.mark.slow
def test_telemetry_and_report_import_no_torch() -> None:
    code = """
import sys
import tandem.observability.report.page, tandem.observability.emit, tandem.observability.log
from tandem.observability.loggers import console, tensorboard, trackio, wandb
heavy = {"torch", "rich", "tensorboard", "wandb", "trackio", "numpy"} & sys.modules.keys()
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
