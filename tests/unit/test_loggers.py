"""What each logger writes, read back as its reader would."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.observability import board as boards
from tandem.observability import trace, waits
from tandem.observability.loggers.base import RunInfo, Writer
from tandem.observability.loggers.console import Console
from tandem.observability.loggers.tensorboard import Tensorboard
from tandem.observability.loggers.trackio import Trackio
from tandem.observability.loggers.wandb import Wandb
from tandem.observability.waits import Wait

CONFIG = {
    "model": "org/SmolLM2-135M",
    "env": {"kind": "gsm8k"},
    "trainable": {"kind": "full"},
    "sync": {"kind": "shared"},
    "groups_per_step": 4,
    "group_size": 8,
    "max_lag": 1,
}
ALARM = {
    "alarm": "length",
    "step": 52,
    "since": 50,
    "seen": "answers have 4 tokens",
    "means": "Saying less earns as much.",
    "change": "Less optimizer.lr.",
    "metrics": ["length"],
}
COMPLETIONS: dict[str, Any] = {
    "step": 10,
    "samples": [
        {
            "env": "gsm8k",
            "task": "7",
            "prompt": "1 + 1?",
            "answer": "2",
            "text": "It is\n\x1b[31m3\x1b[0m.",
            "reward": 0.25,
            "rewards": {"number": 0.0, "format": 0.5},
            "advantage": -0.7,
            "truncated": True,
            "error": "",
        }
    ],
}
METRICS = {
    "reward": 0.4125,
    "reward/std": 0.3,
    "accuracy": 0.41,
    "length": 64.25,
    "rollouts/truncated": 0.031,
    "lag": 0.5,
    "lag/max": 1.0,
    "tokens_per_second": 1812.4,
    "kl_behavior": 1.2e-5,
    "grad_norm": 0.34,
    "seconds/step": 12.1,
    "seconds/wait": 6.0,
    "seconds/forward_backward": 4.0,
}


def info(folder: Path, resumed_step: int = 0) -> RunInfo:
    return RunInfo(name="gsm8k-run", folder=folder, steps=200, config=CONFIG, resumed_step=resumed_step)


def evaluation(step: int, mean: float) -> dict[str, Any]:
    return {
        "step": step,
        "env": "gsm8k",
        "tasks": 40,
        "samples": 4,
        "mean": mean,
        "mean_ci": [mean - 0.06, mean + 0.06],
        "pass_at": {"1": mean, "4": mean + 0.2},
    }


def test_plain_console_is_one_line_per_step_and_per_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Console().open(info(tmp_path))
    writer.evaluation(0, evaluation(0, 0.25), {})
    writer.event("published", {"step": 1})
    writer.write(1, METRICS | {"kl_reference": 0.02})
    writer.write(2, METRICS)
    writer.event("checkpoint_saved", {"step": 2, "seconds": 1.5})
    writer.evaluation(2, evaluation(2, 0.5), {})
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gsm8k-run · SmolLM2-135M · gsm8k · full · shared · 4 × 8 a step · lag ≤ 1 · 200 steps"
    assert lines[1] == "evaluation at step 0: 25.0 % [19–31], pass@4 45.0 %, 40 tasks × 4"
    assert lines[2] == (
        "  1/200  reward 0.412  acc 41%  len 64.2  cut 3.1%  lag 0.5  "
        "kl 0.02  mismatch 1.2e-05  grad 0.34  1,812 tok/s  12.1 s"
    )
    assert re.fullmatch(r"  2/200  reward .*  12\.1 s  \S+ .*left", lines[3])
    assert lines[4] == "checkpoint saved (step 2, seconds 1.5)"
    assert lines[5].endswith("40 tasks × 4; 25.0 % [19–31] at step 0")
    assert len(lines) == 6
    assert all("\x1b" not in line for line in lines)


def does(monkeypatch: pytest.MonkeyPatch, span: str, seconds: float, *open_waits: Wait) -> None:
    """Have the process do something."""
    monkeypatch.setattr(trace, "current", lambda: [(span, seconds)])
    monkeypatch.setattr(waits, "current", lambda: list(open_waits))


def waiting() -> Wait:
    """A wait that has lasted for 12 seconds."""
    return Wait(owner="trainer", reason="the next batch", on="rollout workers", since=time.monotonic() - 12.0)


@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_shows_what_the_run_does_at_any_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    from rich.console import Console as Terminal

    from tandem.observability.loggers._terminal import LiveWriter

    does(monkeypatch, "seconds/wait", 12.0, waiting())
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    writer = LiveWriter(info(tmp_path), terminal)
    for step in range(1, 31):
        writer.write(step, METRICS)
    writer.close()
    with terminal.capture() as capture:
        terminal.print(writer.picture())
    steps, now = capture.get().splitlines()
    assert max(len(steps), len(now)) <= width, "nothing wraps or hangs over"
    assert "step 30/200" in steps
    assert "trainer waits for" in now
    if width == 80:
        assert "left" in steps
        assert "rollout workers (the next batch) 12 s" in now


def test_what_each_request_tells_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Console(live="never").open(info(tmp_path))
    for on in ("engine 0", "engine 0", "engine 1"):
        writer.event("wait", {"owner": "rollouts", "reason": "lost", "on": on, "seconds": 11.0, "state": "deadline"})
    seen = [line.rpartition(" gave up on ")[2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert seen == ["engine 0 (lost) after 11 s", "engine 1 (lost) after 11 s"]


def test_an_alarm_is_told_in_full_and_that_it_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Console(live="never").open(info(tmp_path))
    writer.event("alarm", ALARM)
    writer.event("alarm_over", {"alarm": "length", "step": 75, "since": 50})
    out = capsys.readouterr().out
    assert "ALARM length at step 52, since step 50: answers have 4 tokens" in out
    assert all(ALARM[key] in out for key in ("means", "change"))
    assert "alarm over (alarm length, step 75" in out


def test_answers_are_printed_with_what_they_earned_and_obey_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Console(live="never").open(info(tmp_path)).event("completions", COMPLETIONS)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "answer at step 10, reward 0.25 (number 0, format 0.5), cut by a length limit: task 7, gold answer 2",
        "  > 1 + 1?",
        "  < It is",
        "  < \ufffd[31m3\ufffd[0m.",
    ]
    live = Console(live="always").open(info(tmp_path))
    live.event("completions", COMPLETIONS)
    live.close()
    assert "reward 0.25 " in capsys.readouterr().out


def test_rare_events_are_told_and_frequent_ones_are_not() -> None:
    assert boards.event_lines("published", {"step": 1}) == []
    late = {"owner": "sync", "reason": "health", "on": "engine", "seconds": 61.0, "state": "deadline"}
    assert boards.event_lines("wait", late) == ["sync gave up on engine (health) after 1 m 01 s"]
    assert boards.event_lines("run_done", {}) == ["run done"]


def read_tensorboard(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()
    scalars = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags["scalars"]}
    texts = {
        tag.removesuffix("/text_summary"): reader.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
    }
    return scalars, texts


def test_tensorboard_reads_scalars_and_recipe(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = Tensorboard().open(info(tmp_path))
    writer.write(1, {"reward": 0.25, "loss": float("nan")})
    writer.write(2, {"reward": 0.5})
    writer.evaluation(2, {}, {"eval/mean": 0.75})
    writer.close()
    scalars, texts = read_tensorboard(tmp_path / "tensorboard")
    assert scalars["reward"] == [(1, 0.25), (2, 0.5)]
    assert scalars["eval/mean"] == [(2, 0.75)]
    assert '"max_lag": 1' in texts["recipe"]


def test_tensorboard_has_the_answers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = Tensorboard().open(info(tmp_path))
    writer.event("completions", COMPLETIONS)
    writer.close()
    _, texts = read_tensorboard(tmp_path / "tensorboard")
    assert "    It is\n" in texts["completions"]
    assert "    0.25\n" in texts["completions"]


def test_tensorboard_forgets_what_a_resume_undid(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = Tensorboard().open(info(tmp_path))
    for step in range(1, 7):
        first.write(step, {"reward": float(step)})
    first.close()
    os.rename(
        next((tmp_path / "tensorboard").iterdir()), tmp_path / "tensorboard" / "events.out.tfevents.0000000001.host.1.0"
    )
    second = Tensorboard().open(info(tmp_path, resumed_step=3))
    second.write(4, {"reward": 40.0})
    second.close()
    scalars, _ = read_tensorboard(tmp_path / "tensorboard")
    assert scalars["reward"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


class FakeRun:
    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls = calls

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        self.calls.append(("log", (dict(values), step)))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define_metric", (name, step_metric)))

    def alert(self, title: str, text: str, level: str) -> None:
        self.calls.append(("alert", (title, text, level)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def fake_library(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []

    def init(**options: Any) -> FakeRun:
        calls.append(("init", options))
        return FakeRun(calls)

    module = types.ModuleType(name)
    module.init = init  # type: ignore[attr-defined]
    module.Table = lambda **table: table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def play(writer: Writer, step: int) -> None:
    writer.write(step, {"reward": 0.5})
    writer.evaluation(step, {}, {"eval/mean": 0.25})
    writer.close()


def test_wandb_continues_the_same_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_library(monkeypatch, "wandb")
    play(Wandb(project="p", tags=("a",), mode="offline").open(info(tmp_path)), 1)
    play(Wandb(project="p", mode="offline").open(info(tmp_path, resumed_step=1)), 2)
    first, second = (options for name, options in calls if name == "init")
    assert first["id"] == second["id"] == (tmp_path / "wandb.id").read_text().strip()
    assert first["resume"] == "allow"
    assert first["project"] == "p"
    assert first["tags"] == ["a"]
    assert first["mode"] == "offline"
    assert first["config"] == CONFIG
    assert first["name"] == "gsm8k-run"
    assert first["dir"] == str(tmp_path)
    assert ("define_metric", ("*", "step")) in calls
    assert [what for name, what in calls if name == "log"] == [
        ({"step": 1, "reward": 0.5}, None),
        ({"step": 1, "eval/mean": 0.25}, None),
        ({"step": 2, "reward": 0.5}, None),
        ({"step": 2, "eval/mean": 0.25}, None),
    ]
    assert calls[-1] == ("finish", None)


def test_wandb_alerts_of_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_library(monkeypatch, "wandb")
    Wandb().open(info(tmp_path)).event("alarm", ALARM)
    title, text, level = next(what for name, what in calls if name == "alert")
    assert (title, level) == ("alarm length", "WARN")
    assert all(ALARM[key] in text for key in ("seen", "means", "change"))


@pytest.mark.parametrize("logger", [Wandb(), Trackio()])
def test_loggers_have_a_table_of_answers(logger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_library(monkeypatch, type(logger).__name__.lower())
    logger.open(info(tmp_path)).event("completions", COMPLETIONS)
    values, step = next(what for name, what in calls if name == "log")
    assert (step or values["step"]) == 10
    table = values["completions"]
    row = (
        table["data"][0] if isinstance(logger, Trackio) else dict(zip(table["columns"], table["data"][0], strict=True))
    )
    assert row == {
        "step": 10, "env": "gsm8k", "task": "7", "prompt": "1 + 1?", "answer": "2",
        "completion": COMPLETIONS["samples"][0]["text"], "reward": 0.25, "rewards/number": 0.0, "rewards/format": 0.5,
        "advantage": -0.7,
    }  # fmt: skip


def test_trackio_continues_the_same_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_library(monkeypatch, "trackio")
    play(Trackio(project="p", space="me/board").open(info(tmp_path)), 1)
    play(Trackio(project="p").open(info(tmp_path, resumed_step=1)), 2)
    first, second = (options for name, options in calls if name == "init")
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert first["name"] == second["name"] == "gsm8k-run"
    assert first["space_id"] == "me/board"
    assert ("log", ({"reward": 0.5}, 1)) in calls
    assert ("log", ({"eval/mean": 0.25}, 2)) in calls


@pytest.mark.parametrize(
    ("logger", "package"), [(Wandb(), "wandb"), (Trackio(), "trackio"), (Tensorboard(), "tensorboard")]
)
def test_a_missing_library_names_the_extra(
    logger: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(package + "."))]:
        monkeypatch.setitem(sys.modules, name, None)
    for attempt in (logger.check, lambda: logger.open(info(tmp_path))):
        with pytest.raises(ConfigError, match=rf"pip install 'tandem-rl\[{package}\]'"):
            attempt()
