"""Checksums of shards that are rounded a few rows at a time are those of the whole tensors, rounded at once."""

from __future__ import annotations

import pytest
import torch

from tandem.distributed.rounded_sums import RoundedSums
from tandem.transport.checksums import Shard, checksums

MASK = (1 << 64) - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pieces_of_shards_have_the_checksums_of_the_whole(dtype: torch.dtype) -> None:
    """Also of one whose row alone fills the memory, of an empty one, and after the values have changed."""
    torch.manual_seed(0)
    whole = {
        "matrix": torch.randn(37, 24), "wide": torch.randn(3, 200), "vector": torch.randn(301), "one": torch.randn(1)
    }  # fmt: skip
    cuts = {"matrix": (19, 0), "wide": (0, 100), "vector": (150, 0), "one": (1, 0)}
    halves = [
        [Shard(name, whole[name][:row] if row else whole[name][:, :column]) for name, (row, column) in cuts.items()],
        [Shard(name, whole[name][row:] if row else whole[name][:, column:], (row, column))
         for name, (row, column) in cuts.items()],
    ]  # fmt: skip
    ranks = [RoundedSums(shards, dtype, rounded_bytes=128) for shards in halves]
    for _ in range(2):
        expected = checksums((name, tensor.to(dtype)) for name, tensor in whole.items())
        sums = sum(rank.queue() for rank in ranks)
        assert isinstance(sums, torch.Tensor)
        assert dict(zip(ranks[0].names, (value & MASK for value in sums.tolist()), strict=True)) == expected
        for tensor in whole.values():
            tensor.mul_(-1.7)


def test_a_rank_without_any_element_adds_zeros() -> None:
    assert RoundedSums([Shard("none", torch.zeros(0, 8))], torch.bfloat16).queue().tolist() == [0]
