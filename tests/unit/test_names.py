"""Names of other systems in a recipe: what they are here is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.config import loading as config
from tandem.errors import DOCS, ConfigError
from tandem_compat.names import meant

PAGE = Path(__file__).parents[2] / "docs/guide/trl.md"
RECIPE = "model: m\nsteps: 1\nenv: arithmetic\n"


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """What is wrong with a recipe, line by line."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE + text)
    with pytest.raises(ConfigError) as caught:
        config.load(recipe, overrides)
    return str(caught.value).replace(str(recipe), "recipe.yaml").splitlines()


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("learning_rate", "optimizer.lr"),
        ("num_generations", "group_size"),
        ("beta", "reference: {kind: start"),
        ("per_device_train_batch_size", "groups_per_step"),
        ("gradient_accumulation_steps", "groups_per_step"),
        ("report_to", "loggers"),
        ("max_completion_length", "sampling.max_tokens"),
        ("epsilon_high", "loss.clip_high"),
        ("steps_per_generation", "max_lag"),
        ("save_steps", "checkpoint.every"),
        ("lora_r", "trainable.rank"),
        ("sequence_len", "micro_batch_tokens"),
        ("logging_steps", "leave it out: every step is written down"),
        ("columns", "env: dataset, with prompt and answer"),
    ],
)
def test_a_name_from_elsewhere_is_told_what_it_is_here(name: str, here: str, tmp_path: Path) -> None:
    (line,) = problems(tmp_path, f"{name}: 1\n")
    assert line.startswith(f"recipe.yaml:4: unknown option '{name}'; from ")
    assert here in line
    assert "known:" not in line


def test_names_of_verl_are_told_one_by_one(tmp_path: Path) -> None:
    text = "actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-6}\n  rollout:\n    n: 4\n"
    header, *lines = problems(tmp_path, text, "data.train_batch_size=8")
    assert header == "recipe.yaml has 3 problems:"
    assert [line.strip().partition("; ")[0] for line in lines] == [
        "recipe.yaml:6: unknown option 'actor_rollout_ref.actor.optim.lr'",
        "recipe.yaml:8: unknown option 'actor_rollout_ref.rollout.n'",
        "command line: data.train_batch_size: unknown option 'data.train_batch_size'",
    ]
    assert f"from verl? here it is optimizer.lr ({DOCS}/guide/trl/)" in lines[0]


def test_names_of_axolotls_groups_are_told_one_by_one(tmp_path: Path) -> None:
    _, *lines = problems(tmp_path, "trl:\n  num_generations: 4\n", "vllm.tensor_parallel_size=2")
    assert [line.strip() for line in lines] == [
        "recipe.yaml:5: unknown option 'trl.num_generations'; from Axolotl? "
        f"here it is group_size ({DOCS}/guide/axolotl/)",
        "command line: vllm.tensor_parallel_size: unknown option 'vllm.tensor_parallel_size'; from Axolotl? "
        f"here it is engine.tensor_parallel_size ({DOCS}/guide/axolotl/)",
    ]
    (whole,) = problems(tmp_path, "trl: {none: 1}\n")
    assert "a whole file of Axolotl has base_model" in whole


@pytest.mark.parametrize(("line", "follows"), [("bf16: true", "dtype: bfloat16"), ("warmup_ratio: 0.1", "optimizer.")])
def test_hints_can_be_followed(tmp_path: Path, line: str, follows: str) -> None:
    (hint,) = problems(tmp_path, f"{line}\n")
    assert f"here it is {follows}" in hint


def test_a_name_within_a_part(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "loss: {epsilon: 0.2}\n")
    assert "unknown option 'epsilon' of loss (grpo); known: clip_low, " in line
    assert "; from TRL or Axolotl? here it is loss.clip_low" in line


def test_what_is_near_to_an_option_here_is_that(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "temperature: 1.0\n")
    assert line.endswith("unknown option 'temperature'; did you mean 'sampling.temperature'?")
    assert meant("grop_size") is None


def test_every_name_on_the_page_is_known() -> None:
    recipes = PAGE.read_text().partition("## A recipe")[2].partition("## Defaults")[0]
    rows = [line.split("|") for line in recipes.splitlines() if line[:3] == "| `"]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])} - {"model"}
    assert len(names) > 70
    assert not [name for name in names if meant(name) is None]
