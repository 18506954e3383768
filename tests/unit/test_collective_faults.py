"""What a run says of a fault that NCCL's watchdog notes."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from tandem.distributed import crew
from tandem.distributed.crew import Ranks
from tandem.errors import RankError
from tandem.trainer.ranks.parts import RankParts
from tandem.transport import rendezvous as meeting
from tandem.transport.rendezvous import Rendezvous

MEETING = Rendezvous(host="localhost", port=1, world=2, backend="nccl", name="some", seconds=5.0)


class Backend:
    """A group of torch's that has an error or none."""

    def __init__(self, error: ErrorType = ErrorType.SUCCESS):
        self.error, self.aborted = error, 0

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.aborted += 1


def parts_of(*backends: Backend) -> RankParts:
    data, context, *of_mesh = backends
    group: Any = SimpleNamespace(backend=data, rank=0)
    mesh: Any = SimpleNamespace(number=2, backends=tuple(of_mesh))
    return RankParts(group=group, rendezvous=MEETING, context=context, mesh=mesh)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_collective_that_is_not_over_in_time_is_told_of_every_group(at: int) -> None:
    backends = [Backend(ErrorType.TIMEOUT if number == at else ErrorType.SUCCESS) for number in range(3)]
    fault = asyncio.run(asyncio.wait_for(parts_of(*backends).fault(), 1.0))
    assert fault == "a collective of NCCL is not over after 5 s (distributed.timeout_seconds)"


def ended(rank_lost_first: bool) -> tuple[RankError, list[str]]:
    """What a run ends by when a collective is late, and who was told to give up."""
    notified: list[str] = []

    async def fault() -> str:
        return "a collective is late"

    async def run() -> RankError:
        ranks = Ranks(MEETING, 2)
        ranks.on_failure.append(lambda: notified.append("give up"))
        if rank_lost_first:
            asyncio.get_running_loop().call_soon(ranks._end, "rank 1 was lost")
        await ranks.end_at(fault())
        return ranks.error

    return asyncio.run(run()), notified


@pytest.mark.parametrize(("rank_lost_first", "why"), [(False, "a collective is late"), (True, "rank 1 was lost")])
def test_a_fault_ends_the_run_unless_a_lost_rank_has(
    monkeypatch: pytest.MonkeyPatch, rank_lost_first: bool, why: str
) -> None:
    monkeypatch.setattr(crew, "ALONG_SECONDS", 0.05)
    error, notified = ended(rank_lost_first)
    assert why in str(error)
    assert notified == ["give up"]


@pytest.mark.parametrize(("watched", "seconds"), [(True, 5.0), (False, 86_400.0)])
def test_nccls_watchdog_has_the_groups_deadline_and_ends_no_process(
    monkeypatch: pytest.MonkeyPatch, watched: bool, seconds: float
) -> None:
    made: list[tuple[Any, dict[str, str]]] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: object, rank: int, world: int, options: Any):
            made.append((options, dict(os.environ)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(meeting, "visit", lambda rendezvous: dist.HashStore())
    meeting.open_group(MEETING, 0, "localhost", watched=watched)
    ((options, environ),) = made
    assert options._timeout.total_seconds() == seconds
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
