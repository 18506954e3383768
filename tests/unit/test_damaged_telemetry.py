"""Telemetry of a run that is damaged: it is told of and set aside, and decides nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.observability import json_lines
from tandem.observability.report.folder import load
from tandem.observability.report.summary import summarise
from tandem.trainer.run_folder import reporting

GOOD = {
    "metrics.jsonl": b'{"step":1,"time":1.0,"metrics":{"reward":0.5}}\n',
    "events.jsonl": b'{"time":1.0,"event":"run_started","step":0}\n',
    "eval.jsonl": b'{"step":0,"mean":0.5,"mean_ci":[0.4,0.6],"pass_at":{"1":0.5},"samples":1,"env":"e"}\n',
}
BAD = {
    "binary": b"\x00\xff\xfe rubbish\n" * 3,
    "cut off": b'{"step": 2, "metr\n',
    "a list": b"[1, 2]\n",
    "another row": b'{"step":"two","time":"x","metrics":{"reward":"high"},"event":7,"mean":"a"}\n',
    "too deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", GOOD)
def test_rows_that_are_none_are_skipped_and_set_aside_when_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, bad: bytes
) -> None:
    (tmp_path / "config.yaml").write_text("model: m\nsteps: 3\nenv: e\n")
    for other, rows in GOOD.items():
        (tmp_path / other).write_bytes(rows)
    (tmp_path / name).write_bytes(bad + GOOD[name])
    assert summarise(load(tmp_path))["steps"] == 1
    assert caplog.text.count("is damaged: line 1 is no row of it") == 1
    with reporting(tmp_path):
        pass
    assert (tmp_path / name).read_bytes() == GOOD[name]
    assert (tmp_path / f"{name}.damaged").read_bytes() == bad + GOOD[name]


def test_what_lies_in_the_place_of_telemetry_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text("model: m\nsteps: 3\nenv: e\n")
    for name in GOOD:
        (tmp_path / name).mkdir()
    assert summarise(load(tmp_path))["steps"] == 0
    with caplog.at_level(logging.WARNING), reporting(tmp_path):
        assert "metrics.jsonl.damaged" in caplog.text
        assert list(json_lines.read(tmp_path / "metrics.jsonl")) == []
    assert (tmp_path / "report.html").is_file()
