"""Telemetry of a run that is damaged: it is told of, and decides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.observability.report.folder import load
from tandem.observability.report.summary import summarise

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
def test_rows_that_are_none_are_skipped_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, bad: bytes
) -> None:
    (tmp_path / "config.yaml").write_text("model: m\nsteps: 3\nenv: e\n")
    for other, rows in GOOD.items():
        (tmp_path / other).write_bytes(rows)
    (tmp_path / name).write_bytes(bad + GOOD[name])
    assert summarise(load(tmp_path))["steps"] == 1
    assert caplog.text.count("is damaged: line 1 is no row of it") == 1
