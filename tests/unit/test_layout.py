"""Who trains and who samples on so many GPUs, what ``tandem check`` draws of it, and that all refuse alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny_model
from transformers import LlamaConfig

from tandem.cli.check import check
from tandem.cli.train import shown
from tandem.config.loading import RunConfig, dump, load
from tandem.errors import ConfigError, DoesNotFit, TandemError
from tandem.model.policy import load_config
from tandem.trainer import assemble, memory_plan
from tandem.trainer.ranks import layout

SHAPES = {"3B": (8192, 3, 64, 28672), "7B": (8192, 8, 64, 28672), "70B": (16384, 20, 128, 57344)}
"""Width, layers, heads and width of the middle layer."""
APART = ("sync=broadcast", "engine=vllm")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for name, (width, layers, heads, middle) in SHAPES.items():
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        LlamaConfig(**sizes, num_key_value_heads=8, intermediate_size=middle).save_pretrained(tmp_path / name)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {tmp_path}/7B\nsteps: 3\nenv: arithmetic\ncheckpointing: full\ncontext: 2048\n")
    return path


def cards(monkeypatch: pytest.MonkeyPatch, number: int, total: float = 80e9) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(total), int(total)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")


def on(recipe: Path, model: str, *options: str) -> tuple[Any, ...]:
    """Ranks, what they share, engines, their workers and GPUs."""
    placed: Any = layout.placed(load(recipe, [f"model={recipe.parent / model}", *options]).config)
    engine = placed.engine
    return (placed.ranks, placed.distributed.shard, engine.replicas, engine.tensor_parallel_size, engine.devices)


def test_gpus_are_divided_by_the_sync_and_the_memory_plan(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 8)
    assert on(recipe, "7B", "gpus=4", *APART) == (2, "states", 2, 1, ("2", "3"))
    assert on(recipe, "7B", "gpus=8", *APART) == (4, "states", 4, 1, ("4", "5", "6", "7"))
    assert on(recipe, "7B", "gpus=2", "trainable=lora", "sync=hotswap", "engine=vllm") == (1, "states", 1, 1, ("1",))
    assert on(recipe, "7B", "gpus=4", "engine=vllm") == (4, "states", 1, 1, ()), "an engine beside each rank"
    assert on(recipe, "7B", "gpus=4", *APART[:1], "engine={kind: vllm, urls: ['http://h:1']}")[0] == 4
    assert on(recipe, "7B", "gpus=4", "engine=vllm", "distributed.shard=weights") == (4, "weights", 1, 2, ())
    cards(monkeypatch, 8, 200e9)
    assert on(recipe, "70B", "gpus=4", "trainable=lora", *APART) == (2, "states", 1, 2, ("2,3",))


def test_what_does_not_fit_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 2)
    with pytest.raises(DoesNotFit, match="needs more memory than is free"):
        on(recipe, "7B", "gpus=2", *APART)
    with pytest.raises(ConfigError, match="gpus: 4, but this machine has 2"):
        on(recipe, "7B", "gpus=4")
    with pytest.raises(ConfigError, match=r"at least 1, without ranks, engine\.replicas and engine\.devices"):
        on(recipe, "7B", "gpus=2", "ranks=2")
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="gpus: 2, but environment has started the ranks; leave gpus out"):
        on(recipe, "7B", "gpus=2")


def test_a_run_keeps_the_number_and_may_go_on_with_another(recipe: Path) -> None:
    config = load(recipe, ["gpus=2", *APART]).config
    assert "gpus: 2" in dump(config)
    placed = layout.placed(load(recipe, [f"model={build_tiny_model(recipe.parent / 'tiny')}", "gpus=3", *APART]).config)
    assert (placed.gpus, placed.ranks, placed.engine.replicas) == (None, 2, 1)  # type: ignore[attr-defined]
    assert layout.described(placed) == "gpus: 2 ranks, distributed.shard: states; engines: 1 × 1 GPU"
    (recipe.parent / "again.yaml").write_text(dump(placed))
    assert load(recipe.parent / "again.yaml").config.ranks == 2, "as followers are told it"


def rows(config: RunConfig) -> list[str]:
    model = load_config(config.model)
    return layout.drawn(memory_plan.Planner(config, model), config).splitlines()


def test_a_layout_is_drawn_gpu_by_gpu(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 4)
    model = f"model={recipe.parent}/3B"
    apart = rows(layout.placed(load(recipe, [model, "gpus=4", *APART]).config))
    assert [row.partition(":")[0].strip() for row in apart] == [
        "GPU 0, 1  rank 0, rank 1",
        "GPU 2, 3  engine 0, engine 1",
    ]
    assert all(part in apart[0] for part in ("optimizer ", "weights ", "activations ", " of 80.0 GB"))
    assert "engine" not in apart[0].partition(":")[2]
    assert "keys and values 6" in apart[1]
    assert "= 72.0 of 80.0 GB" in apart[1], "what engines of their own fill"
    (beside,) = rows(load(recipe, [model, "ranks=2", "engine=vllm"]).config)
    assert "GPU 0, 1  rank 0 and engine 0, rank 1 and engine 1: " in beside
    assert all(part in beside for part in ("keys and values ", "optimizer ", "weights "))
    cut = rows(
        load(
            recipe, [model, "ranks=4", "distributed.shard=weights", "engine={kind: vllm, tensor_parallel_size: 2}"]
        ).config
    )
    assert "rank 0 and engine 0, rank 1 and engine 0, rank 2 and engine 1, rank 3 and engine 1" in cut[0]


REFUSED = (
    ("ranks=2", "engine={kind: vllm, urls: ['http://h:1']}"),
    ("ranks=3", "engine={kind: vllm, tensor_parallel_size: 2}", "distributed.shard=weights"),
    ("ranks=2", "sync=broadcast", "engine={kind: vllm, urls: ['http://h:1']}", "optimizer=adafactor"),
    ("ranks=3", "distributed.context_parallel=2"),
    ("ranks=2", "distributed.shard=weights", "reference={kind: average, every: 1}"),
    ("sync=hotswap", "trainable={kind: lora, rank: 999}", "engine={kind: vllm, urls: ['http://h:1']}"),
    ("distributed.shard=weights",),
    ("gpus=3", "distributed.context_parallel=2"),
    ("sync=broadcast",),
)


@pytest.mark.parametrize("options", REFUSED)
def test_show_check_and_a_run_refuse_alike(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {build_tiny_model(tmp_path / 'tiny')}\nsteps: 3\nenv: arithmetic\nruns: {tmp_path}/runs\n")
    loaded = load(path, options)
    with pytest.raises(TandemError) as by_show:
        shown(loaded, ())
    with pytest.raises(TandemError) as by_run:
        asyncio.run(assemble.train(loaded.config, resume=None))
    assert str(by_run.value) == str(by_show.value)
    try:
        assert check(loaded.config, 1) == by_show.value.exit_code
        output = capsys.readouterr().out
    except TandemError as error:
        output = str(error)
    assert " ".join(str(by_show.value).split())[:60] in " ".join(output.split())
