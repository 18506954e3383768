"""The command line: verbs, messages, exit codes."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from safetensors import SafetensorError

import tandem.trainer
from tandem import clone
from tandem.api.publishing import export
from tandem.cli import app as cli
from tandem.config import registry as resolve
from tandem.config.loading import RunConfig, dump, load
from tandem.errors import CheckpointError, UnsupportedPair

MINIMAL = "model: m\nsteps: 3\nenv: arithmetic\n"
Run = Callable[..., tuple[int, str, str]]
COMMAND = functools.cache(typer.main.get_command)
"""Typer reads every verb's signature anew for each call, which takes longer than most verbs do here."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in an empty folder: arguments in; exit code, stdout and stderr out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(typer.main, "get_command", COMMAND)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TANDEM_DEBUG", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err

    return call


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for the composition root; remembers what it was asked for and can be told to fail."""
    fake = types.SimpleNamespace(calls=[], error=None)

    async def train(config: RunConfig, *, resume: Path | None) -> Path:
        fake.calls.append((config, resume))
        if fake.error is not None:
            raise fake.error
        return Path("runs/x")

    async def evaluate(config: RunConfig, *, weights: Path | None) -> dict[str, Any]:
        fake.calls.append((config, weights))
        return {
            "env": "arithmetic", "tasks": 40, "samples": 4, "mean": 0.25, "mean_ci": [0.2, 0.3], "tokens": 12.4,
            "pass_at": {"1": 0.25, "4": 0.5}, "pass_ci": [0.4, 0.6], "truncated": 0.05, "failed": 0,
            "envs": {"arithmetic": {}}, "rollouts": [],
        }  # fmt: skip

    fake.train, fake.evaluate = train, evaluate
    monkeypatch.setitem(sys.modules, "tandem.trainer.assemble", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(tandem.trainer, "assemble", fake, raising=False)
    return fake


@pytest.fixture
def known_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward and backward take is not measured, for tests that ask nothing of the memory plan but its place."""
    from tandem.trainer.memory_plan import MetaModel

    monkeypatch.setattr(MetaModel, "token_bytes", 1 << 10)


def make_run(folder: Path, *overrides: str, steps: tuple[int, ...] = ()) -> RunConfig:
    """A run's folder as training leaves it."""
    Path("recipe.yaml").write_text(MINIMAL)
    config = load(Path("recipe.yaml"), overrides).config
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    for step in steps:
        weights = folder / "checkpoints" / f"{step:06d}" / config.trainable.folder_name
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_text(f"weights of {step}")
    return config


# Help and usage


@pytest.mark.slow
def test_help_and_version_import_no_torch_and_no_parts() -> None:
    program = (
        "import sys\nfrom tandem.cli import app as cli\n"
        "try:\n    cli.main([ARGUMENT])\nexcept SystemExit as stopped:\n    assert not stopped.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'yaml', 'asyncio', 'tandem.config.loading'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for argument in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("ARGUMENT", repr(argument))],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "tandem" in done.stdout.lower()


def test_help_names_every_verb(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for verb in ("train", "check", "list", "new", "eval", "show", "export", "doctor", "serve", "run-api",
                 "atropos-grpo", "work", "env"):  # fmt: skip
        assert f"\n  {verb} " in out
        assert run(verb, "--help")[0] == 0
    code, out, _ = run("serve", "--help")
    assert (code, "\n  broker " in out, "\n  engine " in out) == (0, True, True)


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project.get("version", tandem.__version__) == tandem.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "x"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'RECIPE|RUN'"),
        (["show", "x", "--reprt"], "No such option: --reprt"),
        (["export", "x", "y", "--step", "two"], "Invalid value for '--step'"),
    ],
)
def test_misspelt_verbs_and_options_exit_2(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


# Errors


def test_a_mistake_is_one_message_without_a_traceback(run: Run) -> None:
    Path("recipe.yaml").write_text(MINIMAL + "group_sise: 4\n")
    code, out, err = run("train", "recipe.yaml")
    assert (code, out) == (2, "")
    assert err == "tandem: recipe.yaml:4: unknown option 'group_sise'; did you mean 'group_size'?\n"


def test_debug_shows_the_traceback_wherever_it_stands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--debug", "train", "none.yaml"], ["train", "none.yaml", "--debug"]):
        code, _, err = run(*arguments)
        assert code == 2
        assert "Traceback" in err
        assert "\ntandem: there is no recipe none.yaml" in err
    monkeypatch.setenv("TANDEM_DEBUG", "1")
    assert "Traceback" in run("train", "none.yaml")[2]
    monkeypatch.setenv("TANDEM_DEBUG", "0")
    assert "Traceback" not in run("train", "none.yaml")[2]


def test_every_error_has_its_own_exit_code(run: Run, trainer: types.SimpleNamespace) -> None:
    from tandem import errors

    Path("recipe.yaml").write_text(MINIMAL)
    kinds = [errors.EnvError, errors.RewardError, errors.EngineError, errors.StaleWeights, errors.CheckpointError]
    codes = []
    for kind in kinds:
        trainer.error = kind("what happened")
        code, _, err = run("train", "recipe.yaml")
        assert err == "tandem: what happened\n"
        codes.append(code)
    assert codes == [3, 4, 5, 6, 8]


def test_ctrl_c_says_what_the_run_says_and_exits_130(run: Run, trainer: types.SimpleNamespace) -> None:
    Path("recipe.yaml").write_text(MINIMAL)
    trainer.error = KeyboardInterrupt("saved at step 3; resume with: tandem train runs/x")
    assert run("train", "recipe.yaml") == (130, "", "tandem: saved at step 3; resume with: tandem train runs/x\n")
    trainer.error = KeyboardInterrupt()
    assert run("train", "recipe.yaml") == (130, "", "tandem: interrupted\n")


def test_what_nobody_expected_is_a_bug_with_its_traceback(
    run: Run, trainer: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("recipe.yaml").write_text(MINIMAL)
    monkeypatch.setattr("tandem.cli.app.is_theirs", lambda error: False)  # this file is not Tandem's
    trainer.error = ZeroDivisionError("by zero")
    code, _, err = run("train", "recipe.yaml")
    assert code == 1
    assert "Traceback" in err
    assert err.endswith(
        "tandem: ZeroDivisionError: by zero\n"
        "tandem: this is a bug, in Tandem or in a part of your own; the traceback above says where\n"
    )


# train


def test_train_resumes_a_run_by_its_folder(run: Run, trainer: types.SimpleNamespace) -> None:
    made = make_run(Path("runs/a"), "group_size=4")
    assert run("train", "runs/a")[0] == 0
    assert trainer.calls == [(made, Path("runs/a"))]


def test_a_resumed_run_may_change_only_what_leaves_training_as_it_was(run: Run, trainer: types.SimpleNamespace) -> None:
    make_run(Path("runs/a"))
    assert (
        run("train", "runs/a", "steps=9", "loggers=[]", "evaluate.tasks=3", "checkpoint.every=7", "threads=1")[0] == 0
    )
    config, _ = trainer.calls[0]
    assert (config.steps, config.loggers, config.evaluate.tasks, config.checkpoint.every) == (9, (), 3, 7)
    assert run("train", "runs/a", "sync.tolerance=0.5")[0] == 0
    assert trainer.calls[1][0].sync.tolerance == 0.5
    make_run(Path("runs/served"), "engine={kind: vllm, urls: ['http://a:1']}")
    assert run("train", "runs/served", "engine.urls=[http://b:2]")[0] == 0, "it was started elsewhere"
    assert trainer.calls[2][0].engine.urls == ("http://b:2",)
    make_run(Path("runs/own"), "engine=vllm")
    assert run("train", "runs/own", "sync={kind: broadcast}", "engine={kind: vllm, replicas: 2}", "ranks=2")[0] == 0
    code, _, err = run("train", "runs/own", "sync={kind: broadcast, every: 2}")
    assert (code, "a resumed run keeps its 'sync'" in err) == (2, True)
    code, _, err = run("train", "runs/own", "engine.replicas=2", "engine.seeded=true")
    assert (code, "engine.seeded=true: a resumed run keeps its 'engine'" in err) == (2, True)
    for override in ("seed=1", "optimizer.lr=1", "name=b", "runs=c", "model=x", "engine=vllm"):
        code, _, err = run("train", "runs/a", override)
        assert code == 2
        assert (
            f"command line: {override}: a resumed run keeps its '{override.partition('=')[0].partition('.')[0]}'" in err
        )
        may = "alarms, broker, checkpoint, checkpointing, distributed, evaluate, gpus, grading, loggers"
        assert f"these may change: {may}" in err


@pytest.mark.parametrize("save", ["weights", "none"])
def test_a_run_without_whole_checkpoints_cannot_go_on(run: Run, trainer: types.SimpleNamespace, save: str) -> None:
    made = make_run(Path("runs/a"), f"checkpoint={save}")
    assert made.checkpoint.save == save
    code, _, err = run("train", "runs/a")
    assert code == 2
    assert f"runs/a saves {save} (checkpoint: {save}): it cannot be gone on with" in err
    assert trainer.calls == []


# clean


# list


def test_list_shows_every_part(run: Run) -> None:
    code, out, _ = run("list")
    assert code == 0
    for category in resolve.CATEGORIES:
        assert f"\n{category}" in f"\n{out}"
        for kind in resolve.names(category):
            assert f"  {kind} " in out


@pytest.mark.parametrize("category", ["losses", "loss"])
def test_list_shows_options_with_defaults_types_and_docs(run: Run, category: str) -> None:
    code, out, _ = run("list", category)
    assert code == 0
    flat = " ".join(out.split())
    for kind in resolve.names("losses"):
        cls = resolve.find("losses", kind)
        assert resolve.summary(cls) in flat
        for option in resolve.options(cls):
            assert f" {option.name}: " in flat
            assert resolve.field_docs(cls)[option.name] in flat


# new and check


@pytest.mark.slow
def test_a_new_environment_passes_its_check(run: Run, trainer: types.SimpleNamespace, tiny_model: Path) -> None:
    code, out, _ = run("new", "env", "my_sums")
    assert (code, out) == (0, "wrote my_sums.py and my_sums.yaml; next: tandem check my_sums.yaml\n")
    code, out, err = run("check", "my_sums.yaml", f"model={tiny_model}")
    assert code == 0, out + err
    assert "64 graded, each beside a wrong answer" in out
    assert out.endswith("\nok\n")


def test_a_new_environment_overwrites_nothing(run: Run) -> None:
    Path("mine.yaml").write_text("precious")
    code, _, err = run("new", "env", "mine")
    assert code == 2
    assert "mine.yaml is already there and is left as it is" in err
    assert not Path("mine.py").exists()
    assert Path("mine.yaml").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss", "x"], "new makes an env or a recipe, not 'loss'"),
        (["env", "my-env"], "'my-env' cannot be a module's name"),
        (["env", "class"], "'class' cannot be a module's name"),
        (["env", "gsm8k"], "there is an environment 'gsm8k' already"),
        (["env", "a/b"], "'a/b' cannot be a module's name"),
    ],
)
def test_a_new_environment_needs_a_good_name(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("new", *arguments)
    assert code == 2
    assert message in err
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_check_finds_nothing_wrong_and_loads_no_weights(
    run: Run, trainer: types.SimpleNamespace, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    Path("recipe.yaml").write_text(MINIMAL)
    code, out, _ = run("check", "recipe.yaml", f"model={tiny_model}", "--tasks", "5")
    assert code == 0
    for what in ("parts", "loggers", "train tasks", "test tasks", "gold answers", "model", "prompts", "memory", "disk"):
        assert re.search(rf"^ok +{what} ", out, re.MULTILINE), what
    assert "5 graded, each beside a wrong answer" in out
    assert "at the peak" in out


@pytest.mark.slow
@pytest.mark.usefixtures("known_pass")
def test_check_looks_at_each_of_several_environments(
    run: Run, trainer: types.SimpleNamespace, tiny_model: Path
) -> None:
    Path("recipe.yaml").write_text(
        "model: m\nsteps: 1\nenvs:\n  arithmetic: 2\n"
        "  takes: {env: {kind: arithmetic, operators: ['-'], size: 12}, rewards: {exact: 1}, min_share: 0.5}\n"
    )
    code, out, err = run(
        "check", "recipe.yaml", f"model={tiny_model}", "--tasks", "12", "envs.takes.rewards={number: 1}"
    )
    text = " ".join(out.split())
    assert code == 0, out + err
    assert "env arithmetic, env takes" in text
    (count,) = re.findall(r"train tasks arithmetic \d+; takes (\d+)", text)
    assert "arithmetic 12 graded, each beside a wrong answer" in text
    assert f"takes {count} graded, each beside a wrong answer" in text
    assert re.search(r"graders: \d+", text)
    code, out, _ = run("check", "recipe.yaml", f"model={tiny_model}", "--tasks", "12",
                       "envs.takes.rewards={format: {pattern: zzz}}")  # fmt: skip
    assert code == 4
    assert f"{count} answers of takes: " in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["model=./no/such/model"], 2, "no/such/model"),
        (["env.path=none.jsonl"], 3, "none.jsonl"),
        (["env.path=bad.jsonl"], 3, "bad.jsonl:2"),
        (["env.path=empty.jsonl"], 3, "empty.jsonl"),
        (["env.path=rows.jsonl", "rewards={own_bad:wrong: 1}"], 0, "own_bad:wrong gives every gold reply 0 or None"),
        (["env.path=rows.jsonl", "rewards={exact: {tag: ''}}", "env.answer=other"], 0, "29 graded, each beside"),
        (["rewards={exact: 1, form: {kind: format, tags: [think, answer]}}"], 4, "answers of dataset: "),
        (["env.path=long.jsonl"], 2, "raise context, or shorten prompts"),
        (["env.path=rows.jsonl", "context=58"], 2, "the context is 58"),
    ],
)
@pytest.mark.usefixtures("known_pass")
def test_check_finds_each_mistake_and_exits_with_its_code(
    run: Run, trainer: types.SimpleNamespace, tiny_model: Path, overrides: list[str], code: int, message: str
) -> None:
    rows = [
        {"prompt": f"Question {n}, which is not short at all?", "answer": f"word{n}", "other": "x"} for n in range(30)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("bad.jsonl").write_text(json.dumps(rows[0]) + "\n{oops\n")
    Path("empty.jsonl").write_text("")
    Path("long.jsonl").write_text("".join(json.dumps(row | {"prompt": row["prompt"] * 100}) + "\n" for row in rows))
    Path("own_bad.py").write_text("def wrong(rollout): return 0.0\n")
    recipe = {
        "model": str(tiny_model),
        "steps": 1,
        "env": {"kind": "dataset", "path": "rows.jsonl"},
        "rewards": {"exact": 1},
    }
    Path("recipe.yaml").write_text(json.dumps(recipe))
    exit_code, out, err = run("check", "recipe.yaml", *overrides)
    assert message in " ".join((out + err).split()), out + err
    assert exit_code == code, out + err


OWN = """
def same(completions, **columns): return [0.5 for _ in completions]
def scalar(completions, **columns): return 1.0
def alone(completions, **columns): return [1.0]
def right(completions, answer, **columns): return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]
def penalty(completions, answer, **columns): return [r - 1 for r in right(completions, answer)]
def joined(completions, **columns): return [1 / len(c[0]["content"]) for c in completions]
def none(completions, **columns): return [None for _ in completions]
def raises(completions, prompts, **columns):
    print("looking")
    raise KeyError(prompts[0][0]["content"])
def fails_on_wrong(completions, answer, **columns):
    return [1.0 if c[0]["content"] == a else 1 / 0 for c, a in zip(completions, answer)]
"""
"""Rewards as somebody may write them for TRL."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "code", "expected"),
    [
        ("right", 0, ["graded, each beside a wrong answer", "ok"]),
        ("penalty", 0, ["graded, each beside a wrong answer", "ok"]),
        ("same", 0, ["warning gold answers a gold reply and a wrong one get the same reward", "ok, with 1 warning"]),
        ("none", 0, ["own:none gives every gold reply 0 or None", "ok, with 2 warnings"]),
        ("scalar", 4, ["returned 1.0; expected a list: a number or None for each completion (and 7 like it)"]),
        ("alone", 4, ["returned 1 rewards for 3 completions (and 7 like it)"]),
        ("raises", 4, ["raised KeyError", "(own.py:11 in raises) (and 7 like it); mend the reward"]),
        ("joined", 4, ["reward 'own:joined' raised ZeroDivisionError"]),
        ("fails_on_wrong", 4, ["reward 'own:fails_on_wrong' raised ZeroDivisionError"]),
    ],
)
@pytest.mark.usefixtures("known_pass")
def test_check_grades_a_gold_reply_beside_a_wrong_one(
    run: Run, tiny_model: Path, reward: str, code: int, expected: list[str]
) -> None:
    Path("own.py").write_text(OWN)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "Question {n}", "answer": "word{n}"}}\n' for n in range(30)))
    Path("recipe.yaml").write_text(
        f"model: {tiny_model}\nsteps: 1\nenv: {{kind: dataset, path: rows.jsonl}}\nrewards: {{'own:{reward}': 1}}\n"
    )
    exit_code, out, err = run("check", "recipe.yaml")
    words = " ".join(out.split())
    assert [text for text in expected if text not in words] == []
    assert exit_code == code
    assert "Traceback" not in out + err
    log = re.search(r"what rewards printed, and their tracebacks: (\S+)", out)
    assert bool(log) == (reward in ("joined", "raises", "fails_on_wrong"))
    if log:
        assert "Error" in Path(log[1]).read_text()
        shutil.rmtree(Path(log[1]).parent)


@pytest.mark.usefixtures("known_pass")
def test_check_refuses_parts_that_cannot_work_together(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: RunConfig) -> None:
        raise UnsupportedPair("sync shared cannot carry trainable: lora; it carries full")

    monkeypatch.setattr("tandem.trainer.pairs.check_pairs", refuse)
    Path("recipe.yaml").write_text(MINIMAL)
    code, out, _ = run("check", "recipe.yaml", f"model={tiny_model}", "--tasks", "2")
    assert code == 2
    assert re.search("^problem +parts +sync shared cannot carry", out, re.MULTILINE)


@pytest.mark.slow
def test_check_refuses_what_does_not_fit(
    run: Run, trainer: types.SimpleNamespace, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem import machine
    from tandem.trainer import memory_plan as plan

    small = machine.Machine(name="this machine", free=10**8, total=10**9, is_host=True)
    monkeypatch.setattr(plan, "host", lambda: small)
    monkeypatch.setattr(plan, "accelerator", lambda: None)
    Path("recipe.yaml").write_text(MINIMAL)
    code, out, _ = run("check", "recipe.yaml", f"model={tiny_model}", "--tasks", "2")
    assert code == 11
    assert "100 MB free on this machine" in out


# eval, show, export


def test_eval_measures_a_recipes_model(run: Run, trainer: types.SimpleNamespace) -> None:
    Path("recipe.yaml").write_text(MINIMAL)
    code, out, _ = run("eval", "recipe.yaml")
    assert code == 0
    assert out.splitlines() == [
        "m on 40 held-out tasks of arithmetic, 4 answers each",
        "  mean@4  0.250  [0.200, 0.300]",
        "  pass@1  0.250",
        "  pass@4  0.500  [0.400, 0.600]",
        "  12 tokens on average, 5% truncated",
    ]
    assert trainer.calls[0][1] is None


def test_eval_measures_a_runs_newest_checkpoint_or_another(run: Run, trainer: types.SimpleNamespace) -> None:
    make_run(Path("runs/a"), steps=(5, 10))
    assert run("eval", "runs/a", "evaluate.samples=2")[0] == 0
    assert run("eval", "runs/a", "--step", "5")[0] == 0
    assert [weights for _, weights in trainer.calls] == [
        Path("runs/a/checkpoints/000010/model"),
        Path("runs/a/checkpoints/000005/model"),
    ]
    assert trainer.calls[0][0].evaluate.samples == 2


def test_show_summarises_a_run(run: Run) -> None:
    make_run(Path("runs/a"))
    metrics = [
        {"step": n, "time": 100.0 + n, "metrics": {"reward": n / 10, "seconds/step": 1.0, "tokens_per_second": 50.0}}
        for n in range(1, 4)
    ]
    evaluations = [
        {"step": step, "time": 100.0, "env": "arithmetic", "tasks": 4, "samples": 4, "mean": mean,
         "mean_ci": [mean - 0.1, mean + 0.1], "pass_at": {"4": 0.75}, "pass_ci": [0.5, 0.9],
         "truncated": 0.0, "failed": 0, "tokens": 10.0}
        for step, mean in ((0, 0.25), (3, 0.65))
    ]  # fmt: skip
    events = [
        {"time": 100.0, "event": "run_started"},
        {"time": 101.0, "event": "group_dropped", "reason": "zero_variance"},
    ]
    events += [
        {"time": 102.0, "event": "group_dropped", "reason": "zero_variance"},
        {"time": 104.0, "event": "run_done"},
    ]
    for name, rows in {"metrics": metrics, "eval": evaluations, "events": events}.items():
        Path(f"runs/a/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run("show", "runs/a")
    assert code == 0
    assert "a  finished, 3 of 3 steps, 4.0 s" in out
    assert "model: m" in out
    flat = " ".join(out.split())
    assert "0 0.25 [0.150, 0.350] 0.75 [0.500, 0.900] 10 3 0.65 [0.550, 0.750]" in flat
    assert "reward 0.1 ▁▅█ 0.3" in flat
    assert not Path("runs/a/report.html").exists()
    code, out, _ = run("show", "runs/a", "--report")
    assert code == 0
    assert "report: " in out
    assert Path("runs/a/report.html").stat().st_size > 0


def test_show_says_that_the_report_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(Path("runs/a"))

    def full(source: Path, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = run("show", "runs/a", "--report")
    assert (code, err.splitlines()[0][:70]) == (
        1,
        "tandem: the report cannot be written: [Errno 28] No space left on devi",
    )
    assert "Traceback" not in err


def test_export_copies_the_newest_or_the_named_checkpoint(run: Run) -> None:
    make_run(Path("runs/a"), steps=(5, 10))
    assert run("export", "runs/a", "out/new") == (0, "exported the model of step 10 to out/new\n", "")
    assert Path("out/new/model.safetensors").read_text() == "weights of 10"
    assert run("export", "runs/a", "out/old", "--step", "5")[0] == 0
    assert Path("out/old/model.safetensors").read_text() == "weights of 5"
    assert sorted(path.name for path in Path("out").iterdir()) == ["new", "old"]


def test_export_refuses_what_it_cannot_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(Path("runs/a"), steps=(5,))
    Path("there").mkdir()
    Path("there/file").write_text("precious")
    assert "there is already there and is left as it is" in run("export", "runs/a", "there")[2]
    assert run("export", "runs/a", "out", "--step", "6") == (
        8, "", "tandem: runs/a has no checkpoint of step 6; it has: 5\n"
    )  # fmt: skip
    assert "is a whole model already; leave out --merge" in run("export", "runs/a", "out", "--merge")[2]
    Path("here").mkdir()
    monkeypatch.chdir("here")
    assert run("export", "../runs/a", ".")[:2] == (2, "")
    monkeypatch.chdir("..")
    assert not Path("out").exists()


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_export_that_fails_leaves_nothing_half_done(
    kind: type[Exception], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    def full(source: Path, destination: Path, **options: Any) -> None:
        Path(destination).mkdir()
        raise kind("No space left on device")

    make_run(Path("runs/a"), steps=(5,))
    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export(Path("runs/a"), Path("out"), None, False)
    assert not Path("out").exists()
    assert not Path(".out.tmp").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_export_merges_an_adapter_into_its_base(run: Run, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = make_run(Path("runs/a"), f"model={tiny_model}", "trainable=lora", "trainable.rank=2", "dtype=float32")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    model = config.trainable.prepare(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = model(ids).logits
    adapter = Path("runs/a/checkpoints/000002/adapter")
    config.trainable.save(model, AutoTokenizer.from_pretrained(tiny_model), adapter)
    assert run("export", "runs/a", "plain")[1] == "exported the adapter of step 2 to plain\n"
    assert Path("plain/adapter_config.json").is_file()
    assert run("export", "runs/a", "merged", "--merge")[1] == "exported the model of step 2 to merged\n"
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, before)
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained("merged").eos_token == "<|im_end|>"


# doctor


@pytest.mark.slow
def test_doctor_finds_this_machine_fit(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0, out
    for what in (
        "tandem",
        "libraries",
        "memory",
        "accelerator",
        "disk",
    ):
        assert f" {what} " in out
    assert out.endswith("ready to train\n")


@pytest.mark.slow
def test_doctor_names_the_version_it_is_tested_with_where_that_is_another(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone, "tested", lambda: {"numpy": "1.2.3"})
    _, out, _ = run("doctor")
    words = " ".join(out.split())
    assert re.search(r"numpy \S+ \(tested with 1\.2\.3\)", words)
    assert words.count("tested with") == 1


@pytest.mark.slow
def test_doctor_names_what_is_missing_and_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    needs = [
        "torch>=2",
        "no-such-base>=1",
        'no-such-extra; extra == "wandb"',
        "rich ; extra == 'math'",
        'ruff; extra == "dev"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    code, out, _ = run("doctor")
    assert code == 1
    assert "missing: no-such-base" in out
    assert "pip install no-such-base" in out
    assert "missing: no-such-extra" in out
    assert "pip install 'tandem-rl[wandb]', if you want it" in " ".join(out.split())
    assert "extra math" in out
    assert "extra dev" not in out
    assert out.endswith("1 problem\n")


def interpreter(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_doctor_looks_for_vllm_here_and_in_the_environment_beside(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert re.search("^note +vLLM +neither in this environment nor in .venv-engine/bin/python", out, re.MULTILINE)
    interpreter(Path(".venv-engine/bin/python"), "echo warning; echo vLLM 0.1, torch 0.2")
    code, out, _ = run("doctor")
    assert code == 0
    assert re.search("^ok +vLLM +vLLM 0.1, torch 0.2, by .venv-engine/bin/python *$", out, re.MULTILINE)
    interpreter(Path(".venv-engine/bin/python"), "echo first >&2; echo 'ModuleNotFoundError: vllm' >&2; exit 1")
    code, out, _ = run("doctor")
    assert code == 1
    assert re.search("^problem +vLLM +ModuleNotFoundError: vllm *$", out, re.MULTILINE)


def test_ctrl_c_while_the_command_is_being_imported_ends_it_without_a_traceback() -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "tandem.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from tandem.cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
