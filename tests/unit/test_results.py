"""The runs behind docs/design/results.md: each is a recipe that loads, and its folder is summed up and told rightly."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tandem.config.loading import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The driver; recipes are run from the project's root."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    import results

    return results


def module(name: str) -> ModuleType:
    return sys.modules[f"_results_{name}"]


def planned(gsm8k: Path | None = None) -> list[Any]:
    args = argparse.Namespace(gsm8k=gsm8k)
    return [run for make in module("sets").SETS.values() for run in make(args)]


def write(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 40 steps that was summed up by hand."""
    at = tmp_path / "run"
    steps = [
        {
            "reward": n / 40,
            "tokens/generated": 100.0,
            "seconds/step": 2.0,
            "engine/paused_seconds": 0.04,
            "probe_gap": 0.1,
        }
        | {"memory/rss_gb": 1 + n / 100}
        for n in range(1, 41)
    ]
    write(at, "metrics", *({"step": n, "time": 1000 + 2.0 * n, "metrics": m} for n, m in enumerate(steps, 1)))
    look = {"tasks": 10, "samples": 4, "seconds": 3.0, "rollouts": ["long texts"]}
    write(
        at,
        "eval",
        {"step": 0, "time": 990.0, "mean": 0.2, "mean_ci": [0.1, 0.3], **look},
        {"step": 40, "time": 1083.0, "mean": 0.7, "mean_ci": [0.6, 0.8], **look},
    )
    published = [{"time": 0, "event": "published", "step": n, "digest": f"d{n}"} for n in range(41)]
    write(at, "events", {"time": 980.0, "event": "run_started"}, *published, {"time": 1090.0, "event": "run_done"})
    return at


def summed(folder: Path, **about: Any) -> dict[str, Any]:
    record = {"name": "tasks-sums-full-shared-0", "set": "tasks", "task": "sums", "trained": "full", "way": "shared"}
    record |= {"system": "tandem", "seed": 0, "steps": 40, "command": "python -m tandem train it"}
    return {**record, **module("folder").record(folder), **about}


@pytest.mark.slow
def test_every_run_is_a_recipe_that_loads(tmp_path: Path) -> None:
    runs = planned(tmp_path)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        config = load(run.recipe, run.words()).config
        assert (config.seed, config.steps) == (run.seed, run.steps)
        assert config.trainable is not None


def test_the_matrix_has_each_kind_of_training_by_each_way_that_carries_it() -> None:
    runs = {(run.task, run.trained, run.way) for run in planned() if run.set == "matrix"}
    assert len(runs) == 2 * (3 * 3 + 1)
    assert {kind for _, kind, way in runs if way == "hotswap"} == {"lora"}


def test_at_least_six_tasks_have_three_seeds() -> None:
    seeds: dict[str, set[int]] = {}
    for run in planned():
        if run.set == "tasks" and run.trained == "full":
            seeds.setdefault(run.task, set()).add(run.seed)
    assert len(seeds) >= 6
    assert all(numbers == {0, 1, 2} for numbers in seeds.values())


def test_a_later_override_replaces_an_earlier_one_of_the_same_option() -> None:
    run = module("sets").Planned(
        set="x", task="y", steps=3, overrides=("optimizer.lr=1", "context=5", "optimizer.lr=2")
    )
    assert run.words("context=7") == ["steps=3", "seed=0", "optimizer.lr=2", "context=7"]  # in the order of the last


def test_a_folder_is_summed_up(folder: Path) -> None:
    record = module("folder").record(folder)
    assert record["done"]
    assert record["steps_done"] == 40
    assert record["curves"]["reward"] == [round((4 * i + 3) / 80, 5) for i in range(20)]
    assert (record["tokens_generated"], record["step_seconds"], record["paused_ms"]) == (4000, 2.0, 40.0)
    assert record["publishes"] == 41
    assert record["memory"]["memory/rss_gb"] == [1.09, 1.4]
    assert "rollouts" not in record["held_out"][0]


def test_evaluations_are_no_time_of_training(folder: Path) -> None:
    rows, looks = (module("folder").lines(folder / f"{name}.jsonl") for name in ("metrics", "eval"))
    seconds = module("folder").trained_for(rows, looks)
    assert (seconds[0], seconds[-1]) == (2.0, 80.0)
    looked_at = [{"time": 1050.0, "seconds": 3.0}]
    assert module("folder").trained_for(rows, looked_at)[-1] == 77.0


def test_a_run_that_was_cut_off_is_told_as_not_done(folder: Path, results: ModuleType) -> None:
    events = (folder / "events.jsonl").read_text().splitlines()[:-1]
    (folder / "events.jsonl").write_text("\n".join(events))
    text = module("report").report([summed(folder, error="it broke")])
    assert "40 of 40 steps; it broke" in text


def test_an_alarm_is_told_once_and_its_end_is_none(folder: Path) -> None:
    raised = {"time": 1, "event": "alarm", "alarm": "entropy", "step": 3}
    events = folder / "events.jsonl"
    events.write_text(events.read_text() + json.dumps(raised) + "\n" + json.dumps({**raised, "event": "alarm_over"}))
    (text,) = module("folder").record(folder)["alarms"]
    assert json.loads(text) == {"alarm": "entropy", "step": 3}


def test_a_failed_proof_is_told_with_its_reason(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs/run.log").write_text("INFO engine is asked again: in doubt\nINFO engine is asked again: in doubt\n")
    (folder / "proofs").mkdir()
    (folder / "proofs/000007.json").write_text(json.dumps({"why": "more than rounding"}))
    record = summed(folder)
    assert (record["proofs_asked_again"], record["proofs_failed"]) == (2, ["more than rounding"])
    text = module("report").report([record])
    assert "| 2, 1 |" in text
    assert "tasks-sums-full-shared-0: more than rounding" in text


def test_the_tables_have_what_was_measured(folder: Path) -> None:
    text = module("report").report(
        [summed(folder, constant=0.35), summed(folder, name="tasks-sums-full-shared-1", seed=1)]
    )
    assert "| 20.0 (10.0 to 30.0) | 70.0 (60.0 to 80.0) |" in text
    assert "| sums, full, shared, tandem | 2 | 35.0 | 20.0, 20.0 |" in text
    assert "+50.0" in text
    assert "python -m tandem train it" in text


def test_trl_is_compared_at_equal_tokens_and_equal_time(folder: Path) -> None:
    ours = summed(folder, set="trl")
    theirs = {**ours, "name": "trl-sums-trl", "system": "trl", "tokens_to": [2 * t for t in ours["tokens_to"]]}
    theirs["seconds_to"] = [4 * s for s in ours["seconds_to"]]
    text = module("report").versus([ours, theirs])
    by_tokens, by_seconds = text.splitlines()[2:]
    assert "3950 tokens" in by_tokens
    assert float(by_tokens.split("|")[4]) > 1.9 * float(by_tokens.split("|")[5])
    assert "79.0 seconds" in by_seconds
    assert float(by_seconds.split("|")[4]) > 3.5 * float(by_seconds.split("|")[5])


def test_runs_are_equal_as_long_as_their_digests_are(folder: Path) -> None:
    long = module("long")
    one = long.digests(folder)
    assert long.equal_until(one, one) == 40
    assert long.equal_until(one, {**one, 7: "another"}) == 6
    assert long.equal_until(one, {}) == 0


def test_answers_are_compared_token_by_token(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, "metrics", *({"step": n} for n in (1, 2)))
    for at, last in ((folder, 7), (other, 8)):
        write(at / "rollouts", "000001", {"rollout": "a/0", "tokens": [{"id": 5}, {"id": 6}]})
        write(at / "rollouts", "000002", {"rollout": "a/0", "tokens": [{"id": 5}, {"id": last}]})
    assert module("long").same_answers(folder, other) == 1
    assert module("long").same_answers(other, other) == 2


def test_memory_is_judged_after_a_process_has_started_up(tmp_path: Path) -> None:
    rows = [
        {
            "step": n,
            "card_gb": None,
            "processes": {"7": ["trainer", *(2 * [min(4.0, n / 10)])], "8": ["brief", 1.0, 1.0]},
        }
        for n in range(101)
    ]
    for row in rows[5:]:
        del row["processes"]["8"]
    write(tmp_path, "memory", *rows)
    (life,) = module("long").lives(tmp_path / "memory.jsonl", 100)
    assert life["role"] == "trainer"
    assert life["steps"] == [20, 100]
    assert life["gb"][1] == 4.0
    assert life["growth"] > 0.3  # from 20 to 40 it still grew
    for row in rows:
        row["processes"]["7"] = ["trainer", 4.0, 4.0]
    write(tmp_path, "memory", *rows)
    assert module("long").lives(tmp_path / "memory.jsonl", 100)[0]["growth"] == 0.0


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_killed_once_the_run_has_come_so_far(folder: Path, victim: subprocess.Popen[bytes]) -> None:
    kills = folder.parent / "kills.jsonl"
    (folder / "engine-0.json").write_text(json.dumps({"pid": victim.pid}))
    early = module("long").Killer(folder, kills, 1000)
    early.look(os.getpid())
    assert victim.poll() is None
    killer = module("long").Killer(folder, kills, 100)
    killer.look(os.getpid())
    assert victim.wait(20) == -signal.SIGKILL
    assert not killer.expected  # the run starts another by itself
    assert [kill["what"] for kill in module("folder").lines(kills)] == ["engine"]
    assert module("long").Killer(folder, kills, 100)._done[0]["step"] == 40


def test_a_driver_resumes_what_was_saved_and_begins_anew_what_was_not(results: ModuleType, tmp_path: Path) -> None:
    args = SimpleNamespace(
        runs=tmp_path, minutes=1, devices="0,1", beside=2, model=None, override=["steps=9"], gsm8k=None, keep=False
    )
    run = module("sets").Planned(set="x", task="y", steps=3)
    driver = results.Driver(args, [run])
    begun = driver.command(run, tmp_path / run.name)
    assert begun[1:4] == ["-m", "tandem", "train"]
    assert f"name={run.name}" in begun
    (tmp_path / run.name / "checkpoints/000002").mkdir(parents=True)
    assert driver.command(run, tmp_path / run.name)[-1] == str(tmp_path / run.name)
    driver.jobs = [SimpleNamespace(device="0")] * 2
    assert driver._free() == "1"
    driver.jobs = [SimpleNamespace(device=name) for name in "0011"]
    assert driver._free() == "none"
