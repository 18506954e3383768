"""The live page of runs: what it says of a run first, what it reads again, whom it answers, what a browser draws."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from support.chromium import CHROMIUM, Page, browsing
from unit.report_run import made_metrics, made_rollouts, make_run, write

from tandem.cli.watch import RunsPage, watch
from tandem.errors import ConfigError
from tandem.observability import json_lines
from tandem.observability.report import page
from tandem.observability.report.folder import load, state
from tandem.observability.report.summary import diagnosis, summarise


def written(folder: Path, *, events: Any = (), **metrics: list[float]) -> Path:
    """A run's folder with these metrics by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("model: org/<m>\nsteps: 9\nenv: {kind: gsm8k}\nmax_lag: 1\n")
    steps = range(len(next(iter(metrics.values()), ())))
    names = {name: name.replace("__", "/") for name in metrics}
    each = [{names[name]: values[i] for name, values in metrics.items()} for i in steps]
    write(folder / "metrics.jsonl", [{"step": i + 1, "time": 10.0 + i, "metrics": each[i]} for i in steps])
    write(folder / "events.jsonl", list(events))
    return folder


FAILED = [{"event": "run_failed", "time": 1.0, "message": "out of memory"}]
ALARM = [{"event": "alarm", "step": 2, "since": 1, "time": 1.0, "alarm": "entropy", "seen": "it fell", "means": "",
          "change": "", "metrics": []}]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "events", "says"),
    [
        ({}, (), "no step is done yet"),
        ({"seconds__step": [10.0, 10.0], "seconds__wait": [8.0, 9.0]}, (), "85% of a step is waiting for rollouts ("),
        ({"reward": [1.0]}, FAILED, "It failed: out of memory"),
        ({"reward": [1.0, 1.0]}, ALARM, "Alarm entropy since step 1: it fell"),
        ({"reward": [1.0]}, (), "Nothing stands out."),
    ],
)
def test_a_diagnosis_is_a_sentence(metrics: Any, events: Any, says: str, tmp_path: Path) -> None:
    run = load(written(tmp_path / "a", events=events, **metrics))
    assert says in diagnosis(run, summarise(run))


def answers(folder: Path, *requests: str, key: str = "", **headers: str) -> list[tuple[int, Any]]:
    """Status and JSON, or text, of each path."""

    async def responses() -> list[tuple[int, Any]]:
        async with TestClient(TestServer(RunsPage(folder, key).application())) as client:
            each = [
                await client.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()})
                for path in requests
            ]
            return [
                (answer.status, await (answer.json() if answer.content_type.endswith("json") else answer.text()))
                for answer in each
            ]

    return asyncio.run(responses())


def test_runs_their_parts_and_comparisons_are_told_as_json(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=4)
    written(tmp_path / "b", reward=[0.5])
    (_, runs), (_, run), (_, curves), (_, step), (_, compared), (missing, text), (outside, _) = answers(
        tmp_path, "/runs", "/run?name=a", "/part?name=a&part=curves", "/step?name=a&step=3",
        "/compare?compare=a&compare=b", "/run?name=c", "/run?name=../a",
    )  # fmt: skip
    assert [each["name"] for each in runs["runs"]] == ["a", "b"]
    assert runs["runs"][0]["curve"]["steps"] == [1, 2, 3, 4]
    assert set(run["marks"]) == set(page.PARTS)
    assert curves["series"]["steps"] == [1, 2, 3, 4]
    assert (step["step"], len(step["groups"])) == (3, 4)
    assert compared["differences"]["steps"] == ["4", "9"]
    assert [len(each["series"]["steps"]) for each in compared["runs"]] == [4, 1]
    assert (missing, outside) == (404, 404)
    assert "there is no run c" in text


def test_a_page_of_elsewhere_is_refused_and_a_key_asked_for(tmp_path: Path) -> None:
    written(tmp_path / "a", reward=[0.5])
    assert answers(tmp_path, "/", Host="evil.example")[0][0] == 403
    assert answers(tmp_path, "/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0][0] == 403
    assert answers(tmp_path, "/runs", Host="localhost:1234", Sec_Fetch_Site="same-origin")[0][0] == 200, "by a tunnel"
    assert [status for status, _ in answers(tmp_path, "/", "/runs", key="k")] == [200, 401]
    assert answers(tmp_path, "/runs", key="k", Authorization="Bearer k", Host="gpu.example.org")[0][0] == 200


def test_a_run_has_another_state_once_a_row_has_come(tmp_path: Path) -> None:
    run = written(tmp_path / "a", reward=[0.0, 1.0])
    before = state(run)
    assert state(run) == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 12.0, "metrics": {"reward": 0.5}}\n{"step": 4, "ti')
    assert state(run) != before
    assert [row["step"] for row in load(run).metrics] == [1, 2, 3]


def test_of_a_large_file_rows_at_equal_distances_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "SMALL", 1)
    run = written(tmp_path / "a", reward=[0.0] * 1000)
    steps = [row["step"] for row in json_lines.sample(run / "metrics.jsonl", 10, recent=3)]
    assert (steps[0], steps[-3:]) == (1, [998, 999, 1000])
    assert all(90 < b - a < 130 for a, b in pairwise(steps[:9]))


def test_a_folder_that_is_not_there_is_not_watched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nothing"):
        watch(tmp_path / "nothing", "127.0.0.1", 0, print)


@asynccontextmanager
async def opened(folder: Path, home: Path) -> AsyncIterator[tuple[Page, str]]:
    """A browser, and the page's address."""
    async with TestServer(RunsPage(folder).application(), host="127.0.0.1") as server, browsing(home) as tab:
        yield tab, str(server.make_url("/"))


async def serious(tab: Page) -> list[str]:
    """What axe finds wrong with a page."""
    await tab.evaluate(resources.files("axe_core_python").joinpath("axe.min.js").read_text() + ";0")
    violations = await tab.evaluate("axe.run().then(({violations}) => violations)")
    return [
        f"{each['id']}: {node['html'][:120]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to draw the page with")
def test_a_browser_draws_every_view_whole_at_every_width(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "a", steps=12, until=8, done=False)
    make_run(runs / "b", steps=12)

    async def looked_at() -> None:
        async with opened(runs, tmp_path / "profile") as (tab, url):
            for query in ("", "?run=b", "?compare=a&compare=b"):
                for width, dark in ((1400, False), (390, True)):
                    await tab.size(width, dark=dark)
                    await tab.go(url + query)
                    assert await tab.evaluate("document.documentElement.dataset.error") is None
                    assert await tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off"
                    assert await serious(tab) == []
                    assert "undefined" not in await tab.evaluate("document.body.innerText")

    asyncio.run(looked_at())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to draw the page with")
def test_an_open_page_shows_a_new_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", steps=12, until=3, done=False)

    async def moved() -> None:
        async with opened(tmp_path / "runs", tmp_path / "profile") as (tab, url):
            await tab.go(f"{url}?run=a")
            shown = "document.querySelector('.browser .tools b').textContent + document.querySelectorAll('.tok').length"
            await tab.until(f"/^step 3[1-9]/.test({shown})")
            rng = random.Random(2)
            write(run / "rollouts" / "000004.jsonl", made_rollouts(rng, 4, 12))
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 4, "time": 1.78e9 + 48, "metrics": made_metrics(rng, 4, 12)}) + "\n")
            await tab.until("document.querySelector('.status').textContent.includes('step 4')")
            await tab.until(f"/^step 4[1-9]/.test({shown})")

    asyncio.run(moved())
