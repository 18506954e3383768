"""``tandem eval`` prints what was said beside the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.evaluate import evaluate
from tandem.trainer import assemble as run

NUMBERS: dict[str, Any] = {
    "tasks": 2, "mean": 0.5, "mean_ci": [0.1, 0.9], "pass_at": {"1": 0.5}, "pass_ci": [0.1, 0.9], "tokens": 4.0,
    "truncated": 0.0, "failed": 0,
}  # fmt: skip
ROLLOUTS = [
    {"task": "a", "prompt": "1 + 1?", "answer": "2", "text": "It is 3.", "reward": 0.0},
    {"task": "b", "prompt": "2 + 2?", "answer": "4", "text": "It is 4.", "reward": 1.0},
    {"task": "c", "prompt": "3 + 3?", "answer": "6", "text": "Six?", "reward": 0.5},
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    async def evaluated(config: Any, *, weights: Path | None) -> dict[str, Any]:
        return {**NUMBERS, "env": "arithmetic", "samples": 1, "envs": {"arithmetic": NUMBERS}, "rollouts": ROLLOUTS}

    monkeypatch.setattr(run, "evaluate", evaluated)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "steps": 1, "env": "arithmetic"}))
    return path


def test_the_best_and_the_worst_answer_are_printed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(recipe, [], None)
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "an answer, reward 1: task b, gold answer 4",
        "  > 2 + 2?",
        "  < It is 4.",
        "an answer, reward 0: task a, gold answer 2",
        "  > 1 + 1?",
        "  < It is 3.",
    ]


def test_answers_that_failed_are_counted(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(recipe, [], None)
    assert "failed" not in capsys.readouterr().out
    monkeypatch.setitem(NUMBERS, "failed", 2)
    evaluate(recipe, ["evaluate.samples=1"], None)
    assert "  2 of 2 answers failed, as the environment or a reward did; they count as wrong" in capsys.readouterr().out
