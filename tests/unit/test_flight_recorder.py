"""What a run says and keeps of its ranks' last collectives, and of a fault that NCCL's watchdog notes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ErrorType

from tandem.config.sections import Distributed
from tandem.distributed import crew, flight_recorder
from tandem.distributed.crew import Ranks
from tandem.errors import RankError
from tandem.trainer.ranks import parts as rank_parts
from tandem.trainer.ranks.parts import RankParts
from tandem.transport import rendezvous as meeting
from tandem.transport.rendezvous import Rendezvous

MEETING = Rendezvous(host="localhost", port=1, world=2, backend="nccl", name="some", seconds=5.0)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set, and what a test sets is gone after it."""
    for name in (
        *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_recording_is_set_up_for_the_runs_folder(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    flight_recorder.record(tmp_path, environ)
    assert environ == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_trace_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def test_ranks_over_nccl_record_and_those_over_gloo_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str | None] = []

    def group(*arguments: object) -> Any:
        made.append(os.environ.get("TORCH_FR_DUMP_TEMP_FILE"))
        return SimpleNamespace(clock=None)

    monkeypatch.setattr(rank_parts, "DataGroup", group)
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        RankParts.connect(MEETING, 0, device, Distributed(), tmp_path)
    assert made == [None, f"{tmp_path}/nccl_trace_rank_"]


def test_a_rank_writes_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"entries", raising=False)
    assert flight_recorder.write(3) is None, "nothing is recorded"
    flight_recorder.record(tmp_path / "logs")
    assert flight_recorder.write(3) == tmp_path / "logs/nccl_trace_rank_3"
    assert (tmp_path / "logs/nccl_trace_rank_3").read_bytes() == b"entries"


# Faults


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
        ranks.advice = "; look there"
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
    assert str(error).endswith("; look there")
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
