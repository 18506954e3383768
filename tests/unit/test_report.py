"""The report, built from run folders as a trainer leaves them: whole, torn, empty, long and hostile."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from unit.report_run import made_rollouts, make_run, write

from tandem.errors import TandemError
from tandem.observability.report import page, samples
from tandem.observability.report.folder import load
from tandem.observability.report.summary import episodes, summarise
from tandem.processes import identity

HOSTILE = (
    "</script><script>document.documentElement.dataset.hacked='yes'</script><!-- <img src=x onerror=alert(1)> & \u2028"
)


def data_of(path: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert match
    loaded: dict[str, Any] = json.loads(match[1])
    return loaded


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "arithmetic-smollm2-0601")


@pytest.mark.slow
def test_whole_run_becomes_one_self_contained_page(run_folder: Path) -> None:
    path = page.build(run_folder)
    text = path.read_text()
    assert path == run_folder / "report.html"
    assert list(run_folder.glob("*.tmp")) == []
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "@import" not in text
    assert "url(http" not in text
    assert "default-src 'none'" in text
    data = data_of(path)
    assert data["series"]["steps"] == list(range(1, 41))
    assert len(data["series"]["values"]["reward/p75"]) == 40
    assert [step["step"] for step in data["rollouts"]["steps"]] == list(range(1, 41))
    assert data["resumed"] == [20]
    assert data["config"].startswith("model:")


def test_the_summary_says_what_happened(run_folder: Path) -> None:
    summary = summarise(load(run_folder))
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["steps_planned"], summary["resumes"]) == (40, 40, 1)
    assert summary["before"]
    assert summary["before"]["step"] == 0
    assert summary["before"]["pass_k"] == 4
    assert summary["after"]
    assert summary["after"]["step"] == 40
    assert summary["beyond_interval"]
    assert summary["reward_first"]
    assert summary["reward_last"]
    assert summary["reward_last"] > summary["reward_first"]
    assert summary["tokens_generated"] == pytest.approx(40 * 32 * 28)
    assert 600 < summary["seconds"] < 800, "the hour between kill and resume does not count"
    assert ("learning rate", "3e-05") in summary["facts"]


def test_killed_run_with_torn_files_still_reports(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", until=7, done=False)
    for name in ("metrics.jsonl", "events.jsonl", "eval.jsonl", "rollouts/000007.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 8, "metr')
    summary = data_of(page.build(folder))["summary"]
    assert (summary["status"], summary["steps"]) == ("unfinished", 7)
    assert summary["after"] is None
    assert summary["before"] is not None
    assert summary["reward_window"] == 3, "first and last steps do not overlap"


@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": ""},
        {"config.yaml": "steps: [", "metrics.jsonl": ""},
        {"metrics.jsonl": "\n"},
        {"events.jsonl": "[]\n{}\n"},
    ],
)
def test_almost_nothing_is_enough(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    data = data_of(page.build(tmp_path))
    assert data["series"]["steps"] == []
    assert data["rollouts"]["steps"] == []
    assert data["summary"]["status"] == "not started"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match="not a run folder"):
        page.build(tmp_path)


def test_model_output_cannot_leave_the_data_element(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run<b>&", steps=2)
    records = made_rollouts(random.Random(1), 2, 2)
    for record in records:
        record["text"] = record["answer"] = HOSTILE
        record["messages"][-1]["content"] = record["prompt"][1]["content"] = HOSTILE
        record["tokens"] = [{"t": HOSTILE, "id": 1, "lp": -1.0, "tp": -1.0, "adv": 0.5, "m": 1}]
    write(folder / "rollouts" / "000002.jsonl", records)
    (folder / "config.yaml").write_text(f"steps: 2\nmodel: {json.dumps(HOSTILE)}\n")
    path = page.build(folder)
    text = path.read_text()
    assert text.count("</script>") == 2, "the page's own two"
    assert "<img" not in text
    assert "<!--" not in text
    assert "<b>" not in text
    data = data_of(path)
    assert data["rollouts"]["steps"][1]["groups"][0]["prompt"][1]["content"] == HOSTILE
    assert [1, HOSTILE] in data["rollouts"]["pieces"]


def alarm_event(step: int, alarm: str = "length", over: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {"time": 100.0 + step, "event": "alarm_over" if over else "alarm", "alarm": alarm}
    row |= {"step": step, "since": step - 2}
    return row if over else {**row, "seen": f"seen at {step}", "means": "m", "change": "c", "metrics": ["length"]}


def test_alarms_are_told_by_episode_without_what_a_resume_undid(tmp_path: Path) -> None:
    events = [
        alarm_event(10),
        alarm_event(20, over=True),
        alarm_event(30),
        {"time": 131.0, "event": "resumed", "step": 15},
        alarm_event(18, over=True),
        alarm_event(40, "entropy"),
    ]
    (tmp_path / "config.yaml").write_text("steps: 200\nmodel: m\n")
    write(tmp_path / "events.jsonl", events)
    rows = episodes(load(tmp_path))
    assert [(row["alarm"], row["step"], row["over"]) for row in rows] == [("length", 10, 18), ("entropy", 40, None)]
    assert rows[1]["seen"] == "seen at 40"
    assert data_of(page.build(tmp_path))["alarms"] == rows


def test_long_runs_are_thinned_without_losing_extremes(tmp_path: Path) -> None:
    rows = [
        {"step": i, "time": 1.0, "metrics": {"loss": float(i), "lag/max": float(i), "lag/min": float(i)}}
        for i in range(1, 2001)
    ]
    write(tmp_path / "metrics.jsonl", rows)
    columns = page.columns(load(tmp_path), most=500)
    assert columns["share"] == 4
    assert len(columns["steps"]) == 500
    assert columns["steps"][-1] == 2000
    assert [columns["values"][name][0] for name in ("loss", "lag/max", "lag/min")] == [2.5, 4.0, 1.0]


def test_tokens_survive_packing(tmp_path: Path) -> None:
    record = made_rollouts(random.Random(5), 1, 2, groups=1, size=1)[0]
    record["tokens"] = [
        {"t": "4", "id": 36, "lp": -0.12345, "tp": -0.12344, "adv": 0.5, "m": 1},
        {"t": "4", "id": 36, "lp": -2.0, "tp": None, "adv": -0.25, "m": 0},
    ]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text("steps: 1")
    write(tmp_path / "rollouts" / "000001.jsonl", [record])
    packed = samples.collect(load(tmp_path))
    rollout = packed["steps"][0]["groups"][0]["rollouts"][0]
    assert packed["pieces"] == [(36, "4")]
    assert rollout["p"] == [0, 0]
    assert rollout["l"] == [-1234, -20000]
    assert rollout["d"] == [10, None]
    assert rollout["a"] == [0.5, -0.25]
    assert rollout["m"] == [1, 0]


def tokens_of(*texts: str) -> list[dict[str, Any]]:
    return [{"t": text, "id": i, "lp": -1.0, "tp": -1.0, "adv": 0.0, "m": 1} for i, text in enumerate(texts)]


TURNS = [
    {"role": "assistant", "content": "<call>3*4</call>"},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "It is 12."},
]


@pytest.mark.parametrize(("after", "beyond"), [((0.41, 0.55), True), ((0.39, 0.55), False), ((0.1, 0.19), False)])
def test_a_change_counts_where_its_interval_is_above_the_first_ones(
    tmp_path: Path, after: tuple[float, float], beyond: bool
) -> None:
    rows = [{"step": 0, "mean": 0.3, "mean_ci": [0.2, 0.4]}, {"step": 9, "mean": sum(after) / 2, "mean_ci": [*after]}]
    write(tmp_path / "eval.jsonl", rows)
    (tmp_path / "config.yaml").write_text("steps: 9")
    assert summarise(load(tmp_path))["beyond_interval"] is beyond


def mixed_run(folder: Path) -> Path:
    """A run of two environments."""
    make_run(folder, steps=4)
    (folder / "config.yaml").write_text(
        "steps: 4\nmodel: m\nenvs:\n  sums: {env: {kind: arithmetic}, weight: 2.0, min_share: 0.25}\n"
        "  tool: {env: calculator, weight: 1.5}\n"
    )
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        for name, reward in (("sums", 0.25), ("tool", 0.75)):
            row["metrics"] |= {f"env/{name}/{key}": reward for key in ("reward", "zero_variance", "groups", "accuracy")}
            row["metrics"][f"env/{name}/trained"] = 4.0
    write(folder / "metrics.jsonl", metrics)
    looks = [
        {"step": step, "env": "sums+tool", "mean": 0.5, "tasks": 8, "samples": 2, "pass_at": {"1": 0.5, "2": 0.6},
         "envs": {"sums": {"mean": 0.25, "tasks": 4, "mean_ci": [0.1, 0.4], "pass_at": {"1": 0.25, "2": 0.4}},
                  "tool": {"mean": 0.75, "tasks": 4}}}
        for step in (0, 4)
    ]  # fmt: skip
    write(folder / "eval.jsonl", looks)
    return folder


def test_a_run_that_failed_says_by_what(tmp_path: Path) -> None:
    begin = {"time": 1.0, "event": "run_started"}
    write(tmp_path / "events.jsonl", [begin, {"time": 2.0, "event": "run_failed", "message": "<b>no reward</b>"}])
    summary = summarise(load(tmp_path))
    assert (summary["status"], summary["error"]) == ("failed", "<b>no reward</b>")
    text = page.build(tmp_path).read_text()
    assert "It failed: &lt;b&gt;no reward" in text
    assert "<b>no reward" not in text
    write(
        tmp_path / "events.jsonl",
        [begin, {"time": 2.0, "event": "stalled", "why": "w"}, {"time": 3.0, "event": "resumed"}],
    )
    assert summarise(load(tmp_path))["error"] is None


def test_a_live_run_is_running_and_one_that_was_killed_was_killed(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [{"time": 1.0, "event": "run_started"}])
    assert summarise(load(tmp_path))["status"] == "unfinished"
    me = identity(os.getpid())
    assert me is not None
    signs = {"pid": me.pid, "started": me.started}
    (tmp_path / "vitals.json").write_text(json.dumps(signs))
    assert summarise(load(tmp_path))["status"] == "running"
    (tmp_path / "vitals.json").write_text(json.dumps({**signs, "started": "another boot"}))
    assert summarise(load(tmp_path))["status"] == "killed"


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))),
    None,
)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to draw the page with")
@pytest.mark.parametrize("kind", ["whole", "hostile", "empty", "mixed"])
def test_the_page_draws_without_a_script_error(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    if kind == "empty":
        folder.mkdir()
        (folder / "config.yaml").write_text("steps: 3\nmodel: m\n")
    else:
        mixed_run(folder) if kind == "mixed" else make_run(folder, steps=4)
    if kind == "hostile":
        record = made_rollouts(random.Random(1), 4, 4, groups=1, size=1)[0]
        record |= {
            "messages": [*record["prompt"], *TURNS, {"role": "user", "content": HOSTILE}],
            "tokens": tokens_of(HOSTILE, ""),
            "answer": HOSTILE,
            "status": "error",
            "reward": None,
            "error": HOSTILE,
        }
        write(folder / "rollouts" / "000004.jsonl", [record])
    drawn = dump_dom(page.build(folder), tmp_path)
    root = re.search(r"<html[^>]*>", drawn)
    assert root
    assert 'data-ready="yes"' in root[0]
    assert "data-error" not in root[0]
    assert "data-hacked" not in root[0]
    assert (">Environments</h" in drawn) == (kind == "mixed")
    if kind == "whole":
        assert drawn.count("<article") >= 13
        assert 'class="tok"' in drawn
        assert len(re.findall(r'<button[^>]*aria-current="true"', drawn)) == 1, "one group of the list is marked"
        assert len(re.findall(r"<canvas", drawn)) >= 12
        assert "undefined" not in drawn.split('id="data"')[0], "nothing has a colour or a name that there is not"
    if kind == "hostile":
        assert "<img" not in drawn.split('id="data"')[0]


def dump_dom(path: Path, home: Path) -> str:
    """The page after its script ran."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={home / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        path.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
