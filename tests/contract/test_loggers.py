"""What every logger promises, whichever it is."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tandem.config import registry as resolve
from tandem.metrics import Histogram, Sum
from tandem.observability.emit import Telemetry
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer

ALARM = {"alarm": "length", "step": 2, "since": 1, "seen": "4 tokens", "means": "Bad.", "change": "lr.", "metrics": []}
EVALUATION = {"step": 1, "env": "e", "mean": 0.5, "mean_ci": [0.4, 0.6], "pass_at": {"1": 0.5}, "rollouts": []}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers that would talk to a server are stood in for, whether or not they are installed."""

    class Run:
        def log(self, values: dict[str, float], step: int | None = None) -> None: ...
        def alert(self, **options: str) -> None: ...
        def define_metric(self, name: str, **options: Any) -> None: ...
        def finish(self) -> None: ...

    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.init = lambda **options: Run()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


def logger(kind: str) -> MetricsLogger:
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    made = resolve.find("loggers", kind)()
    assert isinstance(made, MetricsLogger)
    return made


KINDS = resolve.names("loggers")


def test_there_are_loggers() -> None:
    assert {"console", "tensorboard", "wandb", "trackio"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_is_frozen_described_and_has_defaults(kind: str) -> None:
    part = logger(kind)
    assert part == logger(kind)
    assert hash(part) == hash(logger(kind))
    docs = resolve.field_docs(type(part))
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        assert field.kw_only
        assert docs.get(field.name), field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, None)
    assert resolve.summary(type(part))


@pytest.mark.parametrize("kind", KINDS)
def test_takes_a_whole_run_and_a_resume(kind: str, tmp_path: Path) -> None:
    part = logger(kind)
    part.check()
    info = RunInfo(name="run", folder=tmp_path, steps=3, config={"model": "m", "env": {"kind": "e"}})
    writer: Writer = part.open(info)
    writer.event("run_started", {})
    writer.evaluation(0, EVALUATION | {"step": 0}, {"eval/mean": 0.5})
    writer.write(1, {"reward": 0.5, "grad_norm": float("nan"), "lr": 1e-6})
    writer.write(2, {})
    writer.event("wait", {"owner": "a", "reason": "b", "on": "c", "seconds": 11.0, "state": "waiting"})
    writer.close()
    writer = part.open(dataclasses.replace(info, resumed_step=1))
    writer.write(2, {"reward": 0.75})
    writer.evaluation(2, EVALUATION | {"step": 2}, {"eval/mean": 0.75})
    writer.event("alarm", ALARM)
    writer.event("alarm_over", {"alarm": "length", "step": 2, "since": 1})
    writer.event("something_new", {"nested": {"a": [1, None]}, "text": "\u2028"})
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_works_under_telemetry_without_being_dropped(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = RunInfo(name="run", folder=tmp_path, steps=2, config={})
    with Telemetry(info, [logger(kind)]) as telemetry:
        telemetry.event("run_started")
        for step in (1, 2):
            telemetry.emit(step, [{"reward": Histogram((0.0, 1.0)), "seconds/step": Sum(0.1)}])
        telemetry.evaluation(EVALUATION)
        telemetry.event("run_done")
    assert caplog.text == ""
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
