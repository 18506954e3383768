"""Every way that weights travel to a real vLLM: proven at each publish, resumed, and right in what it leaves behind."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import (
    KL,
    groups_once,
    lines,
    metrics,
    needs_engine,
    published,
    recipe,
    rollouts,
    same_logprobs,
)
from transformers import AutoModelForCausalLM

from tandem import config, run
from tandem.cli import main
from tandem.weights.checksums import checksums, digest

FULL = {"kind": "full"}
LORA = {"kind": "lora", "rank": 8, "alpha": 16}
MERGED = {**LORA, "merged": True}

WAYS: dict[str, dict[str, Any]] = {
    "shared-full": {"trains": FULL, "sync": "shared"},
    "shared-lora": {"trains": LORA, "sync": "shared", "max_lag": 1},
    "shared-merged": {"trains": MERGED, "sync": "shared"},
    "broadcast-full": {"trains": FULL, "sync": "broadcast", "max_lag": 1},
    "broadcast-lora": {"trains": LORA, "sync": "broadcast"},
    "broadcast-merged": {"trains": MERGED, "sync": "broadcast"},
    "hotswap-lora": {"trains": LORA, "sync": "hotswap", "max_lag": 1},
    # Each restart takes as long as a start does, so these have fewer steps.
    "restart-full": {"trains": FULL, "sync": {"kind": "restart", "every": 2}, "max_lag": 1, "steps": 2},
    "restart-lora": {"trains": LORA, "sync": {"kind": "restart", "every": 2}, "max_lag": 1, "steps": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for vLLM's attention."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_way_trains_proves_resumes_and_saves(model: Path, tmp_path: Path, way: str) -> None:
    asked = WAYS[way]
    options = recipe(model, tmp_path, **asked)
    lent = shared_memory()
    folder = asyncio.run(run.train(config.from_options(options, [], Path(way)).config, resume=None))
    first = int(options["steps"])
    checked(folder, options, steps=first)

    last = 3 if first == 2 else 5
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder), f"steps={last}"])
    assert ended.value.code in (0, None)
    checked(folder, options, steps=last, resumed=first)
    saved_weights(model, folder, last, options)
    assert not (folder / "engine-0.json").exists()
    assert shared_memory() == lent, "the engine left memory behind"


def shared_memory() -> set[Path]:
    """What engines have lent on a CPU."""
    return set(Path("/dev/shm").glob("tandem-weights-*"))


def checked(folder: Path, options: dict[str, Any], *, steps: int, resumed: int = 0) -> None:
    """Every publish was proven, and every token was sampled by weights that were published before its step."""
    every = options["sync"].get("every", 1) if isinstance(options["sync"], dict) else 1
    due = {step for step in range(1, steps + 1) if step % every == 0 or step in (steps, resumed)}
    found, told = published(folder), metrics(folder)
    assert set(found) == due
    assert set(told) == set(range(1, steps + 1))
    for step, event in found.items():
        assert event["probe_gap"] is not None
        assert told[step]["probe_gap"] == event["probe_gap"]
    assert len({event["digest"] for event in found.values()}) == len(found), "a publish changed nothing"

    lag = options.get("max_lag", 0)
    for row in rollouts(folder):
        oldest, newest = row["versions"]
        assert row["step"] - 1 - lag <= oldest <= newest <= row["step"] - 1
        assert {oldest, newest} <= {0, *found}, "sampled by weights that were never published"
    if not lag:
        assert all(step["kl_behavior"] < KL for step in told.values())
    assert all(step["grad_norm"] > 0 for step in told.values())
    same_logprobs(folder)
    groups_once(folder, each=options["groups_per_step"])


def saved_weights(model: Path, folder: Path, step: int, options: dict[str, Any]) -> None:
    """The last checkpoint loads with the libraries that people have, and holds the bytes that were published."""
    path = folder / "checkpoints" / f"{step:06d}"
    (state,) = lines(path / "state.json")
    served = published(folder)[step]["digest"]
    assert state["version"] == {"step": step, "digest": served}
    dtype = getattr(torch, options["dtype"])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    if options["trains"]["kind"] == "full":
        after = AutoModelForCausalLM.from_pretrained(path / "model", dtype=dtype)
        trains = config.from_options(options, [], Path("again")).config.trains
        assert digest(checksums(trains.source(after))) == served
    else:
        from peft import PeftModel

        with warnings.catch_warnings():
            # PEFT asks transformers for a property by a name that transformers has since deprecated.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            after = PeftModel.from_pretrained(base, path / "adapter").merge_and_unload()
    assert any(not torch.equal(value, before[name]) for name, value in after.state_dict().items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hotswap carries no weights": ({"trains": FULL, "sync": "hotswap"}, "shared, broadcast or restart"),
    "hotswap carries no merged weights": ({"trains": MERGED, "sync": "hotswap"}, "shared, broadcast or restart"),
    "a share of a slice": (
        {"trains": FULL, "sync": "shared", "engine": {"kind": "vllm", "tensor_parallel_size": 2}},
        "sync: broadcast feeds such an engine",
    ),
    "two engines share nothing": (
        {"trains": FULL, "sync": "shared", "engine": {"kind": "vllm", "replicas": 2}},
        "use sync: broadcast",
    ),
    "somebody else's engine is not restarted": (
        {
            "trains": FULL,
            "sync": "restart",
            "max_lag": 2,
            "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:9"]},
        },
        "use hotswap or broadcast",
    ),
    "an engine in process receives nothing": (
        {"trains": FULL, "sync": "broadcast", "engine": "embedded"},
        "engine: embedded goes with sync: shared",
    ),
    "older than max_lag": ({"trains": FULL, "sync": {"kind": "restart", "every": 3}, "max_lag": 1}, "set max_lag to 2"),
}


@pytest.mark.parametrize("pair", REFUSED)
def test_pair_that_cannot_work_is_refused_before_anything_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], pair: str
) -> None:
    changes, way_out = REFUSED[pair]
    # The model is not there, so loading anything of it would end otherwise.
    options = recipe(tmp_path / "no-such-model", tmp_path / "runs", **{"engine": {"kind": "vllm"}, **changes})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(options))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "recipe.yaml")])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1, said
    assert way_out in said
    assert not (tmp_path / "runs").exists()
