"""Recipes by name, runs listed and compared, and trained models talked to and served."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer.testing

from tandem import clone
from tandem.api.targets import weights_of
from tandem.cli.app import app
from tandem.cli.serve import serving
from tandem.config.loading import from_options, load
from tandem.errors import ConfigError
from tandem.model import packing
from tandem.trainer import assemble


def tandem(*words: str, text: str = "") -> str:
    done = typer.testing.CliRunner().invoke(app, words, input=text)
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_shipped_recipe_is_taken_by_its_name_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Path("arithmetic")).config.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert Path(load(Path("dataset")).config.env.path).is_file()
    Path(".cache/smollm2").mkdir(parents=True)
    assert load(Path("arithmetic")).config.model == ".cache/smollm2"
    with pytest.raises(ConfigError, match="there is no recipe arithmetics; did you mean arithmetic"):
        load(Path("arithmetics"))


def test_recipes_are_listed() -> None:
    listed = tandem("recipes")
    assert all(name in listed for name in clone.recipes())
    assert "24 GB" in listed


def test_a_new_recipe_is_a_copy_with_what_it_names() -> None:
    assert "a copy of dataset" in tandem("new", "recipe", "mine", "dataset")
    assert load(Path("mine.yaml")).config == load(Path("dataset")).config
    assert Path("capitals.py").is_file()
    with pytest.raises(ConfigError, match=r"mine\.yaml is already there"):
        tandem("new", "recipe", "mine")
    with pytest.raises(ConfigError, match="no recipe 'datset'; did you mean 'dataset'"):
        tandem("new", "recipe", "other", "datset")


def written(name: str, solved: list[int], reward: list[float], lr: float) -> None:
    """A run's folder with two evaluations."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"model: org/m\nsteps: 2\nenv: {{kind: gsm8k}}\noptimizer: {{lr: {lr}}}\nname: {name}\n"
    )
    steps = [{"step": i + 1, "time": 10.0 + i, "metrics": {"reward": each}} for i, each in enumerate(reward)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rows = [
        {"step": step, "env": "gsm8k", "samples": 2, "solved": each, "mean": sum(each) / 8, "mean_ci": [0.0, 1.0],
         "rollouts": [{"task": str(number), "prompt": "?"} for number in range(4)]}
        for step, each in ((0, [0, 0, 0, 0]), (2, solved))
    ]  # fmt: skip
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_listed_and_compared_task_by_task() -> None:
    written("a", [0, 1, 1, 2], [0.0, 0.5], 1e-6)
    written("b", [2, 2, 1, 1], [0.5, 1.0], 1e-5)
    lines = tandem("runs").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["a", "b"]
    assert "0 → 0.5" in lines[1]
    compared = tandem("compare", "runs/a", "runs/b")
    assert re.search(r"^optimizer.lr +1e-06 +1e-05$", compared, re.MULTILINE)
    assert "+0.250 [-0.383, +0.883] paired: 2 tasks better, 1 worse" in compared
    assert re.search(r"^reward +▁▅ 0.5 +▅█ 1$", compared, re.MULTILINE)  # on one scale
    with pytest.raises(Exception, match="there is no run in elsewhere"):
        tandem("runs", "elsewhere")


def trained(model: Path) -> Path:
    """A run of one step, with a checkpoint."""
    options: dict[str, Any] = {
        "model": str(model), "steps": 1, "env": "arithmetic", "groups_per_step": 1, "group_size": 2,
        "sampling": {"max_tokens": 4}, "zero_variance_groups": "keep", "evaluate": {"tasks": 0}, "loggers": [],
        "dtype": "float32", "threads": 1, "name": "a",
    }  # fmt: skip
    return asyncio.run(assemble.train(from_options(options, [], Path("recipe")).config, resume=None))


def test_a_run_says_that_prompts_are_computed_with_each_answer(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails = packing.Comparison(tree="fails", prefix="fails (no such layer)", plain=0.0, end=None)
    monkeypatch.setattr(packing, "compared", lambda config: fails)
    trained(tiny_model)
    assert "each answer is computed with its prompt again (packing: plain)" in caplog.text
    assert "by prefix fails (no such layer)" in caplog.text


@pytest.mark.slow
def test_a_trained_model_is_talked_to_and_served(tiny_model: Path) -> None:
    run = trained(tiny_model)
    text = tandem("chat", str(run), text="What is 1 + 1?\n\n")
    assert "before: " in text
    assert "after:  " in text

    async def request() -> Any:
        config = load(run / "config.yaml").config
        async with serving(config, weights_of(run, None), "127.0.0.1", 0) as url, aiohttp.ClientSession() as client:
            async with client.get(f"{url}/v1/models") as answer:
                models = await answer.json()
            body = {"model": "a", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3, "temperature": 0.5}
            async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                sampled = await answer.json()
            greedy = [{**body, "temperature": 0, "n": 4}, {**body, "top_k": 1, "n": 4}]
            texts = set()
            for options in greedy:  # what no run could train on is answered all the same
                async with client.post(f"{url}/v1/chat/completions", json=options) as answer:
                    texts |= {choice["message"]["content"] for choice in (await answer.json())["choices"]}
            return models, sampled, texts

    models, answer, texts = asyncio.run(request())
    assert len(texts) == 1
    assert models["data"][0]["id"] == "a"
    assert 1 <= answer["usage"]["completion_tokens"] <= 3
    assert answer["choices"][0]["message"]["role"] == "assistant"
