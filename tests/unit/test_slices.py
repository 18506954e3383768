"""Slices: how the trainer cuts tensors, against where the engine's workers have them."""

from __future__ import annotations

import pytest
import torch
from support.vllm_workers import Worker, mapped, served, trained

from tandem.distributed import slice_writer
from tandem.distributed.slices import EngineSlice, Slice, shard_dimension, shard_slice
from tandem.errors import ConfigError


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 12), (3, 12), (10,), (2,), (5, 4, 3)])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_shards_hold_every_element_once_and_are_torchs_own(name: str, shape: tuple[int, ...], ranks: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    dimension = shard_dimension(name, shape, ranks)
    parts = [shard_slice(name, shape, rank, ranks).of(tensor) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts, dimension), tensor)
    chunks = tensor.chunk(ranks, dimension)
    assert [part.tolist() for part in parts if part.numel()] == [chunk.tolist() for chunk in chunks]


@pytest.mark.parametrize(("keys", "vocabulary", "travels"), [
    (4, 256, {"norm"}),
    (2, 256, {"norm", "k_proj", "v_proj"}),  # two workers hold each key head
    (4, 259, {"norm", "embed_tokens", "lm_head"}),  # padded to 320: workers have 80 rows, ranks 65
])  # fmt: skip
def test_shards_are_the_slices_of_the_worker_beside(keys: int, vocabulary: int, travels: set[str]) -> None:
    """All else is within the rank's own shard, on every rank."""
    model = trained("Qwen3", keys=keys, vocabulary=vocabulary)
    elsewhere: set[str] = set()
    for rank in range(4):
        for name, parts in mapped(served(model, Worker(rank, 4)), model, world=4).items():
            own = shard_slice(name, tuple(model.get_parameter(name).shape), rank, 4)
            if not all(own.contains(Slice.at(place.first, place.tensor.shape)) for place in parts):
                elsewhere.add("norm" if "norm" in name else name.split(".")[-2])
    assert elsewhere == travels


def test_a_slice_within_another_is_found_there() -> None:
    whole = torch.arange(40).reshape(8, 5)
    outer, inner = Slice.at((2, 1), (4, 4)), Slice.at((3, 2), (2, 2))
    assert outer.contains(inner)
    assert not inner.contains(outer)
    assert torch.equal(inner.within(outer).of(outer.of(whole)), inner.of(whole))
    assert inner.overlap(outer) == outer.overlap(inner) == inner
    apart = Slice(rows=range(inner.rows.stop, inner.rows.stop + 2), columns=inner.columns)
    assert not inner.overlap(apart).num_elements
    assert inner.contains(Slice.at((0, 0), (0, 5)))  # a worker whose rows are all padding needs nothing
    assert (outer.first, outer.num_elements) == ((2, 1), 16)


def test_parts_of_experts_are_whole_experts_or_rows_of_each() -> None:
    experts = torch.arange(120).reshape(4, 10, 3)
    held = shard_slice("mlp.experts.gate_up_proj", (4, 10, 3), 1, 2)
    assert torch.equal(held.of(experts), experts[2:])
    second_half = Slice.at((0, 15), (4, 5, 3))
    assert torch.equal(second_half.of(experts), experts[:, 5:])
    assert torch.equal(second_half.overlap(held).within(held).of(held.of(experts)), experts[2:, 5:])


def test_experts_whose_columns_workers_divide_are_refused() -> None:
    half = EngineSlice(Slice.at((0, 0), (4, 8, 4)), torch.zeros(4, 8, 4))
    with pytest.raises(ConfigError, match=r"columns of each expert of down_proj.*tensor_parallel_size to 1"):
        slice_writer._check({"down_proj": (4, 8, 8)}, {"down_proj": [half]}, torch.float32)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"the 10 columns of layers.0.o_proj.weight among 4 ranks"):
        shard_dimension("layers.0.o_proj.weight", (8, 10), 4)
