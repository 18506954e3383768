"""What a run's gap between trainer and engine is made of: injected faults are named, and parts add up to the whole."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mismatch_runs import STEPS, Engine, altered, exact, rows, told_by, trained
from tiers import long_but

from tandem.cli import app as cli
from tandem.config import loading as config
from tandem.engines.embedded.engine import EmbeddedEngine
from tandem.errors import ConfigError, TandemError
from tandem.observability import json_lines
from tandem.tools.mismatch.look import Mismatch, look
from tandem.tools.mismatch.recorded import spoken
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


@pytest.fixture(scope="module")
def lagged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which answers are up to two steps old, and go on while weights change; penalised for repetition."""
    sampling = {"max_tokens": 16, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    options: dict[str, Any] = {"max_lag": 2, "sampling": sampling}
    return trained(tiny_model, tmp_path_factory.mktemp("runs"), "lagged", **options)


def looked(folder: Path, **options: Any) -> Mismatch:
    report = look(folder, config.load(folder / "config.yaml").config, **options)
    adds_up(report)
    return report


def adds_up(report: Mismatch) -> None:
    whole = float(report.gap["rms"] > 0.0)
    assert sum(part.share for part in report.parts) == pytest.approx(whole, abs=1e-9)
    assert sum(part.mean for part in report.parts) == pytest.approx(report.gap["mean"], abs=1e-9)
    assert sum(report.categories.values()) == pytest.approx(whole, abs=1e-9)
    for token in report.worst:
        assert sum(token.parts.values()) == pytest.approx(token.trainer - token.engine, abs=1e-9)
    *bins, _ = report.positions
    assert sum(place.tokens for place in bins) == report.tokens
    assert sum(place.tokens * place.mean for place in bins) == pytest.approx(report.tokens * report.gap["mean"])
    for place in report.positions:
        assert sum(place.shares.values()) == pytest.approx(1.0, abs=1e-9) or place.rms == 0.0


def weights(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"{step:06d}" / "model"


def injected(folder: Path, to: Path, engine: Engine, sampling: Sampling = SAMPLING) -> Mismatch:
    """What is found where this engine told the logprobs of the last step."""
    return looked(altered(folder, to / "altered", STEPS, told_by(engine, sampling)), step=STEPS)


def faults(report: Mismatch) -> list[str]:
    return [part.name for part in report.parts if part.fault]


def test_a_run_without_fault_has_nothing_to_explain(plain: Path) -> None:
    report = looked(plain)
    assert report.dominant is None
    assert report.verdict.startswith("Nothing to explain")
    assert report.gap["rms"] < 1e-5 < report.allowed < 1e-4
    assert not faults(report)
    assert not report.breaks
    assert (report.step, report.rollouts, dict(report.versions)) == (STEPS, 8, {STEPS - 1: report.tokens})


def test_a_run_whose_answers_a_grammar_held_to_a_form_is_refused_for_that(plain: Path) -> None:
    recipe = config.load(plain / "config.yaml").config
    recipe = replace(recipe, sampling=replace(recipe.sampling, regex="[0-9]+"))
    with pytest.raises(ConfigError, match=r"sampling\.regex: .*probe_gap"):
        look(plain, recipe)


def test_float64_formulas_agree_where_there_is_no_fault(plain: Path, tmp_path: Path) -> None:
    report = injected(plain, tmp_path, exact(weights(plain, STEPS - 1)))
    assert report.dominant is None
    assert report.gap["rms"] < 1e-5


@pytest.mark.parametrize(
    ("fault", "category", "name"),
    [
        ({"temperature": False}, "sampling", "temperature not applied (raw logprobs)"),
        pytest.param({"temperature": False, "support": False}, "sampling", "raw logprobs", marks=pytest.mark.long),
        pytest.param({"support": False}, "sampling", "top_p 0.9 not renormalised", marks=pytest.mark.long),
        ({"head": "bfloat16"}, "numerics", "the engine computed the head in bfloat16"),
    ],
    ids=["temperature", "raw", "support", "head"],
)
def test_an_injected_fault_dominates(
    plain: Path, tmp_path: Path, fault: dict[str, Any], category: str, name: str
) -> None:
    report = injected(plain, tmp_path, exact(weights(plain, STEPS - 1), **fault))
    assert report.dominant is not None
    assert (report.dominant.category, report.dominant.name) == (category, name)
    assert report.dominant.share > 0.9
    assert report.dominant.interval is not None
    assert report.dominant.interval[0] <= report.dominant.share <= report.dominant.interval[1]
    assert faults(report)[0] == name
    assert name in report.verdict
    assert report.dominant.advice in report.verdict


@pytest.mark.parametrize("held", long_but([0, 1, 2], 1))
def test_an_engine_that_holds_older_weights_than_it_stamps(plain: Path, tmp_path: Path, held: int) -> None:
    base = Path(config.load(plain / "config.yaml").config.model)
    report = injected(plain, tmp_path, exact(weights(plain, held) if held else base))
    assert report.dominant is not None
    assert report.dominant.category == "staleness"
    assert report.dominant.name == f"the engine sampled from version {held}, stamped {STEPS - 1}"
    assert report.dominant.share > 0.99
    assert report.dominant.fault


def test_an_engine_that_never_took_the_adapter(tiny_model: Path, tmp_path: Path) -> None:
    folder = trained(tiny_model, tmp_path, "lora", trainable={"kind": "lora", "rank": 4}, optimizer={"lr": 0.02})
    assert looked(folder).dominant is None
    report = injected(folder, tmp_path, exact(tiny_model))
    assert report.dominant is not None
    assert report.dominant.name == f"the engine sampled from version 0, stamped {STEPS - 1}"


def test_a_turn_that_is_tokenised_anew_on_its_way_to_the_engine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = EmbeddedEngine.generate

    async def anew(self: EmbeddedEngine, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        tokenizer = self._policy.tokenizer
        text = tokenizer.decode(list(prompt))
        return await generate(self, tokenizer.encode(text, add_special_tokens=False), sampling, key)

    monkeypatch.setattr(EmbeddedEngine, "generate", anew)
    report = looked(trained(tiny_model, tmp_path, "run", sampling={"max_tokens": 12}))
    assert report.dominant is not None
    assert (report.dominant.category, report.dominant.share > 0.9) == ("tokenisation", True)
    assert all(token.turn == 1 for token in report.worst), "only what follows sampled tokens can differ"
    assert not report.breaks, "the record says what the engine should have been given"


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temperature_alone(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    folder = trained(tiny_model, tmp_path, "run", sampling={"max_tokens": 12, "temperature": 0.5}, dtype=dtype)
    assert looked(folder).dominant is None
    report = injected(folder, tmp_path, exact(weights(folder, STEPS - 1), temperature=False), Sampling(temperature=0.5))
    assert report.dominant is not None
    assert report.dominant.name == "temperature not applied (raw logprobs)"
    assert len(faults(report)) == 1, "the rest is rounding"


def test_penalties_that_the_engine_left_out_of_its_logprobs(tiny_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "max_tokens": 12,
    }
    folder = trained(tiny_model, tmp_path, "run", sampling=options)
    assert looked(folder).dominant is None
    engine = exact(weights(folder, STEPS - 1))
    assert injected(folder, tmp_path / "right", engine, Sampling(**options)).dominant is None
    for fault, name in (
        ({"penalties": False}, "repetition_penalty 1.3 and frequency_penalty 0.5 not applied"),
        ({"penalties": False, "temperature": False}, "raw logprobs"),
    ):
        report = injected(folder, tmp_path / name, exact(weights(folder, STEPS - 1), **fault), Sampling(**options))
        assert report.dominant is not None
        assert (report.dominant.category, report.dominant.name) == ("sampling", name)


@pytest.mark.parametrize(
    ("held", "fault", "names"),
    [
        pytest.param(
            3,
            {"temperature": False, "head": "bfloat16"},
            ["temperature not applied", "the engine computed the head"],
            id="temperature and head",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            {"head": "bfloat16"},
            ["the engine sampled from version 2", "the engine computed the head"],
            id="stale and head",
            marks=pytest.mark.long,
        ),
        pytest.param(
            0,
            {"support": False},
            ["the engine sampled from version 0", "top_p 0.9 not renormalised"],
            id="stale and support",
        ),
    ],
)
def test_two_faults_are_both_named_the_larger_one_first(
    plain: Path, tmp_path: Path, held: int, fault: dict[str, Any], names: list[str]
) -> None:
    base = Path(config.load(plain / "config.yaml").config.model)
    folder = weights(plain, held) if held else base
    report = injected(plain, tmp_path, exact(folder, **fault))
    fault_names = faults(report)
    assert [fault_names[i].startswith(name) for i, name in enumerate(names)] == [True, True], fault_names
    assert all(name in report.verdict for name in names)
    assert report.parts[0].rms > report.parts[1].rms > 3 * max(part.rms for part in report.parts[2:])


def test_staleness_that_the_recipe_allows_is_no_fault(lagged: Path) -> None:
    report = looked(lagged, step=STEPS)
    assert len(report.versions) > 1
    assert report.dominant is not None
    assert (report.dominant.category, report.dominant.fault) == ("staleness", False)
    names = {part.name.partition(",")[0] for part in report.parts if part.category == "staleness"}
    assert names == {"older weights sampled", "answers went on across an update"}
    assert report.categories["staleness"] == pytest.approx(1.0, abs=1e-3)
    assert report.categories.get("unexplained", 0.0) == pytest.approx(0.0, abs=1e-3)
    assert all(part.rms < 1e-5 for part in report.parts if part.category == "numerics")


def test_without_the_weights_that_sampled_nothing_is_guessed(lagged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(lagged, folder)
    whole = looked(lagged, step=STEPS)
    gone = [version for version in whole.versions if version < STEPS - 1]
    for version in gone:
        shutil.rmtree(folder / "checkpoints" / f"{version:06d}")
    report = looked(folder, step=STEPS)
    assert report.dominant is not None
    assert report.dominant.category == "unexplained"
    missing = ", ".join(map(str, gone))
    assert report.dominant.name == f"staleness or else: no weights of version {missing} are on disk"
    assert set(report.stand_ins) == set(gone)


def test_on_policy_no_checkpoint_of_the_version_is_needed(plain: Path, tmp_path: Path) -> None:
    folder = altered(
        plain, tmp_path / "run", STEPS, told_by(exact(weights(plain, STEPS - 1), temperature=False), SAMPLING)
    )
    shutil.rmtree(folder / "checkpoints" / f"{STEPS - 1:06d}")
    report = looked(folder, step=STEPS)
    assert dict(report.stand_ins) == {STEPS - 1: STEPS - 2}
    assert report.dominant is not None
    assert report.dominant.name == "temperature not applied (raw logprobs)"
    assert 0.7 < report.dominant.share < 0.99, "weights of another version cannot tell all"
    assert any(part.name.endswith("by the weights of another version") for part in report.parts)


def test_what_nobody_can_explain_is_said_to_be_that(plain: Path, tmp_path: Path) -> None:
    noise = random.Random(0)

    def engine(prompt: Sequence[int], sampled: Sequence[int], sampling: Sampling) -> Sequence[float]:
        return [noise.gauss(-3, 1) for _ in sampled]

    report = injected(plain, tmp_path, engine)
    assert report.dominant is not None
    assert (report.dominant.category, report.dominant.name) == ("unexplained", "none of what was tried")


def test_a_gap_as_large_as_another_type_makes_is_numerics(plain: Path, tmp_path: Path) -> None:
    report = injected(plain, tmp_path, exact(weights(plain, STEPS - 1), head="bfloat16", body="bfloat16"))
    assert report.dominant is not None
    assert report.dominant.category == "numerics"


def test_a_trainer_that_records_other_logprobs_than_its_weights_give(plain: Path, tmp_path: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        for token in row["tokens"]:
            token["tp"] -= 0.5

    report = looked(altered(plain, tmp_path / "run", STEPS, change), step=STEPS)
    assert report.dominant is not None
    assert report.dominant.name == "the trainer's logprobs, computed once more"
    assert report.dominant.fault


def history_kept_in_part(row: dict[str, Any]) -> None:
    """The second turn begins with other tokens than the first ended with, as if its text had been tokenised anew."""
    kept, added = row["prompts"][1]
    row["prompts"][1] = [kept - 2, [65, *added]]


def test_a_turn_that_does_not_continue_the_one_before_is_shown(plain: Path, tmp_path: Path) -> None:
    folder = altered(plain, tmp_path / "run", STEPS, history_kept_in_part)
    report = looked(folder, step=STEPS)
    assert {(broken.kind, broken.turn) for broken in report.breaks} == {("history", 1)}
    assert len(report.breaks) == report.rollouts
    first = report.breaks[0]
    assert first.expected != first.recorded
    assert first.recorded[0] == "b", "token 65 of the byte alphabet"
    assert f"{report.rollouts} later turns do not continue what was sampled" in report.verdict


@pytest.mark.parametrize("kind", ["opening", "reply"])
def test_a_prompt_that_is_not_the_templates_is_shown(plain: Path, tmp_path: Path, kind: str) -> None:
    def change(row: dict[str, Any]) -> None:
        turn = ["opening", "reply"].index(kind)
        row["prompts"][turn][1].insert(3, 65)
        if turn == 0:
            row["prompts"][1][0] += 1

    report = looked(altered(plain, tmp_path / "run", STEPS, change), step=STEPS)
    assert {broken.kind for broken in report.breaks} == {kind}


def test_few_tokens_are_of_many_groups(plain: Path) -> None:
    report = looked(plain, step=STEPS, tokens=30)
    assert report.rollouts == 2
    turns, _ = spoken(rows(plain, STEPS), 30)
    assert len({turn.group for turn in turns}) == 2
    assert all(part.interval is None for part in report.parts), "two rollouts tell nothing of chance"
    assert report.tokens < looked(plain, step=STEPS).tokens


def test_the_step_is_the_newest_after_a_checkpoint(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    for step in (3, 1):
        shutil.rmtree(folder / "checkpoints" / f"{step:06d}")
    assert looked(folder).step == 3
    shutil.rmtree(folder / "checkpoints" / "000002")
    assert looked(folder).step == STEPS


def without_prompts(row: dict[str, Any]) -> None:
    del row["prompts"]


def without_logprobs(row: dict[str, Any]) -> None:
    row["tokens"][0]["lp"] = None


def with_foreign_tokens(row: dict[str, Any]) -> None:
    row["tokens"][-1]["id"] = 5000


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (without_prompts, STEPS, "has no prompt tokens: an older Tandem wrote it"),
        (without_logprobs, STEPS, "no token of step 4 has both logprobs"),
        (with_foreign_tokens, STEPS, "has token 5000 and the model"),
        (lambda row: None, 9, "holds no rollouts of step 9; it has those of 1 to 4"),
    ],
    ids=["old", "no logprobs", "foreign tokens", "no such step"],
)
def test_what_cannot_be_looked_at_is_an_error_of_one_line(
    plain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], step: int, message: str
) -> None:
    folder = altered(plain, tmp_path / "run", STEPS, change)
    with pytest.raises(TandemError, match=message) as raised:
        look(folder, config.load(folder / "config.yaml").config, step=step)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == (2 if step == 9 else 1), "a step that is not there is the asker's mistake"


def test_the_verb_prints_it(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    engine = exact(weights(plain, STEPS - 1), temperature=False)
    folder = altered(plain, tmp_path / "run", STEPS, told_by(engine, SAMPLING))
    altered(folder, tmp_path / "broken", STEPS, history_kept_in_part)
    for path, says in ((folder, "temperature not applied"), (tmp_path / "broken", "does not continue what was")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["mismatch", str(path), "--tokens", "200"])
        out = capsys.readouterr().out
        assert (stopped.value.code, says in out) == (0, True), out
    with pytest.raises(SystemExit):
        cli.main(["mismatch", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["dominant"]["category"] == "sampling"
    assert math.isclose(sum(part["share"] for part in report["parts"]), 1.0)


def test_the_record_gives_back_every_turn() -> None:
    """Ids before each turn, versions and temperatures, however a turn goes on from the one before."""

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
        batch = StepBatch(micro=(), groups=(group,), advantages={rollout.id: 0.0}, num_loss_tokens=total, num_samples=1)
        stats = StepStats(metrics={}, logprobs={rollout.id: (-2.0,) * total})
        lines = [json_lines.encode(row) for row in records(7, batch, stats, Pieces())]  # type: ignore[arg-type]
        read_back, passed = spoken([json.loads(line) for line in lines], 1)
        assert passed == (total == 0)
        want = [turn for turn in turns if turn.completion.tokens]
        assert [
            (turn.prompt, turn.tokens, turn.versions, turn.temperature, turn.step, set(turn.engine), set(turn.trainer))
            for turn in read_back
        ] == [
            (turn.prompt, turn.completion.tokens, turn.completion.versions, turn.temperature, 7, {-1.0}, {-2.0})
            for turn in want
        ]


@pytest.fixture(scope="module")
def narrow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 run whose versions are nearly alike."""
    options: dict[str, Any] = {"dtype": "bfloat16", "optimizer": {"lr": 5e-5}, "sampling": {"max_tokens": 24}}
    return trained(tiny_model, tmp_path_factory.mktemp("runs"), "narrow", **options)


@pytest.mark.long
def test_older_weights_show_beneath_rounding(narrow: Path, tmp_path: Path) -> None:
    assert looked(narrow).dominant is None
    report = injected(narrow, tmp_path, exact(weights(narrow, 1), body="bfloat16", head="bfloat16"), Sampling())
    assert report.gap["rms"] < report.allowed
    assert faults(report) == [f"the engine sampled from version 1, stamped {STEPS - 1}"]
    assert "the engine sampled from version 1" in report.verdict


def test_the_trainers_own_rounding_is_no_evidence_against_the_engine(narrow: Path, tmp_path: Path) -> None:
    noise, sound = random.Random(0), exact(weights(narrow, STEPS - 1), body="bfloat16", head="bfloat16")

    def engine(prompt: Sequence[int], sampled: Sequence[int], sampling: Sampling) -> Sequence[float]:
        return [logprob + noise.gauss(0, 0.04) for logprob in sound(prompt, sampled, sampling)]

    report = injected(narrow, tmp_path, engine, Sampling())
    assert report.gap["rms"] > report.allowed
    assert faults(report) == ["none of what was tried"]


def test_older_stamps_whose_weights_are_gone_are_not_put_down_to_others(plain: Path, tmp_path: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        told_by(exact(weights(plain, 1)), SAMPLING)(row)
        row["stamps"] = [[2, len(row["tokens"])]]

    folder = altered(plain, tmp_path / "run", STEPS, change)
    shutil.rmtree(folder / "checkpoints" / "000002")
    report = looked(folder, step=STEPS)
    assert faults(report) == ["staleness or else: no weights of version 2 are on disk"]
