"""Ranks of one host that are lost before they have connected: each side sees by the other's process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.distributed import children
from tandem.distributed.children import LEAD, Children, lead_lost
from tandem.distributed.follower import Follower
from tandem.distributed.placement import Placement
from tandem.errors import RankError
from tandem.processes import Identity, identity


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "POLL_SECONDS", 0.02)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this host."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def there(other: subprocess.Popen[bytes]) -> Identity:
    """Which process that is."""
    process = identity(other.pid)
    assert process is not None
    return process


def test_a_child_that_is_lost_before_it_has_connected_is_named(tmp_path: Path) -> None:
    async def scene() -> tuple[str, int]:
        started = Children(tmp_path)
        started.start(["sleep", "60"], 3, "127.0.0.1", 1)
        try:
            pid = started._processes[2].pid
            os.kill(pid, signal.SIGKILL)
            return await asyncio.wait_for(started.first_lost(), 20), pid
        finally:
            started._kill()
            await started.close(at_once=True)

    lost, pid = asyncio.run(scene())
    assert lost.startswith(f"rank 2 (pid {pid} on this host) was lost before it had connected: it ended with -9")


def test_a_lead_that_is_lost_is_seen_by_those_that_it_has_started(there: Identity) -> None:
    os.kill(there.pid, signal.SIGKILL)
    environment = {LEAD: f"{there.pid} {there.started}"}
    assert "is gone" in asyncio.run(asyncio.wait_for(lead_lost(environment), 20))


def test_a_follower_that_a_launcher_has_started_knows_no_process_of_its_lead() -> None:
    async def scene() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lead_lost({}), 0.05)

    asyncio.run(scene())


def test_a_follower_does_not_wait_for_a_lead_that_is_gone(
    other: subprocess.Popen[bytes], there: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEAD, f"{there.pid} {there.started}")
    other.kill()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    place = Placement(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=port,
        launcher="tandem",
    )  # fmt: skip
    with pytest.raises(RankError, match=r"before it has connected, for it lost the lead, rank 0: its process \d+ is"):
        asyncio.run(Follower.join(place, 0.5))
