"""Two ranks, each with a vLLM engine that samples from that rank's own weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integration import vllm_runs as vllm
from kills_ranks import wide_model
from safetensors.torch import load_file
from support.processes import start
from support.tiers import long_but

from tandem.config.tree import render

pytestmark = [pytest.mark.slow, vllm.needs_engine]


LORA = {"kind": "lora", "rank": 8}
CUT: dict[str, Any] = {"distributed": {"shard": "weights"}}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"trainable": LORA},
    "merged": {"trainable": {**LORA, "merged": True}},
    "context": {"distributed": {"context_parallel": 2}},
    "full, cut": CUT,
    "lora, cut": {"trainable": LORA, **CUT},
    "merged, cut": {"trainable": {**LORA, "merged": True}, **CUT},
}


@pytest.mark.parametrize("kind", long_but(list(KINDS), "full", "full, cut"))
def test_two_pairs_train_publish_and_prove(tmp_path: Path, kind: str) -> None:
    """Every publish is proven on both engines, so each holds what its rank has; only whole weights are not copied."""
    model = wide_model(tmp_path, head_dim=vllm.HEAD_DIM)
    run = trained_run(tmp_path, model, "pairs", ranks=2, engine=vllm.engine(), **KINDS[kind])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    published = [event for event in events if event["event"] == "published"]
    assert [event["step"] for event in published] == [1, 2, 3]
    assert all((event["bytes"] == 0) == (kind != "lora" and "cut" not in kind) for event in published)
    assert all(event["probe_gap"] is not None for event in published)
    assert len({event["digest"] for event in published}) == 3, "every step moved the weights"
    assert len(list((run / "logs").glob("*engine*"))) >= 2


APART: dict[str, dict[str, Any]] = {
    "broadcast": {"sync": "broadcast"},
    "broadcast of cut weights": {"sync": "broadcast", **CUT},
    "broadcast of a merged adapter of cut weights": {"sync": "broadcast", "trainable": {**LORA, "merged": True}, **CUT},
    "broadcast of an adapter": {"sync": "broadcast", "trainable": LORA},
    "broadcast of a merged adapter": {"sync": "broadcast", "trainable": {**LORA, "merged": True}},
    "hotswap": {"sync": "hotswap", "trainable": LORA},
    "hotswap of cut weights": {"sync": "hotswap", "trainable": LORA, **CUT},
    "restart": {"sync": {"kind": "restart", "every": 1}},
    "restart of cut weights": {"sync": {"kind": "restart", "every": 1}, **CUT},
}


@pytest.mark.parametrize("way", long_but(list(APART), "broadcast of cut weights", "hotswap"))
def test_two_ranks_publish_to_an_engine_apart(tmp_path: Path, way: str) -> None:
    """One engine serves both ranks, and every publish is proven: it holds what they trained together."""
    run = trained_run(
        tmp_path, wide_model(tmp_path, head_dim=vllm.HEAD_DIM), "apart", ranks=2, engine=vllm.engine(), **APART[way]
    )
    published = vllm.published(run)
    assert list(published) == [1, 2, 3]
    assert all(event["bytes"] > 0 and event["probe_gap"] is not None for event in published.values())
    assert len({event["digest"] for event in published.values()}) == 3, "every step moved the weights"
    assert len(list((run / "logs").glob("engine-*.log"))) == 1


@pytest.mark.long
def test_two_engines_sample_while_two_ranks_train_up_to_two_steps_ahead(tmp_path: Path) -> None:
    """Weights reach answers that are being sampled, and each token is weighed by the version that it has."""
    options = {"ranks": 2, "max_lag": 2, "old_logprobs": "recomputed", "corrections": ["token"], "steps": 6}
    model, engines = wide_model(tmp_path, head_dim=vllm.HEAD_DIM), vllm.engine(replicas=2)
    options |= {"sync": "broadcast", "engine": engines, "sampling": {"max_tokens": 96}}
    run = trained_run(tmp_path, model, "ahead", **options)
    assert list(vllm.published(run)) == [1, 2, 3, 4, 5, 6]
    assert all(0 <= row["step"] - 1 - row["versions"][0] <= 2 for row in vllm.rollouts(run))
    assert any(len(row["stamps"]) > 1 for row in vllm.rollouts(run))
    vllm.groups_once(run, each=4)
    vllm.same_logprobs(run)


@pytest.mark.parametrize("ranks", long_but([{"ranks": 2}, {"ranks": 2, "distributed": {"shard": "weights"}}]))
def test_two_ranks_and_two_engines_train_what_one_rank_and_one_engine_train(
    tmp_path: Path, ranks: dict[str, Any]
) -> None:
    """Answers have random streams of their own, so that it is all the same which engine samples them."""
    model, trained = wide_model(tmp_path, head_dim=vllm.HEAD_DIM), []
    for name, options in {"one": {}, "two": {**ranks, "engine": vllm.engine(seeded=True, replicas=2)}}.items():
        engine = {"engine": vllm.engine(seeded=True)}
        # Where a gradient is all noise, its sign decides Adam's step: eps makes that step small.
        optimizer = {"kind": "adamw", "lr": 1e-3, "eps": 1e-3}
        run = trained_run(tmp_path, model, name, **{**engine, "sync": "broadcast", "optimizer": optimizer, **options})
        trained.append(vllm.weights(run, 3))
    before, (one, two) = load_file(model / "model.safetensors"), trained
    assert max(float((one[of] - before[of]).abs().max()) for of in before) > 1e-4
    for of, tensor in one.items():
        assert float((two[of] - tensor).abs().max()) < 3e-6, of


@pytest.mark.long
def test_a_run_goes_on_with_other_ranks_and_engines(tmp_path: Path) -> None:
    """An engine beside each rank, one apart from both, one rank and two engines apart, and three GPUs by number."""
    model, layouts = wide_model(tmp_path, head_dim=vllm.HEAD_DIM), [
        {"ranks": 2, "sync": "shared"},
        {"ranks": 2, "sync": "broadcast", "distributed": {"shard": "weights"}},
        {"ranks": 1, "distributed": {"shard": "states"}, "engine": vllm.engine(replicas=2)},
        {"ranks": None, "gpus": 3, "engine": vllm.engine()},
    ]  # fmt: skip
    for steps, layout in enumerate(layouts, 1):
        options = {"engine": vllm.engine(), **layout, "steps": steps}
        run = trained_run(tmp_path, model, "turns", **options, resume=steps > 1)
    assert list(vllm.published(run)) == [1, 2, 3, 4]
    assert (run / "logs/rank-1.log").exists()
    vllm.groups_once(run, each=4)


def trained_run(folder: Path, model: Path, name: str, *, resume: bool = False, **options: Any) -> Path:
    target, changes = folder / f"{name}.yaml", [f"{option}={json.dumps(value)}" for option, value in options.items()]
    if resume:
        target = folder / "runs" / name
    else:
        written = vllm.recipe(model, folder / "runs", name=name, **{"steps": 3, **options})
        target.write_text(render(written), encoding="utf-8")
    source = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = ["train", str(target), *(changes if resume else ())]
    with start(command, cwd=folder, out=subprocess.PIPE, environment=env) as process:
        output, _ = process.communicate(timeout=540)
    assert process.returncode == 0, output
    return folder / "runs" / name
