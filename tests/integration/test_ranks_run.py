"""Whole runs of several ranks on a CPU train what one rank trains, however they divide the work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.processes import start
from support.tiers import long_but

RECIPE: dict[str, Any] = {
    "steps": 3,
    "env": {"kind": "arithmetic", "max_number": 12},
    "rewards": {"marks:odd": 1.0},
    "groups_per_step": 3,
    "group_size": 3,
    "micro_batch_tokens": 64,
    "dtype": "float32",
    "sampling": {"max_tokens": 12},
    # Where a gradient is all noise, its sign decides Adam's step: eps makes that step small.
    "optimizer": {"lr": 1.0e-3, "eps": 1.0e-3},
    "loggers": [],
    "threads": 1,
    "seed": 3,
}
REWARD = """
def odd(completions, **columns):
    return [float(sum(messages[-1]["content"].encode()) % 2) for messages in completions]
"""
Train = Callable[..., Path]
CLOSE = 3e-6


@pytest.fixture(scope="module")
def train(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "marks.py").write_text(REWARD)

    def run(name: str, *overrides: str, resume: bool = False) -> Path:
        recipe = folder / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({**RECIPE, "model": str(tiny_model), "runs": str(folder), "name": name}))
        what = folder / name if resume else recipe
        with start(["train", str(what), *overrides], cwd=folder, out=subprocess.PIPE) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return folder / name

    return run


@pytest.fixture(scope="module")
def alone(train: Train, tiny_model: Path) -> dict[str, torch.Tensor]:
    """Weights that one rank trains, each of which has moved by far more than what ranks may differ by."""
    trained, before = weights(train("alone")), load_file(tiny_model / "model.safetensors")
    moved = {of: float((tensor - before[of]).abs().max()) for of, tensor in trained.items()}
    assert min(moved.values()) > 30 * CLOSE, moved
    return trained


def weights(run: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"{step:06d}" / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    pytest.param("weights", ["ranks=2", "distributed={shard: weights, gradients: local}"], marks=pytest.mark.long),
    pytest.param("context", ["ranks=2", "distributed.context_parallel=2"], marks=pytest.mark.long),
    ("both", ["ranks=2", "distributed={shard: weights, gradients: local, context_parallel: 2}"]),
])  # fmt: skip
def test_ranks_train_what_one_rank_trains(
    train: Train, alone: dict[str, torch.Tensor], name: str, options: list[str]
) -> None:
    ranks = weights(train(name, *options))
    assert ranks.keys() == alone.keys()
    for of, tensor in alone.items():
        assert float((ranks[of] - tensor).abs().max()) < CLOSE, of


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["states", "weights"])
@pytest.mark.parametrize("merged", long_but([False, True], False))
def test_ranks_train_an_adapter_as_one_rank_does(train: Train, merged: bool, shard: str) -> None:
    """A merged one's weights follow its factors on every rank, or the second step begins with those of the first."""
    adapter = f"trainable={{kind: lora, rank: 4, merged: {str(merged).lower()}}}"
    options = [adapter, "optimizer.lr=0.01", "steps=4"]
    one = train(f"adapter-1-{merged}-{shard}", *options)
    two = train(f"adapter-2-{merged}-{shard}", "ranks=2", f"distributed.shard={shard}", *options)
    kept, ranks = (load_file(run / "checkpoints/000004/adapter/adapter_model.safetensors") for run in (one, two))
    assert kept.keys() == ranks.keys()
    assert max(float(tensor.abs().max()) for of, tensor in kept.items() if "lora_B" in of) > 1e-3
    for of, tensor in kept.items():
        assert float((ranks[of] - tensor).abs().max()) < 10 * CLOSE, of


REFERENCE = ["optimizer.lr=0.01", "groups_per_step=1", "micro_batch_tokens=24", "zero_variance_groups=keep"]
"""Three micro-batches, so that a rank has none where another has one."""
REFERENCES = {
    "full": ["reference={kind: start, beta: 0.5}", "updates_per_batch=2"],
    "local sums": ["reference={kind: start, beta: 0.5}", "distributed.gradients=local"],
    "in the reward": ["reference={kind: start, beta: 0.5, in_reward: true}"],
    "adapter": ["reference={kind: start, beta: 0.5}", "trainable={kind: lora, rank: 4}"],
    "merged": ["reference={kind: start, beta: 0.5}", "trainable={kind: lora, rank: 4, merged: true}"],
    "moving adapter": ["reference={kind: average, beta: 0.5, every: 1}", "trainable={kind: lora, rank: 4}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", long_but(REFERENCES, "full"))
def test_ranks_with_cut_weights_are_kept_near_the_reference_that_one_rank_has(train: Train, what: str) -> None:
    """The model as it was loaded, also where a run goes on; without it weights would be elsewhere."""
    cut, name = ["ranks=2", "distributed.shard=weights"], what.replace(" ", "-")
    alone = [option for option in REFERENCES[what] if not option.startswith("distributed")]
    one = train(f"{name}-1", *REFERENCE, *alone)
    none = train(f"{name}-0", *REFERENCE, *alone[1:], "reference=null")
    train(f"{name}-2", *REFERENCE, *REFERENCES[what], *cut, "steps=2")
    ranks = train(f"{name}-2", "steps=3", resume=True)
    want, far, have = (
        load_file(next((run / "checkpoints/000003").glob("[am]*/*.safetensors"))) for run in (one, none, ranks)
    )
    assert max(float((far[of] - tensor).abs().max()) for of, tensor in want.items()) > 300 * CLOSE
    for of, tensor in want.items():
        assert float((have[of] - tensor).abs().max()) < 10 * CLOSE, of


@pytest.mark.slow
def test_a_run_goes_on_with_its_weights_divided_otherwise(train: Train, alone: dict[str, torch.Tensor]) -> None:
    train("turns", "ranks=2", "distributed={shard: weights, gradients: scattered}", "steps=1")
    train("turns", "ranks=1", "distributed={shard: states}", "steps=2", resume=True)
    run = train("turns", "ranks=2", "distributed={shard: weights, gradients: local}", "steps=3", resume=True)
    for of, tensor in weights(run).items():
        assert float((tensor - alone[of]).abs().max()) < CLOSE, of
