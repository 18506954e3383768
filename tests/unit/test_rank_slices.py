"""Ranks that write the slices of an engine's workers: stand-ins of vLLM's layers, and a fake of the ranks' commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import cut_slices
from support.rank_processes import on_ranks
from torch import nn

from tandem.errors import StaleWeights, TornWeights, TransportError, UnsupportedPair
from tandem.trainable.full import Full
from tandem.trainer.ranks.slices import SharedSlices, TrainedSlices
from tandem.types import PolicyVersion
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.verify.checksums import compare_checksums


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "workers", "dtype", "far", "received"), [
    ("qwen2-tied", (2,), 2, "bfloat16", 0.02, 0.12),
    ("qwen3-few-key-heads", (4,), 4, "float32", 1e-5, 0.34),
    ("qwen2-tied", (2, 2), 2, "float32", 1e-5, 0.12),  # two engines of two workers, replicas of shards
    ("qwen2-tied", (4,), 2, "float32", 1e-5, 0.37),  # the same engines, of one replica: each slice is two ranks'
    ("qwen2-tied", (2,), 1, "bfloat16", 0.02, 0.51),  # an engine for each rank, with whole weights
    pytest.param("qwen2-tied", (2, 4), 2, "bfloat16", 0.02, 0.37, marks=pytest.mark.long),
])  # fmt: skip
def test_each_rank_writes_what_its_worker_would_have_loaded(
    tmp_path: Path, name: str, shape: tuple[int, ...], workers: int, dtype: str, far: float, received: float
) -> None:
    world = torch.Size(shape).numel()
    for report in on_ranks(world, cut_slices.publishing, name, shape, workers, dtype, tmp_path):
        assert report["received"] < received, "of the bytes of all weights"
        assert "cannot be opened" in report["stale"]
        assert report["attached"] == ""
        assert report["emptied"], "as ranks took their parts"
        assert report["wrong"] == []
        assert report["sums"]
        assert report["scores"] < far
        assert report["finite"]
        assert report["whole"]
        assert report["tied"] == ("tied" in name)
        assert report["files"] == world
        assert report["largest_file"] < 0.8, "no rank has all weights"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype", "half"), [
    ("qwen2-tied", (2,), "bfloat16", 34_000),
    pytest.param("qwen3-few-key-heads", (2, 2), "float32", 68_000, marks=pytest.mark.long),
])  # fmt: skip
def test_buckets_are_gathered_from_ranks_while_they_are_sent(
    name: str, shape: tuple[int, ...], dtype: str, half: int
) -> None:
    """Bytes arrive exactly, no rank ever holds two buckets more, and a lost worker keeps no rank waiting.

    Half a bucket is on the wire at a time.
    """
    lead, *others = on_ranks(torch.Size(shape).numel(), cut_slices.sending, name, shape, dtype, half)
    assert "rank 1 (worker)" in lead["lost"]
    assert lead["error"] == ""
    assert lead["same"]
    assert lead["sent"] == lead["whole"]
    assert lead["largest"] < half
    assert half < lead["most"] < 4 * half < lead["whole"]
    assert all(other["most"] <= half for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_an_adapter_of_cut_weights_computes_what_it_does_of_whole_ones(merged: bool) -> None:
    """Its gradient is one process's, and merged weights follow it on every rank."""
    for report in on_ranks(2, cut_slices.adapting, "qwen3-few-key-heads", merged):
        assert report["largest"] > 1e-4
        assert report["error"] < 1e-6 * report["largest"]
        assert report["weights"] < 1e-6
        assert report["scores"] < 1e-5
        assert report["elements"] < 0.6, "of the frozen weights"


class FakeRanks:
    """Two ranks that hold some weights, the lead's slices among them, and write them when they are told to."""

    world = 2

    def __init__(self, sums: Mapping[str, int]):
        self.sums, self.calls = sums, list[str]()
        self.policy: Any = SimpleNamespace(model=nn.Linear(2, 2), compute=compute)

    async def execute(self, command: str, body: Callable[[int], Any], mine: Any) -> tuple[Any, list[Any]]:
        self.calls.append(f"{command} {body(1)}")
        result = await mine
        return result, [True if command == "finite_slices" else result]

    def attach(self, export: Any) -> str:
        return "" if export == "first" else "another's"

    def publish(self) -> int:
        return 7

    def checksums(self) -> Mapping[str, int]:
        return self.sums

    def scores(self, tokens: Sequence[int], temperatures: Sequence[float]) -> list[list[float]]:
        return [[-temperature] * (len(tokens) - 1) for temperature in temperatures]

    def finite(self) -> bool:
        return False


async def compute(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


class FakeEngine:
    """An engine of two workers."""

    def __init__(self, sums: Mapping[str, int]):
        self.sums = sums

    async def exports_of_workers(self) -> Sequence[Sequence[Any]]:
        return [["first", "second"]]

    async def checksums(self, payload: str) -> Mapping[str, Mapping[str, int]]:
        return {"engine 0": self.sums}

    def as_stored(self, adapter: Any) -> Any:
        raise AssertionError("there is no adapter")


def session(ranks: FakeRanks, engine: FakeEngine, *, fresh: bool) -> tuple[SharedSlices, Any]:
    sync = SharedSlices.of(Shared(in_flight="finish", tolerance=3.0))

    async def pause() -> None:
        ranks.calls.append("pause")

    return sync, SimpleNamespace(
        engine=engine,
        fresh=fresh,
        pause=pause,
        policy=ranks.policy,
        trainable=Full(),
        trained=TrainedSlices(Full(), ranks, ranks),  # type: ignore[arg-type]
    )


SUMS = {"weight": 1, "bias": 2}


def test_an_engine_that_was_started_on_these_weights_must_hold_them() -> None:
    ranks = FakeRanks(SUMS)
    sync, bound = session(ranks, FakeEngine(SUMS), fresh=True)
    assert (sync.finishes, sync.tolerance, sync.pause, sync.sums_before_pause) == (True, 3.0, "transfer", True)
    asyncio.run(sync.bind(bound))
    assert ranks.calls == ["pause", "attach_slices ['second']", "checksums_slices []"]
    sync, bound = session(ranks, FakeEngine({"weight": 1, "bias": 3}), fresh=True)
    with pytest.raises(UnsupportedPair, match="'bias' with other values than the ranks"):
        asyncio.run(sync.bind(bound))
    sync, bound = session(ranks, FakeEngine({}), fresh=False)
    asyncio.run(sync.bind(bound))


def test_a_publish_is_compared_with_the_bytes_of_all_workers() -> None:
    ranks = FakeRanks(SUMS)

    async def published(theirs: Mapping[str, int]) -> int:
        sync, bound = session(ranks, FakeEngine(theirs), fresh=False)
        moved = await sync.transfer(bound, PolicyVersion(step=1, digest=""))
        _, stored, engines = await bound.trained.sums(bound.engine, await bound.trained.checksums())
        compare_checksums(stored, engines, "tensors", "")
        return moved

    assert asyncio.run(published(SUMS)) == 14
    with pytest.raises(TornWeights):
        asyncio.run(published({"weight": 1, "bias": 3}))
    with pytest.raises(StaleWeights):
        asyncio.run(published({"weight": 4, "bias": 3}))


def test_what_is_read_of_the_weights_is_asked_of_all_ranks() -> None:
    _, bound = session(FakeRanks({**SUMS, "other": 5}), FakeEngine(SUMS), fresh=False)

    async def read() -> list[Any]:
        trained = bound.trained
        return [await trained.checksums(), await trained.scores([1, 2, 3], 1.0, 0.5), await trained.finite()]

    assert asyncio.run(read()) == [SUMS, [[-1.0, -1.0], [-0.5, -0.5]], False]


def test_a_rank_that_cannot_attach_is_told_once_all_have_tried() -> None:
    class Commands:
        world = 4

        async def execute(self, command: str, body: Any, mine: Any) -> tuple[Any, list[Any]]:
            assert command == "attach_slices"
            assert [body(rank) for rank in (1, 2, 3)] == [["b"], ["c"], ["d"]]
            return await mine, ["", "it cannot", ""]

    policy = SimpleNamespace(compute=compute)
    mine: Any = SimpleNamespace(attach={"a": ""}.__getitem__, policy=policy)
    crew = TrainedSlices(Full(), mine, Commands())  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="rank 2: it cannot"):
        asyncio.run(crew.attach([["a", "b"], ["c", "d"]]))
    with pytest.raises(TransportError, match="engine 0 has 4 workers, and 2 ranks share it"):
        asyncio.run(crew.attach([["a", "b", "c", "d"], ["e", "f"]]))
