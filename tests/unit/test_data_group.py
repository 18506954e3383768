"""Values of the collectives of a data group."""

from __future__ import annotations

import pytest
import torch
from support.rank_threads import on_ranks
from torch import Tensor

from tandem.distributed.group import DataGroup

WORLD = 3


def values(rank: int, *shape: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    made = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, shape, generator=made).float()


@pytest.mark.parametrize(("largest", "wanted"), [
    (False, sum(values(rank, 7) for rank in range(WORLD))),
    (True, torch.stack([values(rank, 7) for rank in range(WORLD)]).amax(0)),
])  # fmt: skip
def test_every_rank_has_the_sum_or_the_largest(largest: bool, wanted: Tensor) -> None:
    def rank(group: DataGroup) -> Tensor:
        mine = values(group.rank, 7)
        group.all_reduce(mine, largest=largest).wait()
        return mine

    for reduced in on_ranks(WORLD, rank):
        assert torch.equal(reduced, wanted)


def test_each_rank_has_its_row_of_the_sum() -> None:
    def rank(group: DataGroup) -> Tensor:
        own, rows = torch.full((5,), 0.5), values(group.rank, WORLD, 5)
        group.reduce_scatter(own, rows).wait()
        assert torch.equal(rows, values(group.rank, WORLD, 5))
        return own

    total = torch.stack([values(rank, WORLD, 5) for rank in range(WORLD)]).sum(0)
    assert torch.equal(torch.stack(on_ranks(WORLD, rank)), total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_all_parts_in_place(dtype: torch.dtype) -> None:
    def rank(group: DataGroup) -> list[Tensor]:
        wholes = [torch.full((WORLD * each,), -1.0, dtype=dtype) for each in (4, 1)]
        before = [whole.data_ptr() for whole in wholes]
        for whole, each in zip(wholes, (4, 1), strict=True):
            whole.chunk(WORLD)[group.rank].copy_(values(group.rank, each))
        group.all_gather(wholes)
        assert [whole.data_ptr() for whole in wholes] == before
        return wholes

    for gathered in on_ranks(WORLD, rank):
        for whole, each in zip(gathered, (4, 1), strict=True):
            assert torch.equal(whole, torch.cat([values(number, each) for number in range(WORLD)]).to(dtype))


def test_of_several_under_way_each_has_its_own_result() -> None:
    def rank(group: DataGroup) -> list[Tensor]:
        sums = [values(group.rank + 10 * number, 6) for number in range(4)]
        works = [group.all_reduce(tensor) for tensor in sums]
        for work in reversed(works):
            work.wait()
        return sums

    for reduced in on_ranks(WORLD, rank):
        for number, tensor in enumerate(reduced):
            assert torch.equal(tensor, torch.stack([values(r + 10 * number, 6) for r in range(WORLD)]).sum(0))
