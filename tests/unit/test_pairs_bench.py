"""The benchmark of several ranks: what its table says of the goals, and how long an engine is said to stand still."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pairs

    return pairs


def step(seconds: float, half: str, setting: str) -> dict[str, Any]:
    return {"half": half, "setting": setting, "seconds": seconds, "parts": {"sampling": seconds / 2}}


def test_an_engine_stands_still_for_the_gather_and_not_for_the_update(pairs: ModuleType) -> None:
    line = {"kind": "step", "paused": 0.1, "held": True, "update": 0.08, "gather": 0.01, "publish": 0.025}
    line["calls"] = {"probe": 0.02}
    first = {**line, "paused": 9.0}  # left out: kernels are compiled
    summary = pairs.publishes([{"kind": "about"}, first, first, line, line, {"kind": "step"}])
    assert summary["still_ms"] == pytest.approx(30.0)
    assert summary["still_most_ms"] == pytest.approx(30.0)
    assert summary["gather_ms"] == pytest.approx(10.0)
    assert summary["calls_ms"] == {"probe": 20.0}
    paused_after = {**line, "held": False, "paused": 0.02}
    assert pairs.publishes([first, first, paused_after])["still_ms"] == pytest.approx(20.0)


def test_no_step_gives_no_publishes(pairs: ModuleType) -> None:
    assert pairs.publishes([{"kind": "about"}]) == {}


def test_every_ratio_is_beside_its_goal_and_a_miss_fails(pairs: ModuleType) -> None:
    lines = [step(2.0, "pairs", "pairs"), step(1.9, "pairs", "one"), step(1.5, "pairs", "pairs-half")]
    text, fine = pairs.report(lines)
    assert "one card: 1.053 (goal <= 1.08, reached)" in text
    assert "one card: 0.789 (goal <= 0.62, MISSED)" in text
    assert "TRL" not in text, "what was not measured has no ratio"
    assert not fine
    assert pairs.report(lines[:2])[1]


def test_results_of_two_calls_are_one_table(pairs: ModuleType) -> None:
    first = [step(2.0, "pairs", "pairs"), {"half": "publish", "setting": "pairs", "still_ms": 20.0, "gather_ms": 9.0}]
    second = [step(2.4, "pairs", "sharded"), {"half": "publish", "setting": "sharded", "publish_ms": 12.0}]
    text, fine = pairs.report([*first, *second])
    assert fine
    assert "sharded weights / pairs: 1.200" in text
    assert "engines stand still: 20.000 ms" in text
    assert "a publish takes 12.0 ms" in text


def test_tokens_of_shared_sequences_count_for_each_card(pairs: ModuleType) -> None:
    base = {"half": "context", "batch": "length 16384", "tokens": 1000, "optimizer_seconds": 0.1, "peak_gb": None}
    lines = [{**base, "setting": "alone", "seconds": 0.9}, {**base, "setting": "divided", "seconds": 0.4}]
    text, fine = pairs.report(lines)
    assert "one: 1.000 (goal >= 0.9, reached)" in text
    assert fine
    slower = [lines[0], {**lines[1], "seconds": 0.6}]
    assert not pairs.report(slower)[1]


def test_a_setting_that_failed_is_named(pairs: ModuleType) -> None:
    text, fine = pairs.report(
        [step(2.0, "pairs", "pairs"), {"half": "pairs", "setting": "sharded", "error": "refused"}]
    )
    assert "FAILED sharded: refused" in text
    assert not fine


def test_a_card_is_one_of_those_that_the_process_sees(pairs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import _versus

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _versus.visible(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-3f")
    assert [_versus.visible(index) for index in range(3)] == ["2", "GPU-3f", "2"]
