"""Weights cut among ranks against the whole model on one process: gradients, publishes, checksums, scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import cut_weights
from support.rank_processes import on_ranks
from torch import nn

from tandem.distributed import state_shards
from tandem.distributed.sharded_weights import ShardedWeights
from tandem.errors import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype", "most"), [
    ("qwen2-tied", (2,), "float32", 1e-6),
    ("qwen3-few-key-heads", (4,), "float32", 1e-6),
    ("llama-biases", (2, 2), "float32", 1e-6),  # replicas of shards
    ("llama-biases", (2,), "float64", 1e-13),
    ("qwen3-experts", (2,), "float32", 1e-6),  # three and two of each layer
    ("llama-unfolded", (2,), "float32", 1e-6),  # not a tree: as many passes on every rank, whatever its rows share
    ("qwen2-tied", (2,), "bfloat16", 1e-2),
])  # fmt: skip
def test_gradients_are_those_of_one_process(name: str, shape: tuple[int, ...], dtype: str, most: float) -> None:
    """Ranks have unequal rows, some none; each element's error is measured against the largest gradient."""
    world = torch.Size(shape).numel()
    for errors in on_ranks(world, cut_weights.gradient, name, shape, dtype):
        assert max(errors.values()) < most, errors


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype", "most"), [
    ("qwen2-tied", (2,), "float32", 1e-6),
    pytest.param("qwen3-thirds", (3,), "float32", 1e-6, marks=pytest.mark.long),
    pytest.param("llama-biases", (2,), "float64", 1e-12, marks=pytest.mark.long),
    ("qwen3-thirds", (3,), "float64", 1e-12),
    ("qwen2-tied", (2, 2), "float32", 1e-6),  # replicas of shards
    ("qwen2-tied", (2,), "bfloat16", 1e-2),
])  # fmt: skip
def test_local_sums_are_one_processs_gradient_and_are_reduced_once_a_pass(
    name: str, shape: tuple[int, ...], dtype: str, most: float
) -> None:
    """Ranks have unequal numbers of micro-batches; which is a rank's first or last one is a stand-in for some."""
    for report in on_ranks(torch.Size(shape).numel(), cut_weights.local_sums, name, shape, dtype):
        assert report["error"] < most
        assert report["dtypes"] == {torch.float64 if dtype == "float64" else torch.float32}
        assert report["reduced"] == (1, 1), "of each layer, and of what is outside of them"
        assert report["gathered"] == 1, "once a pass, as they are reduced"
        assert report["left_gathered"] == []
        assert report["scattered"] == 3, "once for each micro-batch"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "dtype", "most"), [
    pytest.param("qwen2-tied", 2, "float32", 1e-6, marks=pytest.mark.long),
    ("qwen3-thirds", 3, "float64", 1e-12),
    ("llama-biases", 2, "bfloat16", 1e-2),
])  # fmt: skip
def test_a_pass_with_local_sums_that_ends_early_is_forgotten_or_summed(
    name: str, world: int, dtype: str, most: float
) -> None:
    """Also where what is forgotten is no number."""
    for report in on_ranks(world, cut_weights.unfinished, name, dtype):
        assert report["reduced"] == [0, 0]
        assert report["left"] == []
        assert report["forgotten"] < most
        assert report["ended"] < most
        mine, expected = report["norms"]
        assert mine == pytest.approx(expected, rel=max(most, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "dtype"), [
    ("qwen2-tied", 2, "bfloat16"),
    ("qwen3-few-key-heads", 4, "bfloat16"),
    ("llama-biases", 2, "float32"),
])  # fmt: skip
def test_a_publish_leaves_what_the_engine_would_have_loaded(name: str, world: int, dtype: str) -> None:
    for report in on_ranks(world, cut_weights.publishing, name, dtype):
        assert report["wrong"] == []
        assert report["gathers"] == 1, "of all that some worker needs more of than its rank holds"
        assert report["checksums"]
        assert report["whole"]
        assert any("o_proj.weight" in of for of in report["stay"])
        assert any("gate_proj.weight" in of for of in report["stay"])


@pytest.mark.slow
def test_a_pass_without_backward_leaves_no_old_weights_behind() -> None:
    for report in on_ranks(2, cut_weights.scoring, "qwen2-tied"):
        assert report["after"] == pytest.approx(report["expected"], rel=1e-6)
        assert report["before"] != pytest.approx(report["expected"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype", "most", "local"), [
    ("qwen2-tied", (2,), "float32", 3e-7, False),
    pytest.param("qwen2-tied", (2,), "float32", 3e-7, True, marks=pytest.mark.long),
    ("qwen3-few-key-heads", (4,), "bfloat16", 2e-3, False),
    pytest.param("qwen3-few-key-heads", (2, 2), "float32", 3e-7, False, marks=pytest.mark.long),
    ("qwen2-tied", (2, 2), "bfloat16", 2e-3, True),  # replicas of shards
    ("qwen3-experts", (2,), "float32", 3e-7, False),
])  # fmt: skip
def test_steps_are_those_of_one_process_and_their_states_resume(
    name: str, shape: tuple[int, ...], dtype: str, most: float, local: bool
) -> None:
    """Ranks without a row take part in the others' passes; the lead's whole weights follow the masters."""
    for report in on_ranks(torch.Size(shape).numel(), cut_weights.stepping, name, shape, dtype, local):
        assert [mine for mine, _ in report["norms"]] == pytest.approx(
            [theirs for _, theirs in report["norms"]], rel=2e-3
        )
        assert report["lost"] < most
        assert report["far"] < max(most, 2**-8)
        assert report["keys"]
        assert report["again"] == []
        assert report["restored"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype"), [
    ("qwen2-tied", (2,), "float32"),
    ("qwen3-few-key-heads", (4,), "bfloat16"),
    pytest.param("qwen3-experts", (2,), "float32", marks=pytest.mark.long),
])  # fmt: skip
def test_moments_of_bytes_are_adamws_nearly_and_resume_to_the_bit(
    name: str, shape: tuple[int, ...], dtype: str
) -> None:
    """What they write has AdamW's names and shapes, so that other ranks can have it."""
    for report in on_ranks(torch.Size(shape).numel(), cut_weights.stepping, name, shape, dtype, False, None, True):
        assert [mine for mine, _ in report["norms"]] == pytest.approx(
            [theirs for _, theirs in report["norms"]], rel=2e-2
        )
        assert 0 < report["lost"] < 3e-3, "of three steps of 1e-2"
        assert report["keys"]
        assert report["again"] == []
        assert report["restored"]


@pytest.mark.slow
def test_replicas_share_the_writing_of_states_and_the_sum_of_a_norm(tmp_path: Path) -> None:
    """What the four of them wrote is whole, each element once, and is read by any other number of ranks."""
    ranks = on_ranks(4, cut_weights.stepping, "qwen2-tied", (2, 2), "bfloat16", False, tmp_path)
    assert [report["norm"] for report in ranks] == [5**0.5] * 4, "of the first replica's ranks, 1 and 2"
    states = ranks[0]["states"]
    written = [load_file(file) for file in tmp_path.iterdir()]
    assert sum(tensor.numel() for of in written for tensor in of.values()) == sum(
        state.numel() for state in states.values()
    )
    by_rank = {int(file.name.split("-")[1]) for file in tmp_path.iterdir()}
    assert len(by_rank) == 4
    empty = {key: torch.zeros_like(state) for key, state in states.items()}
    state_shards.read(tmp_path, state_shards.whole_shares(empty))
    assert [key for key, state in states.items() if not torch.equal(empty[key], state)] == []


def test_a_model_without_known_layers_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="does not know the layers of Linear"):
        ShardedWeights(nn.Linear(2, 2), None, lambda _: {})  # type: ignore[arg-type]
