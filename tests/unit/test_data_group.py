"""Collectives of ranks that share a GPU go through host memory, and have the values of those that do not.

Tensors are on processors here: gloo is handed copies of them, as it is of those on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_threads import on_ranks
from torch import Tensor

from tandem.distributed import group as data_group
from tandem.distributed.group import DataGroup

WORLD = 3


def values(rank: int, *shape: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    made = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, shape, generator=made).float()


@pytest.fixture(params=[False, True], ids=["in place", "staged"])
def handed(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether gloo gets copies."""
    monkeypatch.setattr(data_group, "needs_staging", lambda tensor: request.param)
    monkeypatch.setattr(data_group, "on_host", torch.clone)  # Tensor.cpu copies nothing that is on the host
    return bool(request.param)


@pytest.mark.parametrize(("largest", "wanted"), [
    (False, sum(values(rank, 7) for rank in range(WORLD))),
    (True, torch.stack([values(rank, 7) for rank in range(WORLD)]).amax(0)),
])  # fmt: skip
def test_every_rank_has_the_sum_or_the_largest(handed: bool, largest: bool, wanted: Tensor) -> None:
    def rank(group: DataGroup) -> Tensor:
        mine = values(group.rank, 7)
        group.all_reduce(mine, largest=largest).wait()
        return mine

    for reduced in on_ranks(WORLD, rank):
        assert torch.equal(reduced, wanted)


def test_each_rank_has_its_row_of_the_sum(handed: bool) -> None:
    def rank(group: DataGroup) -> Tensor:
        own, rows = torch.full((5,), 0.5), values(group.rank, WORLD, 5)
        group.reduce_scatter(own, rows).wait()
        assert torch.equal(rows, values(group.rank, WORLD, 5))
        return own

    total = torch.stack([values(rank, WORLD, 5) for rank in range(WORLD)]).sum(0)
    assert torch.equal(torch.stack(on_ranks(WORLD, rank)), total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_all_parts_in_place(handed: bool, dtype: torch.dtype) -> None:
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


def test_of_several_under_way_each_has_its_own_result(handed: bool) -> None:
    def rank(group: DataGroup) -> list[Tensor]:
        sums = [values(group.rank + 10 * number, 6) for number in range(4)]
        works = [group.all_reduce(tensor) for tensor in sums]
        for work in reversed(works):
            work.wait()
        return sums

    for reduced in on_ranks(WORLD, rank):
        for number, tensor in enumerate(reduced):
            assert torch.equal(tensor, torch.stack([values(r + 10 * number, 6) for r in range(WORLD)]).sum(0))


def test_what_is_staged_is_there_when_it_is_waited_for_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_group, "needs_staging", lambda tensor: True)

    monkeypatch.setattr(data_group, "on_host", torch.clone)

    def rank(group: DataGroup) -> tuple[Tensor, Tensor]:
        mine = values(group.rank, 6)
        work = group.all_reduce(mine)
        before = mine.clone()
        work.wait()
        return before, mine

    for number, (before, after) in enumerate(on_ranks(2, rank)):
        assert torch.equal(before, values(number, 6))
        assert torch.equal(after, values(0, 6) + values(1, 6))


def test_a_collective_that_fails_leaves_its_target_and_says_so() -> None:
    class Failed:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    target = torch.zeros(2)
    with pytest.raises(RuntimeError, match="closed by peer"):
        data_group.HostWork(Failed(), torch.ones(2), target).wait()
    assert not target.any()
