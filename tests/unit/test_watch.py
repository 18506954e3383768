"""The page of all runs: what it shows, what it says of a run first, and whom it answers."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.cli.watch import RunsPage, watch
from tandem.errors import ConfigError
from tandem.observability.report import overview
from tandem.observability.report.folder import load


def written(folder: Path, *, events: Any = (), **metrics: list[float]) -> Path:
    """A run's folder with these metrics by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("model: org/<m>\nsteps: 9\nenv: {kind: gsm8k}\nmax_lag: 1\n")
    steps = range(len(next(iter(metrics.values()), ())))
    names = {name: name.replace("__", "/") for name in metrics}
    each = [{names[name]: values[i] for name, values in metrics.items()} for i in steps]
    rows = [{"step": i + 1, "time": 10.0 + i, "metrics": each[i]} for i in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    return folder


FAILED = [{"event": "run_failed", "time": 1.0, "message": "out of memory"}]
ALARM = [{"event": "alarm", "step": 2, "since": 1, "time": 1.0, "alarm": "entropy", "seen": "it fell", "means": "",
          "change": "", "metrics": []}]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "events", "says"),
    [
        ({}, (), "no step is done yet"),
        ({"seconds__step": [10.0, 10.0], "seconds__wait": [8.0, 9.0]}, (), "85% of a step is waiting for rollouts"),
        ({"groups__zero_variance": [0.5, 0.3]}, (), "40% of groups had equal rewards"),
        ({"groups__zero_variance": [0.1], "rollouts__truncated": [0.6]}, (), "60% of answers were cut"),
        ({"reward": [1.0]}, FAILED, "It failed: out of memory"),
        ({"reward": [1.0, 1.0]}, ALARM, "Alarm entropy since step 1: it fell"),
    ],
)
def test_a_diagnosis_is_a_sentence(metrics: Any, events: Any, says: str, tmp_path: Path) -> None:
    text = overview.diagnosis(load(written(tmp_path / "a", events=events, **metrics)))
    assert says in text
    assert "10%" not in text


def answers(folder: Path, *requests: tuple[str, dict[str, str]]) -> list[tuple[int, str]]:
    async def responses() -> list[tuple[int, str]]:
        async with TestClient(TestServer(RunsPage(folder).application())) as client:
            each = [await client.get(path, headers=headers) for path, headers in requests]
            return [(response.status, await response.text()) for response in each]

    return asyncio.run(responses())


def test_every_run_is_on_the_page_and_has_one_of_its_own(tmp_path: Path) -> None:
    written(tmp_path / "a", reward=[0.0, 1.0])
    written(tmp_path / "b", reward=[0.5])
    (_, page), (_, report), (missing, _) = answers(tmp_path, ("/", {}), ("/run/a", {}), ("/run/c", {}))
    assert page.count("<article>") == 2
    assert "reward 0 → 1" in page
    assert "org/&lt;m&gt;" in page
    assert '<body><p class="notice">' in report
    assert missing == 404


def test_a_page_of_elsewhere_is_refused(tmp_path: Path) -> None:
    cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    assert [status for status, _ in answers(tmp_path, ("/", {"Host": "evil.example"}), ("/", cross))] == [403, 403]


def test_a_run_is_read_again_only_when_it_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    card = overview.card
    monkeypatch.setattr(overview, "card", lambda run: reads.append(run) or card(run))
    page, run = RunsPage(tmp_path), written(tmp_path / "a", reward=[0.0])
    page._card(run)
    page._card(run)
    os.utime(run / "metrics.jsonl", ns=(1, 1))
    page._card(run)
    assert len(reads) == 2


def test_a_folder_that_is_not_there_is_not_watched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nothing"):
        watch(tmp_path / "nothing", 0, print)
