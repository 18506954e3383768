"""Every way that weights travel to a real vLLM: proven at each publish, resumed, and right in what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import (
    CUDA,
    HEAD_DIM,
    KL,
    alive,
    engine,
    groups_once,
    lines,
    metrics,
    needs_engine,
    published,
    recipe,
    rollouts,
    same_logprobs,
)
from support.tiers import long_but
from transformers import AutoModelForCausalLM

from tandem.cli.app import main
from tandem.config import loading as config
from tandem.trainer import assemble as run
from tandem.transport.checksums import checksums, digest

FULL = {"kind": "full"}
LORA = {"kind": "lora", "rank": 8, "alpha": 16}
MERGED = {**LORA, "merged": True}
LEARNING = {
    "steps": 12,
    "rewards": {"number": 1.0, "learns.shaping:near": 1.0},
    "group_size": 16,
    "sampling": {"max_tokens": 2},
}
"""From about 0.04 by chance; a policy that has found the digits gets 0.4, and 0.7 before these steps are over."""
QUICK = {"trainable": {"kind": "lora", "rank": 16, "alpha": 64}, "optimizer": {"kind": "adamw", "lr": 5e-3}}

APART: dict[str, Any] = {} if CUDA else {"args": {}}
"""The worker has a process of its own, as it has by default."""
WAYS: dict[str, dict[str, Any]] = {
    "shared-full": {"trainable": FULL, "sync": "shared"},
    "shared-full-learning": {"trainable": FULL, "sync": "shared", **LEARNING},
    "shared-lora": {"trainable": LORA, "sync": "shared", "max_lag": 1},
    "shared-merged": {"trainable": MERGED, "sync": "shared"},
    "shared-lora-apart": {"trainable": LORA, "sync": "shared", "engine": APART},
    "shared-full-two": {"trainable": FULL, "sync": "shared", "engine": {"replicas": 2}, "max_lag": 1},
    "shared-lora-two": {"trainable": LORA, "sync": "shared", "engine": {"replicas": 2}},
    "broadcast-full": {"trainable": FULL, "sync": "broadcast", "max_lag": 1},
    "broadcast-full-learning": {"trainable": FULL, "sync": "broadcast", "max_lag": 1, **LEARNING},
    "broadcast-lora": {"trainable": LORA, "sync": "broadcast"},
    "broadcast-merged": {"trainable": MERGED, "sync": "broadcast"},
    "broadcast-full-tp2": {"trainable": FULL, "sync": "broadcast", "steps": 2, "engine": {"tensor_parallel_size": 2}},
    "broadcast-full-asleep": {"trainable": FULL, "sync": "broadcast", "engine": {"sleep": 2}},
    "broadcast-lora-asleep": {"trainable": LORA, "sync": "broadcast", "engine": {"sleep": 1}},
    "hotswap-lora": {"sync": "hotswap", "max_lag": 1, "trainable": LORA},
    "hotswap-lora-learning": {"sync": "hotswap", "max_lag": 1, **LEARNING, **QUICK},
    # Each restart takes as long as a start does, so these have fewer steps.
    "restart-full": {"trainable": FULL, "sync": {"kind": "restart", "every": 2}, "max_lag": 1, "steps": 2},
    "restart-lora": {"trainable": LORA, "sync": {"kind": "restart", "every": 2}, "max_lag": 1, "steps": 2},
}
SMOKES = ("shared-full",)
"""Weights through every border between trainer, server and worker; the others are long.

An adapter is the one that ``test_vllm_http`` swaps, a broadcast that between two hosts (``test_two_hosts``)."""
RESUMED_ELSEWHERE = frozenset(
    {
        "broadcast-full",
        "hotswap-lora",
        "shared-lora",
        "shared-lora-apart",
        "broadcast-merged",
        "broadcast-full-tp2",
        "broadcast-lora-asleep",
        "restart-lora",
    }
)
"""A resume starts an engine again, and nothing in theirs is new: checkpoints are resumed by what is trained, memory is
shared anew in shared-full and -merged, a group is formed anew in broadcast-full-learning and -lora, and an engine is
started on what was saved in restart-full."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for vLLM's attention."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=HEAD_DIM)


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("way", long_but(WAYS, *SMOKES))
def test_way_trains_proves_resumes_and_saves(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    options = recipe(model, tmp_path, **placed(way))
    before = orphans()
    folder = asyncio.run(run.train(config.from_options(options, [], Path(way)).config, resume=None))
    last = first = int(options["steps"])
    checked(folder, options, steps=first)
    if way not in RESUMED_ELSEWHERE:
        last = first + 1
        tandem("train", folder, f"steps={last}")
        checked(folder, options, steps=last, resumed=first)
    saved_weights(model, folder, last, options)
    if "rewards" in WAYS[way]:
        rises(folder)
    if way == "shared-full-learning":
        evaluated(model, folder, capsys)
    assert not (folder / "engine-0.json").exists()
    assert orphans() <= before, "the engine left memory behind"


def placed(way: str) -> dict[str, Any]:
    """What is asked for, on the cards of this machine: the engine of a broadcast has its own where there are enough."""
    options = WAYS[way]
    changes = dict(options.get("engine", {}))
    size = changes.get("tensor_parallel_size", 1)
    if changes.get("sleep") and not CUDA:
        pytest.skip("vLLM on a CPU has no sleep mode, and there is no CUDA here")
    if size > 1 and not CUDA:
        changes["args"] = {}  # its workers are processes of their own
    if CUDA and options["sync"] == "broadcast":
        cards = torch.cuda.device_count()
        if cards < size:
            pytest.skip(f"{way} needs an engine over {size} CUDA cards, and this machine has {cards}")
        # The trainer is on the first; NCCL refuses two members on one card, and who sleeps does so for a card's sake.
        apart = cards > size and not changes.get("sleep")
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cards)))).split(",")
        changes["devices"] = [",".join(names[apart : apart + size])]
        options = {**options, "sync": {"kind": "broadcast", "backend": "nccl" if apart else "gloo"}}
    return {**options, "engine": engine(**changes)}


def tandem(*arguments: object) -> None:
    """A command that must end well."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code in (0, None)


def rises(folder: Path) -> None:
    """Reward, from what the model gets as it was loaded."""
    # Off policy a step may pass in which no group is finished, and then another with several.
    rewards = [step["reward"] for step in metrics(folder).values() if "reward" in step]
    first, last = sum(rewards[:2]) / 2, sum(rewards[-5:]) / 5
    assert last > first + 0.15
    assert last > 2 * first


def evaluated(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation is answered by an engine of its own, on the weights of the run's checkpoint."""
    env = "env={kind: arithmetic, max_number: 4, prompt: '{expression}=', test_share: 0.9}"
    evaluation = (env, "rewards={learns.shaping:digit: 1.0}", "evaluate={tasks: 14, samples: 16}")

    def share(*arguments: object) -> float:
        capsys.readouterr()
        tandem("eval", *arguments, *evaluation)
        return float(capsys.readouterr().out.partition("mean@16")[2].split()[0])

    untrained = share(model, "sampling.max_tokens=2", "engine=embedded")
    here = share(folder, "engine=embedded", "sync=shared")
    there = share(folder)
    assert untrained < 0.3
    assert here > 0.6
    assert abs(there - here) < 0.1


def orphans() -> set[Path]:
    """What engines that are gone still lend on a CPU."""
    exported = Path("/dev/shm").glob("tandem-weights-*")
    return {path for path in exported if not alive(int(path.name.rpartition("-")[2]))}


def checked(folder: Path, options: dict[str, Any], *, steps: int, resumed: int = 0) -> None:
    """Every publish was proven, and every token was sampled by weights that were published before its step."""
    every = options["sync"].get("every", 1) if isinstance(options["sync"], dict) else 1
    due = {step for step in range(1, steps + 1) if step % every == 0 or step in (steps, resumed)}
    publishes, measured = published(folder), metrics(folder)
    assert set(publishes) == due
    assert set(measured) == set(range(1, steps + 1))
    for step, event in publishes.items():
        assert event["probe_gap"] is not None
        assert measured[step]["probe_gap"] == event["probe_gap"]
    assert len({event["digest"] for event in publishes.values()}) == len(publishes), "a publish changed nothing"

    lag = options.get("max_lag", 0)
    for row in rollouts(folder):
        oldest, newest = row["versions"]
        assert row["step"] - 1 - lag <= oldest <= newest <= row["step"] - 1
        assert {oldest, newest} <= {0, *publishes}, "sampled by weights that were never published"
    if not lag:
        assert all(step["kl_behavior"] < KL for step in measured.values())
    # In the first steps of those that learn it may be that nobody hits anything, as one in twenty-five does.
    moved = {row["step"] for row in rollouts(folder) if row["advantage"]}
    assert len(moved) >= steps - 1
    assert all(measured[step]["grad_norm"] > 0 for step in moved)
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
    if options["trainable"]["kind"] == "full":
        after = AutoModelForCausalLM.from_pretrained(path / "model", dtype=dtype)
        trainable = config.from_options(options, [], Path("again")).config.trainable
        assert digest(checksums(trainable.source(after))) == served
    else:
        from peft import PeftModel

        with warnings.catch_warnings():
            # PEFT asks transformers for a property by a name that transformers has since deprecated.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            after = PeftModel.from_pretrained(base, path / "adapter").merge_and_unload()
    assert any(not torch.equal(value, before[name]) for name, value in after.state_dict().items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hotswap carries no weights": ({"trainable": FULL, "sync": "hotswap"}, "shared, broadcast or restart"),
    "hotswap carries no merged weights": ({"trainable": MERGED, "sync": "hotswap"}, "shared, broadcast or restart"),
    "a share of a slice": (
        {"trainable": FULL, "sync": "shared", "engine": {"kind": "vllm", "tensor_parallel_size": 2}},
        "use sync: broadcast, or ranks: 2",
    ),
    "somebody else's engine is not restarted": (
        {
            "trainable": FULL,
            "sync": "restart",
            "max_lag": 2,
            "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:9"]},
        },
        "use hotswap or broadcast",
    ),
    "an engine in process receives nothing": (
        {"trainable": FULL, "sync": "broadcast", "engine": "embedded"},
        "engine: embedded goes with sync: shared",
    ),
    "older than max_lag": (
        {"trainable": FULL, "sync": {"kind": "restart", "every": 3}, "max_lag": 1},
        "set max_lag to 2",
    ),
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
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1, stderr
    assert way_out in stderr
    assert not (tmp_path / "runs").exists()
