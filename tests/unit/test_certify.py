"""Certificates pass on every shipped recipe, name what they cannot know, and say which options change nothing."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from tiers import long_but
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from typer.testing import CliRunner

from tandem.algorithms.losses.base import MicroBatch, TokenLoss
from tandem.algorithms.losses.grpo import Grpo
from tandem.cli.app import app
from tandem.config.loading import RunConfig, load
from tandem.errors import UnsupportedPair
from tandem.tools.certify import inert_options
from tandem.tools.certify.case import FORMULAS, Case, certify
from tandem.tools.certify.certificate import Certificate, CertificateLine
from tandem.tools.certify.inert_options import EVERY_OPTION
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
    shipped = load(Path(f"recipes/{name}.yaml"), overrides).config
    (kind,) = [kind for kind in ARCHITECTURES if kind in shipped.model.lower()]
    return load(Path(f"recipes/{name}.yaml"), [*eager(overrides), f"model={architectures / kind}"]).config


def eager(overrides: Sequence[str]) -> list[str]:
    """Overrides that compile nothing, unless they say so."""
    return [*overrides, *([] if any(one.startswith("compile=") for one in overrides) else ["compile=false"])]


def lines(config: RunConfig) -> list[CertificateLine]:
    """Every line of a recipe's certificate, of one process alone, but for options that change nothing."""
    with contextlib.closing(Case(config, real=False)) as case:
        return [*case.lines(0), *case.later()]


def inert(config: RunConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options that change nothing, and those that change nothing on-policy, without the lines."""
    with contextlib.closing(Case(config, real=False)) as case:
        return case.inert()


def unproven(verdicts: Sequence[CertificateLine]) -> list[CertificateLine]:
    """Lines that did not pass, but for compiled layers."""
    return [line for line in verdicts if line.state != "pass" and line.name != COMPILED]


def state(verdicts: Sequence[CertificateLine], part: str) -> str:
    (line,) = [line for line in verdicts if part in line.name]
    return line.state


@pytest.mark.parametrize("name", long_but([path.stem for path in RECIPES], "lora"))
def test_a_shipped_recipe_passes(name: str, architectures: Path) -> None:
    certificate = certify(recipe(name, architectures), several=0)
    assert unproven(certificate.lines) == []
    assert certificate.passed
    assert certificate.inert == ()


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
    monkeypatch.setattr(Case, "later", lambda self: iter(()))
    verdicts = lines(recipe("quickstart", architectures, [f"compile={wanted}"]))
    (left_out,) = [line for line in verdicts if line.state != "pass"]
    assert (left_out.name, left_out.state, left_out.note) == (COMPILED, "skipped", note)


OBJECTIVES = [
    ["loss=gspo", "advantage=gdpo"],
    ["loss=cispo", "advantage=rloo", "truncated=mask"],
    ["loss=sapo", "advantage=maxrl", "reference={kind: average, every: 3, estimator: k1}"],
    ["loss=reinforce", "advantage=batch_std", "corrections=[{kind: token, beyond: mask}, opsm]"],
    ["loss.reduction=constant", "advantage={kind: grpo, std: population}", "corrections=[sequence]"],
    ["old_logprobs=recomputed", "updates_per_batch=2", "corrections=[token, geometric]"],
    ["updates_per_batch=2", "reference={kind: start, estimator: k2, ratio_corrected: false}"],
]


@pytest.mark.parametrize(
    "overrides",
    long_but(OBJECTIVES, OBJECTIVES[2]),
    ids=" ".join,
)
def test_an_objective_is_its_formula(overrides: list[str], architectures: Path) -> None:
    assert unproven(lines(recipe("calculator", architectures, overrides))) == []


WHOLE = ["old_logprobs=recomputed", "updates_per_batch=2", "corrections=[token, geometric]"]
RANKED = [
    ("calculator", ["ranks=2", *WHOLE, "reference={kind: average, every: 3, estimator: k1}"]),
    ("lora", ["ranks=2", "old_logprobs=recomputed", "corrections=[token]", "optimizer=adamw8bit"]),
    ("quickstart", ["ranks=2", "distributed.context_parallel=2", "dtype=bfloat16"]),
    ("quickstart", ["ranks=4", "loss.reduction=constant", "dtype=bfloat16", "optimizer.precision=stochastic"]),
]


@pytest.mark.parametrize("source", long_but(RANKED, RANKED[0]), ids=lambda source: " ".join([source[0], *source[1]]))
def test_a_recipe_of_several_ranks_has_every_step_computed_by_all(
    nursery: Nursery, architectures: Path, source: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, overrides = source
    monkeypatch.setattr(Case, "inert", lambda self: ((), ()))
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})  # those of one process are other tests'
    ranks = overrides[0].partition("=")[2]
    with nursery.children():
        certificate = certify(recipe(name, architectures, overrides))
    assert unproven(certificate.lines) == []
    passed = {line.name: line for line in certificate.lines if line.state == "pass"}
    assert passed[f"{ranks} processes"].bound == 1e-6
    assert passed[f"weights of {ranks} processes"].figure == 0
    assert passed[f"weights of {ranks} processes after two steps"].figure == 0


def test_what_ranks_cannot_divide_is_not_certified_on_several(architectures: Path) -> None:
    with pytest.raises(UnsupportedPair, match="ranks: 2 cannot go with optimizer"):
        certify(recipe("quickstart", architectures, ["ranks=2", "optimizer=adafactor"]))
    with pytest.raises(UnsupportedPair, match="shard: weights is not certified"):
        certify(recipe("quickstart", architectures, ["ranks=2", "distributed.shard=weights"]))


def test_what_a_broker_sends_is_certified_too(architectures: Path) -> None:
    own = ["broker.env_advantages=true", "loss=gspo", "loss.gradient=token"]
    certificate = certify(recipe("broker", architectures, own), several=0)
    assert certificate.passed
    assert certificate.inert == ()


def test_penalties_and_the_support_that_was_sampled_from_are_in_the_formula(architectures: Path) -> None:
    own = ["repetition_penalty=1.3", "frequency_penalty=0.4", "presence_penalty=-0.3", "min_tokens=3"]
    own += ["top_p=0.9", "min_p=0.1"]
    verdicts = lines(recipe("quickstart", architectures, [f"sampling.{option}" for option in own]))
    assert state(verdicts, "formulas") == "pass"
    assert unproven(verdicts) == []


def test_options_that_change_nothing_are_named(architectures: Path) -> None:
    clips = ("loss.clip_low", "loss.clip_high", "loss.dual_clip")
    assert inert(recipe("quickstart", architectures)) == ((), clips)


@pytest.mark.long
def test_options_that_change_something_are_not_named(architectures: Path) -> None:
    assert inert(recipe("quickstart", architectures, ["max_lag=1"])) == ((), ())
    # What the loader refuses beside the others is not turned.
    assert inert(recipe("quickstart", architectures, ["old_logprobs=recomputed"])) == ((), ())
    # A reference that follows is looked at after it did.
    assert inert(recipe("quickstart", architectures, ["reference={kind: average, every: 10}"]))[0] == ()


def test_every_option_of_the_objective_is_turned(architectures: Path) -> None:
    own = ["corrections=[opsm]", "reference=start", "optimizer.schedule=constant"]
    config = recipe("quickstart", architectures, own)
    turned: list[str] = inert_options.inert_options(config, lambda other: False)
    assert turned == [
        *("old_logprobs", "truncated", "updates_per_batch"),
        *("loss.clip_low", "loss.clip_high", "loss.dual_clip", "loss.reduction"),
        *("reference.beta", "reference.estimator", "reference.ratio_corrected"),
        *(f"sampling.{name}" for name in ("top_p", "top_k", "min_p")),
        *(f"sampling.{name}_penalty" for name in ("repetition", "presence", "frequency")),
        "sampling.min_tokens",
        *("optimizer.lr", "optimizer.warmup_steps", "optimizer.schedule", "optimizer.max_grad_norm"),
        *("optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay"),
        "corrections.opsm.threshold",
    ]
    kept = inert_options.inert_options(config, lambda other: other.reference != config.reference)
    assert kept == [name for name in turned if not name.startswith("reference.")]


def test_an_option_without_effect_fails_unless_it_is_accepted(
    architectures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe("quickstart", architectures, [f"loss={__name__}:Mine"])
    dead = ("old_logprobs", "loss.clip_low", "loss.clip_high", "loss.dual_clip")
    turned = inert(config)
    monkeypatch.setattr(Case, "inert", lambda self: turned)
    monkeypatch.setattr(Case, "lines", lambda self, several: iter(()))
    monkeypatch.setattr(Case, "later", lambda self: iter(()))
    for accepted, passes in ((), False), (dead[:3], False), (dead, True):
        certificate = certify(config, several=0, inert=accepted)
        (line,) = [line for line in certificate.lines if line.name == EVERY_OPTION]
        assert certificate.inert == dead
        assert (line.state == "pass") == certificate.passed == passes
        assert all((name in line.note) == (name not in accepted) for name in dead)


def test_a_part_of_ones_own_is_not_compared_but_varied(architectures: Path) -> None:
    verdicts = lines(recipe("quickstart", architectures, [f"loss={__name__}:Mine"]))
    (left_out,) = unproven(verdicts)
    assert (left_out.name, left_out.state) == (FORMULAS, "skipped")
    assert "Mine" in left_out.note


def test_a_tiny_model_keeps_its_architecture() -> None:
    tiny = shrunk(Qwen3Config(num_hidden_layers=28), (4,))
    assert (tiny.model_type, tiny.num_hidden_layers, len(tiny.layer_types)) == ("qwen3", 5, 5)
    assert tiny.num_key_value_heads == 4  # as many as heads, as it was


def test_the_real_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "inert", lambda self: ((), ()))
    config = load(Path("recipes/quickstart.yaml"), [f"model={tiny_model}"]).config
    certificate = certify(config, real=True, several=0)
    assert certificate.passed
    assert str(tiny_model) in certificate.model


def test_the_command_says_it_in_words_and_as_json(architectures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.cli import certify as verb

    def quick(config: RunConfig, **options: Any) -> Certificate:
        return certify(config, **options, several=0)

    monkeypatch.setattr(verb, "certify", quick)
    monkeypatch.setattr(Case, "inert", lambda self: ((), ("loss.clip_low",)))
    arguments = ["certify", "recipes/quickstart.yaml", f"model={architectures / 'smollm2'}"]
    words = CliRunner().invoke(app, arguments)
    assert words.exit_code == 0
    assert "micro-batch sizes" in words.output
    assert "padding" in words.output
    assert "options that change nothing: none" in words.output
    assert "loss.clip_low" in words.output  # which only waits for an engine that disagrees
    assert "passed in" in words.output
    monkeypatch.setattr("tandem.tools.certify.case.EXACT", 0.0)
    monkeypatch.setattr("tandem.tools.certify.case.VARIATIONS", {})
    monkeypatch.setattr(Case, "later", lambda self: iter(()))
    monkeypatch.setattr(Case, "inert", lambda self: (("loss.clip_low",), ()))
    plain = CliRunner().invoke(app, [*arguments, "--json"])
    assert plain.exit_code == 1
    certificate = json.loads(plain.output)
    assert certificate["passed"] is False
    assert certificate["inert"] == ["loss.clip_low"]
    assert certificate["inert_on_policy"] == []
    failed = [line["name"] for line in certificate["lines"] if line["state"] == "fail"]
    assert failed[-1] == EVERY_OPTION
    assert FORMULAS in failed


def test_the_command_fails_on_an_inert_option_that_is_not_accepted(
    architectures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Case, "lines", lambda self, several: iter(()))
    monkeypatch.setattr(Case, "later", lambda self: iter(()))
    monkeypatch.setattr(Case, "inert", lambda self: (("loss.clip_low", "loss.dual_clip"), ()))
    command = ["certify", "recipes/quickstart.yaml", f"model={architectures / 'smollm2'}"]
    for accepted, code in ((), 1), (("loss.clip_low",), 1), (("loss.clip_low", "loss.dual_clip"), 0):
        options = [text for name in accepted for text in ("--inert", name)]
        assert CliRunner().invoke(app, [*command, *options]).exit_code == code


def test_a_distance_that_is_not_a_number_is_null_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.cli import certify as verb

    line = CertificateLine(name="the gradient is there", state="fail", figure=math.nan, bound=math.inf)
    made = Certificate(model="m", lines=(line,), inert=(), inert_on_policy=(), seconds=1.0)
    monkeypatch.setattr(verb, "certify", lambda config, **options: made)
    plain = CliRunner().invoke(app, ["certify", "recipes/quickstart.yaml", "--json"])
    (row,) = json.loads(plain.output, parse_constant=pytest.fail)["lines"]
    assert (row["figure"], row["bound"]) == (None, None)
