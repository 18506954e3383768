"""Collectives of ranks over NCCL: their values are gloo's, and a rank that is gone or late holds no other up."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import nccl_ranks
from support.rank_threads import on_ranks

from tandem.distributed.group import DataGroup
from tandem.transport.rendezvous import Rendezvous, serve

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.slow,
]
WORLD = 2


@pytest.fixture(scope="module")
def on_gpus() -> Iterator[nccl_ranks.Ranks]:
    ranks = nccl_ranks.Ranks(WORLD)
    yield ranks
    ranks.close()


def test_sums_and_largest_have_the_values_of_all_ranks(on_gpus: nccl_ranks.Ranks) -> None:
    whole, rows = (
        sum(nccl_ranks.values(rank, *shape, device=torch.device("cpu")) for rank in range(WORLD))
        for shape in ((7,), (WORLD, 5))
    )
    for rank, result in enumerate(on_gpus(nccl_ranks.sums)):
        assert result["whole"] == whole.tolist()
        assert result["square"] == 3.0
        assert result["started"] == [1, 1, 0]
        assert result["own"] == [rows[rank].tolist()] * 2


def test_every_rank_has_all_parts_in_place_and_nothing_beside_them(on_gpus: nccl_ranks.Ranks) -> None:
    for wholes in on_gpus(nccl_ranks.gathered):
        assert wholes == [[-1.0, *[0.0] * size, *[1.0] * size] for size in (4, 1, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1 << 24, 10_000], ids=["one bucket", "many buckets"])
def test_updates_are_those_of_ranks_over_gloo(on_gpus: nccl_ranks.Ranks, dtype: torch.dtype, bucket: int) -> None:
    expected = on_ranks(WORLD, lambda group: nccl_ranks.updated(group, dtype, bucket))
    updated = on_gpus(nccl_ranks.updated_on_gpu, dtype, bucket)
    for mine, its in zip(*updated, strict=True):
        assert torch.equal(mine, its), "ranks have different weights"
    for mine, wanted in zip(updated[0], expected[0], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_tokens_are_exchanged_for_heads_as_over_gloo(on_gpus: nccl_ranks.Ranks) -> None:
    def rank(group: DataGroup) -> list[Any]:
        return nccl_ranks.exchanges(group.backend, group.rank, group.device)

    for exchanged, wanted in zip(on_gpus(nccl_ranks.exchanged, context=WORLD), on_ranks(WORLD, rank), strict=True):
        for one, other in zip(exchanged, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def of_rank_0(work: Callable[..., None], *, seconds: float) -> Any:
    """What rank 0's process tells while the other one is killed or late."""
    store, rendezvous = serve(Rendezvous(host="127.0.0.1", world=WORLD, backend="gloo", seconds=seconds))
    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()
    ranks = [processes.Process(target=work, args=(rendezvous, rank, results)) for rank in range(WORLD)]
    try:
        for one in ranks:
            one.start()
        return results.get(timeout=180)
    finally:
        for one in ranks:
            one.kill()
            one.join()
        results.close()
        del store


def test_a_collective_with_a_rank_that_was_killed_is_given_up_within_seconds() -> None:
    in_it, still_in_it, seconds = of_rank_0(nccl_ranks.lost, seconds=60.0)
    assert in_it, "the collective ended without the other rank"
    assert not still_in_it
    assert seconds < 10.0


def test_a_collective_that_a_rank_does_not_come_to_is_noted() -> None:
    fault, seconds = of_rank_0(nccl_ranks.late, seconds=5.0)
    assert "not over after 5 s (distributed.timeout_seconds)" in fault
    assert 4.0 < seconds < 15.0
