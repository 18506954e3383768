"""A run's gap between trainer and engine, by version and place: how faults of an engine look in the table."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.mismatch_runs import STEPS, altered, exact, told_by, trained

from tandem.cli import app as cli
from tandem.cli.mismatch import GapCell, Mismatch, look, sampled_tokens
from tandem.config import loading as config
from tandem.errors import ConfigError, TandemError
from tandem.observability import json_lines
from tandem.trainer.pack import StepBatch
from tandem.trainer.record import records
from tandem.trainer.step import StepStats
from tandem.types import Completion, Group, Message, Rollout, Sampling, Task, Turn

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=0.7, top_p=0.9)


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without fault: float32, temperature 0.7, top_p 0.9, on-policy."""
    return trained(tiny_model, tmp_path_factory.mktemp("runs"), "plain")


def looked(folder: Path, **options: Any) -> Mismatch:
    return look(folder, config.load(folder / "config.yaml").config, **options)


def cell(report: Mismatch, version: int | None, where: str = "all") -> GapCell:
    (one,) = [cell for cell in report.table if (cell.version, cell.where) == (version, where)]
    return one


def test_a_run_without_fault_has_a_gap_of_rounding_everywhere(plain: Path) -> None:
    report = looked(plain)
    assert (report.step, report.rollouts, report.without_gap) == (STEPS, 8, 0)
    assert {cell.version for cell in report.table} == {STEPS - 1}
    assert all(cell.max < 1e-4 for cell in report.table)
    everything, *places = report.table
    assert sum(place.tokens for place in places) == everything.tokens
    assert sum(place.tokens * place.mean for place in places) == pytest.approx(everything.tokens * report.table[0].mean)
    assert everything == replace(report.table[0], version=STEPS - 1)


def test_an_engine_that_leaves_the_temperature_out_shows_at_every_place(plain: Path, tmp_path: Path) -> None:
    engine = exact(plain / "checkpoints" / f"{STEPS - 1:06d}" / "model", temperature=False)
    report = looked(altered(plain, tmp_path / "run", STEPS, told_by(engine, SAMPLING)))
    assert all(cell.rms > 0.05 for cell in report.table)
    assert max(cell.max for cell in report.table) == report.table[0].max


def test_older_weights_show_at_their_own_version(tiny_model: Path, tmp_path: Path) -> None:
    """The rest is what the recipe allows: tokens of the weights that were trained have no gap."""
    report = looked(trained(tiny_model, tmp_path, "lagged", max_lag=2, sampling={"max_tokens": 16}), step=STEPS)
    versions = sorted(cell.version for cell in report.table if cell.where == "all" and cell.version is not None)
    assert len(versions) > 1
    assert cell(report, None).tokens == sum(cell(report, version).tokens for version in versions)
    assert cell(report, versions[0]).rms > 1e-3
    newest = [cell for cell in report.table if (cell.version, cell.where) == (STEPS - 1, "first")]
    assert all(cell.rms < 1e-4 for cell in newest)


def test_a_run_whose_answers_a_grammar_held_to_a_form_is_refused_for_that(plain: Path) -> None:
    recipe = config.load(plain / "config.yaml").config
    recipe = replace(recipe, sampling=replace(recipe.sampling, regex="[0-9]+"))
    with pytest.raises(ConfigError, match=r"sampling\.regex: .*probe_gap"):
        look(plain, recipe)


def without_logprobs(row: dict[str, Any]) -> None:
    row["tokens"][0]["lp"] = None


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (without_logprobs, STEPS, "no token of step 4 has both logprobs"),
        (lambda row: None, 9, "has no rollouts of step 9; there are those of steps 1 to 4"),
    ],
    ids=["no logprobs", "no such step"],
)
def test_what_cannot_be_looked_at_is_an_error_of_one_line(
    plain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], step: int, message: str
) -> None:
    folder = altered(plain, tmp_path / "run", STEPS, change)
    with pytest.raises(TandemError, match=message) as raised:
        look(folder, config.load(folder / "config.yaml").config, step=step)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == (2 if step == 9 else 1), "a step that is not there is the asker's mistake"


def test_the_verb_prints_it(plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["mismatch", str(plain)])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(text in out for text in ("trained version 3", "2 to 8")), out
    assert [cell.where for cell in looked(plain).table] == ["all", "first", "2 to 8", "9 to 64"]


def test_the_record_gives_back_every_turn() -> None:
    """Version, place and gap of every token, however a turn goes on from the one before."""

    class Pieces:
        def pieces(self, tokens: Sequence[int]) -> list[str]:
            return [str(token) for token in tokens]

    draw = random.Random(3)
    for case in range(40):
        turns, history = list[Turn](), list[int]()
        for _ in range(draw.randint(1, 4)):
            kept = draw.choice([len(history), draw.randint(0, len(history))])
            prompt = (*history[:kept], *(draw.randrange(9) for _ in range(draw.randint(1, 4))))
            count = draw.choice([0, 1, 5])
            versions = sorted(draw.randrange(4) for _ in range(count))
            tokens = tuple(draw.randrange(9) for _ in range(count))
            completion = Completion(tokens=tokens, logprobs=(-1.0,) * count, versions=tuple(versions), finish="stop")
            turns.append(Turn(prompt=prompt, completion=completion, temperature=draw.choice([0.5, 1.0])))
            history = [*prompt, *tokens]
        task = Task(id="t", env="e", prompt=(Message(role="user", content="?"),), answer="")
        rollout = Rollout(
            id=f"t@{case}/0", task=task, turns=tuple(turns), messages=task.prompt, status="ok", reward=1.0
        )
        total = rollout.num_tokens
        group = Group(id=f"t@{case}", index=0, env="e", rollouts=(rollout,))
        batch = StepBatch(micro=(), groups=(group,), advantages={rollout.id: 0.0}, num_loss_tokens=total)
        stats = StepStats(metrics={}, logprobs={rollout.id: (-2.0,) * total})
        lines = [json_lines.encode(row) for row in records(7, batch, stats, Pieces())]  # type: ignore[arg-type]
        (row,) = [json.loads(line) for line in lines]
        assert [(token.version, token.place, token.gap) for token in sampled_tokens(row)] == [
            (version, place, -1.0) for turn in turns for place, version in enumerate(turn.completion.versions, 1)
        ]
