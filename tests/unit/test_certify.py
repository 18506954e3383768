"""Certificates pass on every shipped recipe and name what they cannot know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.families import config_of
from support.tiers import long_but
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from typer.testing import CliRunner

from tandem.algorithms.losses.base import MicroBatch, TokenLoss
from tandem.algorithms.losses.grpo import Grpo
from tandem.cli.app import app
from tandem.config.loading import RunConfig, load
from tandem.tools.certify.case import FORMULAS, certify
from tandem.tools.certify.policy import CertificateLine

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
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
    shipped = load(Path(f"recipes/{name}.yaml"), overrides).config
    (kind,) = [kind for kind in ARCHITECTURES if kind in shipped.model.lower()]
    return load(Path(f"recipes/{name}.yaml"), [*overrides, f"model={architectures / kind}"]).config


def unproven(config: RunConfig) -> list[CertificateLine]:
    """Lines of a recipe's certificate that did not pass."""
    return [line for line in certify(config).lines if line.state != "pass"]


@pytest.mark.parametrize("name", long_but([path.stem for path in RECIPES], "lora"))
def test_a_shipped_recipe_passes(name: str, architectures: Path) -> None:
    assert unproven(recipe(name, architectures)) == []


OBJECTIVES = [
    ["loss=gspo", "advantage=gdpo"],
    ["loss=cispo", "advantage=rloo", "truncated=mask"],
    ["loss=sapo", "advantage=maxrl", "reference={kind: average, every: 3, estimator: k1}"],
    ["loss=reinforce", "advantage=batch_std", "corrections=[{kind: token, beyond: mask}, opsm]"],
    ["loss.reduction=constant", "advantage={kind: grpo, std: population}", "corrections=[sequence]"],
    ["old_logprobs=recomputed", "updates_per_batch=2", "corrections=[token, geometric]"],
    ["updates_per_batch=2", "reference={kind: start, estimator: k2, ratio_corrected: false}"],
    ["loss=gspo", "old_logprobs=recomputed", "corrections=[token, opsm]", "reference={kind: start, estimator: k1}"],
    ["advantage={kind: turn_returns, discount: 0.7}", "loss=gspo"],
]


@pytest.mark.parametrize(
    "overrides",
    long_but(OBJECTIVES, OBJECTIVES[2], OBJECTIVES[-1]),
    ids=" ".join,
)
def test_an_objective_is_its_formula(overrides: list[str], architectures: Path) -> None:
    assert unproven(recipe("calculator", architectures, overrides)) == []


FAMILIES = ["qwen2_5_vl", "gemma3n_text", "gemma4_text", "qwen3_next", "falcon_h1", "mamba2", "gpt_oss", "qwen3_moe"]
"""With images, values by layer, words of layers, hybrids, no attention, experts."""


@pytest.mark.parametrize("name", long_but(FAMILIES, "qwen2_5_vl"))
def test_a_family_is_certified(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path / name)
    assert unproven(load(Path("recipes/arithmetic.yaml"), [f"model={tmp_path / name}"]).config) == []


EXPERTS = "target_parameters: [experts.gate_up_proj, experts.down_proj]"
ADAPTERS = {
    "qwen3_moe": f"{{kind: lora, rank: 4, use_rslora: true, modules_to_save: [lm_head], {EXPERTS}}}",
    "gpt_oss": f"{{kind: lora, rank: 4, merged: true, {EXPERTS}}}",
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_experts_are_certified(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    overrides = [f"model={tmp_path}", f"trainable={ADAPTERS[name]}"]
    assert not unproven(load(Path("recipes/arithmetic.yaml"), overrides).config)


def test_what_a_broker_sends_is_certified_too(architectures: Path) -> None:
    own = ["broker.env_advantages=true", "loss=gspo"]
    assert unproven(recipe("broker", architectures, own)) == []


def test_penalties_and_the_support_that_was_sampled_from_are_in_the_formula(architectures: Path) -> None:
    own = ["repetition_penalty=1.3", "frequency_penalty=0.4", "presence_penalty=-0.3", "min_tokens=3"]
    own += ["top_p=0.9", "min_p=0.1"]
    assert unproven(recipe("quickstart", architectures, [f"sampling.{option}" for option in own])) == []


def test_a_part_of_ones_own_is_not_compared_but_varied(architectures: Path) -> None:
    (left_out,) = unproven(recipe("quickstart", architectures, [f"loss={__name__}:Mine"]))
    assert (left_out.name, left_out.state) == (FORMULAS, "skipped")
    assert "Mine" in left_out.note


def test_the_command_says_it_in_words(architectures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["certify", "recipes/quickstart.yaml", f"model={architectures / 'smollm2'}"]
    words = CliRunner().invoke(app, arguments)
    assert words.exit_code == 0
    assert all(text in words.output for text in ("micro-batch sizes", "padding", "two optimizer steps", "passed in"))
    monkeypatch.setattr("tandem.tools.certify.case.EXACT", 0.0)
    monkeypatch.setattr("tandem.tools.certify.case._rounding", lambda *_: 1.0)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert any(FORMULAS in line and line.startswith("fail") for line in failed.output.splitlines())
    assert "failed in" in failed.output
