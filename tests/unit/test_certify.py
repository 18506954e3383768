"""Certificates pass on every shipped recipe and name what they cannot know."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiers import long_but
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from typer.testing import CliRunner

from tandem.algorithms.losses.base import MicroBatch, TokenLoss
from tandem.algorithms.losses.grpo import Grpo
from tandem.cli.app import app
from tandem.config.loading import RunConfig, load
from tandem.tools.certify.case import FORMULAS, Case, certify
from tandem.tools.certify.certificate import Certificate, CertificateLine
from tandem.tools.certify.made_up import shrunk
from tandem.tools.certify.variations import compiled

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
COMPILED = "layers compiled"
ARCHITECTURES = {"qwen2.5": Qwen2Config, "qwen3": Qwen3Config, "smollm2": LlamaConfig}


class Mine(Grpo):
    """A loss of somebody's own."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        return TokenLoss(loss_N=-micro.advantages_N * logprobs_N)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are read at the project's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="session")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of configurations: a certificate of a tiny model reads nothing else."""
    folder = tmp_path_factory.mktemp("architectures")
    for name, cls in ARCHITECTURES.items():
        cls().save_pretrained(folder / name)
    return folder


def recipe(name: str, architectures: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A shipped recipe, its model's architecture taken from a folder."""
    found = load(Path(f"recipes/{name}.yaml"), overrides).config
    (kind,) = [kind for kind in ARCHITECTURES if kind in found.model.lower()]
    return load(Path(f"recipes/{name}.yaml"), [*eager(overrides), f"model={architectures / kind}"]).config


def eager(overrides: Sequence[str]) -> list[str]:
    """Overrides that compile nothing, unless they say so."""
    return [*overrides, *([] if any(one.startswith("compile=") for one in overrides) else ["compile=false"])]


def lines(config: RunConfig) -> list[CertificateLine]:
    """Every line of a recipe's certificate, of one process alone."""
    with contextlib.closing(Case(config, real=False)) as case:
        return [*case.lines(0), *case.later()]


def unproven(found: Sequence[CertificateLine]) -> list[CertificateLine]:
    """Lines that did not pass, but for compiled layers."""
    return [line for line in found if line.state != "pass" and line.name != COMPILED]


def state(found: Sequence[CertificateLine], part: str) -> str:
    (line,) = [line for line in found if part in line.name]
    return line.state


@pytest.mark.parametrize("name", long_but([path.stem for path in RECIPES], "arithmetic", "lora"))
def test_a_shipped_recipe_passes(name: str, architectures: Path) -> None:
    found = certify(recipe(name, architectures), several=0)
    assert unproven(found.lines) == []
    assert found.passed


@pytest.mark.parametrize(
    ("wanted", "lacks", "note"),
    [
        ("false", None, "compile: false compiles nothing on this machine"),
        ("auto", None, "compile: auto compiles nothing on this machine"),
        ("true", "C compiler (any)", "there is no C compiler (any)"),
    ],
)
def test_why_compiled_layers_are_left_out(
    architectures: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, lacks: str | None, note: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tandem.tools.certify.case.missing", lambda device: lacks)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {COMPILED: compiled})
    found = lines(recipe("quickstart", architectures, [f"compile={wanted}"]))
    (left_out,) = [line for line in found if line.state != "pass"]
    assert (left_out.name, left_out.state, left_out.note) == (COMPILED, "skipped", note)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=gspo", "advantage=gdpo"],
        ["loss=cispo", "advantage=rloo", "truncated=mask"],
        ["loss=sapo", "advantage=maxrl", "reference={kind: average, every: 3, estimator: k1}"],
        ["loss=reinforce", "advantage=batch_std", "corrections=[{kind: token, beyond: mask}, opsm]"],
        ["loss.reduction=constant", "advantage={kind: grpo, std: population}", "corrections=[sequence]"],
        ["old_logprobs=recomputed", "updates_per_batch=2", "corrections=[token, geometric]"],
        ["updates_per_batch=2", "reference={kind: start, estimator: k2, ratio_corrected: false}"],
    ],
    ids=" ".join,
)
def test_an_objective_is_its_formula(overrides: list[str], architectures: Path) -> None:
    assert unproven(lines(recipe("calculator", architectures, overrides))) == []


def test_what_a_broker_sends_is_certified_too(architectures: Path) -> None:
    own = ["broker.env_advantages=true", "loss=gspo", "loss.gradient=token"]
    found = certify(recipe("broker", architectures, own), several=0)
    assert found.passed


def test_the_support_that_was_sampled_from_is_in_the_formula(architectures: Path) -> None:
    found = lines(recipe("quickstart", architectures, ["sampling.top_p=0.8", "sampling.min_p=0.5"]))
    assert state(found, "formulas") == "pass"


def test_penalties_are_in_the_formula(architectures: Path) -> None:
    own = ["repetition_penalty=1.3", "frequency_penalty=0.4", "presence_penalty=-0.3", "min_tokens=3", "top_p=0.9"]
    assert unproven(lines(recipe("quickstart", architectures, [f"sampling.{option}" for option in own]))) == []


def test_a_part_of_ones_own_is_not_compared_but_varied(architectures: Path) -> None:
    found = lines(recipe("quickstart", architectures, [f"loss={__name__}:Mine"]))
    (left_out,) = unproven(found)
    assert (left_out.name, left_out.state) == (FORMULAS, "skipped")
    assert "Mine" in left_out.note


def test_a_tiny_model_keeps_its_architecture() -> None:
    tiny = shrunk(Qwen3Config(num_hidden_layers=28), (4,))
    assert (tiny.model_type, tiny.num_hidden_layers, len(tiny.layer_types)) == ("qwen3", 5, 5)
    assert tiny.num_key_value_heads == 4  # as many as heads, as it was


def test_the_real_model(tiny_model: Path) -> None:
    config = load(Path("recipes/quickstart.yaml"), [f"model={tiny_model}"]).config
    found = certify(config, real=True, several=0)
    assert found.passed
    assert str(tiny_model) in found.model


def test_the_command_says_it_in_words_and_as_json(architectures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.cli import certify as verb

    def quick(config: RunConfig, **given: Any) -> Certificate:
        return certify(config, **given, several=0)

    monkeypatch.setattr(verb, "certify", quick)
    asked = ["certify", "recipes/quickstart.yaml", f"model={architectures / 'smollm2'}"]
    words = CliRunner().invoke(app, asked)
    assert words.exit_code == 0
    assert "micro-batch sizes" in words.output
    assert "passed in" in words.output
    monkeypatch.setattr("tandem.tools.certify.case.EXACT", 0.0)
    plain = CliRunner().invoke(app, [*asked, "--json"])
    assert plain.exit_code == 1
    told = json.loads(plain.output)
    assert told["passed"] is False
    assert FORMULAS in [line["name"] for line in told["lines"] if line["state"] == "fail"]
