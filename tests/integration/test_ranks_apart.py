"""Two ranks train while two engines apart sample: no token is older than allowed, and each has its version."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from integration.vllm_runs import lines, rollouts
from kills_engine import weight_sum
from kills_ranks import Ranks, wide_model
from safetensors.torch import load_file
from support.tiers import long_but

pytestmark = pytest.mark.slow

# By a larger rate the policy may come to know one answer only: groups that are dropped then fill the engines.
KEPT = {
    "checkpoint": {"every": 1, "keep": 100}, "sampling": {"max_tokens": 40}, "optimizer": {"kind": "adamw", "lr": 2e-3},
}  # fmt: skip
CORRECTED = {"max_lag": 2, "old_logprobs": "recomputed", "corrections": ["token"]}
RUNS: dict[str, dict[str, Any]] = {
    "one step": {"max_lag": 1},
    "two steps": CORRECTED,
    "two steps and replay": {**CORRECTED, "replay": {"size": 8, "max_age": 5}},
    "two steps of cut weights": {"max_lag": 2, "distributed": {"shard": "weights"}},
}


@pytest.mark.parametrize("name", long_but(RUNS, "two steps"))
def test_every_token_is_of_the_version_that_its_engine_had(tmp_path: Path, name: str) -> None:
    """What engines sampled from is known by the weights that they had in memory at each token."""
    options, steps = RUNS[name], 10
    witness = tmp_path / "sampled.jsonl"
    run = Ranks(
        tmp_path / "run", options["max_lag"], steps, wide_model(tmp_path), changes={**KEPT, **options}, sampled=witness
    )
    try:
        run.trained(to=steps)
    finally:
        run.stop()
    saved = {int(path.parents[1].name): path for path in run.folder.glob("checkpoints/*/model/*.safetensors")}
    norms = {0: load_file(run.model / "model.safetensors"), **{step: load_file(path) for step, path in saved.items()}}
    versions = {weight_sum(tensors["model.norm.weight"]): step for step, tensors in norms.items()}
    assert len(versions) == steps + 1, "every step moved the weights"
    had: dict[tuple[int, ...], list[list[int]]] = {}
    for _, tokens, sums in lines(witness):
        had.setdefault(tuple(tokens), []).append([versions[each] for each in sums])
    seen, oldest = set[int](), options.get("replay", {}).get("max_age", options["max_lag"])
    for row in rollouts(run.folder):
        stamped = list(chain.from_iterable([version] * count for version, count in row["stamps"]))
        assert stamped in had[tuple(token["id"] for token in row["tokens"])]
        assert 0 <= row["step"] - 1 - min(stamped) <= oldest
        seen.add(len(row["stamps"]))
    assert max(seen) > 1, "weights reach engines while they sample"
    if "replay" not in options:
        assert run.account().fine
