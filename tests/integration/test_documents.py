"""Every example for one GPU of the documents trains two steps, unchanged but for model, data and what samples.

Its lengths and sizes are its own: the model's answers are short. Where it has vLLM beside or within the trainer the
trainer's own model samples instead, which ``engine=embedded`` says; ``test_axolotl``, ``test_swift`` and
``test_atropos_document`` train some of them with vLLM. A few are trained by default, all of them with ``--long``; of
ms-swift those of ``unit/test_swift`` and ``test_launchers`` are.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from integration.vllm_runs import lines, metrics
from support.atropos_document import HERMES, TRAINERS, command
from support.compat_cases import OVERRIDES, axolotl_file, axolotl_files, examples, forget_swift, swift_files
from support.documents import SHORT_RUN, STAND_IN, build_brief_model, build_reward_model, environment_elsewhere
from support.tiers import long_but
from unit.test_loggers import fake_library

from tandem.cli import app as cli
from tandem.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch.compile gives many
]
BLOCKS, TRAINED = examples("axolotl"), examples("swift")

ROWS = [{"question": f"{n}+3-{n}", "problem": f"{n}+3-{n}", "answer": "3", "solution": "3"} for n in range(1, 41)]
"""Tasks that the model solves now and then; Axolotl's name columns otherwise than ms-swift's."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the test's own, by the names of models that the examples have."""
    place = tmp_path_factory.mktemp("models")
    brief = build_brief_model(place / "brief")
    rewarding = build_reward_model(place / "rewarding")
    qwen = [f"Qwen/Qwen2.5-{size}" for size in ("0.5B-Instruct", "1.5B-Instruct", "3B-Instruct", "7B", "14B-Instruct")]
    return {
        **dict.fromkeys([*qwen, HERMES], brief),
        "OpenAssistant/reward-model-deberta-v3-large-v2": rewarding,
        "Qwen/rm": rewarding,
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules in it."""
    forget_swift(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    axolotl_files(tmp_path)
    return tmp_path


@pytest.fixture
def place(here: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which the examples' models and data lie; Weights & Biases is a stand-in."""
    for name, folder in models.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).symlink_to(folder)
    swift_files(here)
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    fake_library(monkeypatch, "wandb")
    with mock.patch.dict(os.environ):  # commands of another system's set variables
        yield here


def tandem(*words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    assert stopped.value.code in (None, 0)


def trained(place: Path) -> Path:
    """The folder of the run, which has trained two steps: by a gradient where the rewards of a group differ."""
    (path,) = place.rglob("run/metrics.jsonl")
    assert list(metrics(path.parent)) == [1, 2]
    for number, step in metrics(path.parent).items():
        assert step["tokens/trained"] > 0
        groups: dict[str, set[float]] = {}
        for row in lines(path.parent / f"rollouts/{number:06d}.jsonl"):
            groups.setdefault(row["group"], set()).add(row["reward"])
        assert step["grad_norm"] > 0 or all(len(rewards) == 1 for rewards in groups.values())
    return path.parent


@pytest.mark.parametrize("what", long_but(BLOCKS, "rollout function"))
def test_axolotls_examples_train(what: str, place: Path) -> None:
    block = BLOCKS[what]
    (place / "config.yaml").write_text(axolotl_file(block))
    served = block["file"]["trl"].get("use_vllm")
    more = (*(STAND_IN if served else ()), *(OVERRIDES[:1] if block["file"].get("fp8") else ()))
    tandem("check", "config.yaml", *more)
    tandem("train", "config.yaml", *more, *SHORT_RUN)
    run = trained(place)
    rows = [row for step in (1, 2) for row in lines(run / f"rollouts/{step:06d}.jsonl")]
    assert len({row["reward"] for row in rows}) > 1
    if what == "rollout function":
        assert all(len(row["prompts"]) > 1 for row in rows)  # every generate is a turn of its own
        assert all(row["text"].count("Next step:") == 0 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("what", TRAINED)
def test_ms_swifts_examples_train(what: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = TRAINED[what]["line"]
    words = ["swift", "rlhf", *shlex.split(line)]
    more = STAND_IN if "--use_vllm true" in line else ()
    capsys.readouterr()
    tandem(*words, *more, "--show")
    (place / "recipe.yaml").write_text(capsys.readouterr().out)
    tandem("check", "recipe.yaml")
    tandem(*words, *more, *SHORT_RUN)
    run = trained(place)
    assert len(lines(run / "completions.jsonl")) == 2


@pytest.mark.parametrize("what", long_but(TRAINERS, "newest, shared_vllm"))
def test_atropos_trainers_train(
    what: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(TRAINERS[what].replace("/tmp/", f"{place}/tmp/"))
    for name, value in line.environ.items():
        monkeypatch.setenv(name, value)
    with environment_elsewhere(groups=80) as url:  # no example takes more for two steps
        words = [*line.words, "--atropos-url", url, "--vllm-port", str(free_port()), *STAND_IN]
        capsys.readouterr()
        tandem(*words, "--show")
        (place / "recipe.yaml").write_text(capsys.readouterr().out)
        tandem("check", "recipe.yaml")
        tandem(*words, *SHORT_RUN)
        printed = capsys.readouterr().out
    run = trained(place)
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    kind = recipe["trainable"]["kind"]
    assert [path.name for path in place.rglob(ENDS[kind])] == [ENDS[kind]]
    assert ("mean step" in printed) == ("--benchmark" in line.words or "atropos-grpo-run" in line.words)


ENDS = {"full": "final_model", "lora": "final_adapter"}
"""Folders of the last checkpoint, as Atropos names them."""
