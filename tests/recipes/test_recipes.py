"""Every recipe loads, conforms to the schema, reads back what it writes, and poses tasks whose gold answers score."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig, dump, load
from tandem.config.sources import EnvSource
from tandem.rewards.grading.workers import Graders
from tandem.rollout.gold import check_environment

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
MADE = 5000
"""Most tasks that an environment is to make."""
NEEDS_DOWNLOAD = {"gsm8k", "math", "broker", "qwen_gsm8k", "areal_gsm8k", "dapo", "verifiers"}
NEEDS_PACKAGES = {"gymnasium", "mcp", "openenv", "textarena"}  # which tests/integration/test_packages.py plays


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are run from the project's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def recipe(path: Path) -> RunConfig:
    return load(path.relative_to(ROOT)).config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_for_and_loads(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    assert len(comment) >= 3
    config = recipe(path)
    assert all(source.rewards for source in config.sources.values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_resolved_recipe_loads_to_an_equal_one(path: Path, tmp_path: Path) -> None:
    config = recipe(path)
    written = tmp_path / "config.yaml"
    written.write_text(dump(config))
    assert load(written).config == config


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p.stem not in NEEDS_DOWNLOAD | NEEDS_PACKAGES], ids=lambda path: path.stem
)
def test_a_recipes_gold_answers_get_full_marks(path: Path) -> None:
    config = recipe(path)
    assert config.sources or config.supervised
    for source in config.sources.values():
        source = small(source)
        train, test = source.env.tasks("train"), source.env.tasks("test")
        assert len(train) >= config.groups_per_step
        assert len(test) >= min(config.evaluate.tasks, 12)
        assert not {task.id for task in islice(train, 200)} & {task.id for task in islice(test, 200)}
        asyncio.run(grade(source))


def small(source: EnvSource) -> EnvSource:
    """The same with no more tasks than can be made in a moment, where an environment makes them."""
    env = source.env
    return replace(source, env=replace(env, size=min(env.size, MADE))) if hasattr(env, "size") else source


async def grade(source: EnvSource) -> None:
    specs = {name: (spec.reward, spec.weight) for name, spec in source.rewards.items()}
    async with Graders(specs, timeout=30) as graders:
        assert await check_environment(source.env, graders, 8) == []


def test_gsm8k_reads_a_local_file_by_an_override(tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text(
        "".join(f'{{"question": "What is {n} + 1?", "answer": "It is.\\n#### {n + 1}"}}\n' for n in range(40))
    )
    config = load(Path("recipes/gsm8k.yaml"), [f"env.path={rows}"]).config
    assert len(config.env.tasks("train")) + len(config.env.tasks("test")) == 40


def test_recipes_together_show_every_environment() -> None:
    used = {resolve.kind_of("envs", source.env) for path in RECIPES for source in recipe(path).sources.values()}
    assert used == set(resolve.names("envs"))


def test_the_quickstart_takes_small_steps_of_one_wave_each() -> None:
    """No wave follows for groups without signal: of so small a step it would take most of the time."""
    config = recipe(ROOT / "recipes" / "quickstart.yaml")
    assert config.groups_per_step * config.group_size <= getattr(config.engine, "max_rows", 0)
    assert (config.zero_variance_groups, config.max_lag) == ("keep", 0)
    assert "\ndtype: auto" in (ROOT / "recipes" / "quickstart.yaml").read_text()
