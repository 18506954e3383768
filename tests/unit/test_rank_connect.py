"""A rank that is lost, while groups are made or in a collective: all end by its name, and nothing keeps a process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import on_ranks

from tandem.config.loading import load
from tandem.distributed import crew
from tandem.distributed.crew import lead
from tandem.distributed.follower import Follower
from tandem.distributed.group import DataGroup, broke_off
from tandem.distributed.placement import Placement
from tandem.errors import RankError
from tandem.trainer.ranks.lead import ManyRanks

TIMEOUT_SECONDS = 20.0
"""Of a collective: what gloo waits for a rank that never comes."""


async def executed(body: Any) -> None:
    """A follower's part in a command, of which the lead needs nothing."""


async def lost(body: Any) -> None:
    """A follower's last command."""
    raise ValueError("it was killed")


async def following(place: Placement, handlers: Mapping[str, Callable[[Any], Awaitable[Any]]]) -> None:
    """A follower in this process, until it is lost."""
    follower = await Follower.join(place, TIMEOUT_SECONDS)
    with contextlib.suppress(ValueError):
        await follower.serve(handlers)


def placed(world: int) -> Placement:
    """The lead's place among so many ranks, at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Placement(
        rank=0, world_size=world, local_rank=0, local_world_size=world, master_addr="127.0.0.1", master_port=port,
        launcher="torchrun",
    )  # fmt: skip


async def broken(body: Any) -> None:
    """What gloo says where the other end is gone."""
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20384.")


async def out_of_memory(body: Any) -> None:
    """No collective's error."""
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("late", "named"), [
    (True, r"^rank 2 \(pid .*was lost in command 'micros': .*it was killed"),
    (False, r"^rank 1 \(pid .*was lost in command 'micros': .*Connection closed by peer"),
])  # fmt: skip
def test_a_collective_that_breaks_off_is_not_blamed_on_the_rank_that_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, named: str
) -> None:
    """Where no other rank is heard or missed, it is all that is known."""
    monkeypatch.setattr(crew, "ALONG_SECONDS", 1.5 if late else 0.2)
    place, ends = placed(3), dict[int, BaseException]()

    async def lost_late(body: Any) -> None:
        await asyncio.sleep(0.3)
        if late:
            raise ValueError("it was killed")
        await asyncio.Event().wait()

    async def following_to_its_end(rank: int, command: Callable[[Any], Awaitable[Any]]) -> None:
        follower = await Follower.join(replace(place, rank=rank, local_rank=rank), TIMEOUT_SECONDS)
        try:
            await follower.serve({"micros": command})
        except (RankError, ValueError) as error:
            ends[rank] = error

    async def scene() -> str:
        followers = [asyncio.create_task(following_to_its_end(*of)) for of in ((1, broken), (2, lost_late))]
        try:
            async with lead(3, place, [], tmp_path, TIMEOUT_SECONDS) as ranks:
                await ranks.execute("micros", None, executed(None))
        except RankError as error:
            return str(error)
        finally:
            await asyncio.gather(*followers)
        raise AssertionError("the lead went on")

    assert re.match(named, message := asyncio.run(scene()))
    assert isinstance(ends[1], RankError)
    assert "ends in command 'micros', for a collective broke off" in str(ends[1])
    assert message in str(ends[1]), "it says what the lead says"


def test_a_collective_that_breaks_off_for_the_lead_ends_by_the_leads_name(tmp_path: Path) -> None:
    place = placed(2)

    async def gone(follower: Follower) -> None:
        """The lead's end is closed under the follower, as by a kill."""
        follower._channel.close()
        raise ConnectionResetError("Connection lost")

    async def following_to_its_end() -> None:
        follower = await Follower.join(replace(place, rank=1, local_rank=1), TIMEOUT_SECONDS)
        follower._channel.send = lambda message: gone(follower)  # type: ignore[method-assign]
        with pytest.raises(RankError, match=r"a collective broke off.*it lost the lead, rank 0"):
            await follower.serve({"micros": broken})

    async def scene() -> None:
        follower = asyncio.create_task(following_to_its_end())
        with pytest.raises(RankError, match=r"^rank 1 "):
            async with lead(2, place, [], tmp_path, TIMEOUT_SECONDS) as ranks:
                await ranks.execute("micros", None, executed(None))
        await follower

    asyncio.run(scene())


def test_what_is_no_collectives_error_ends_a_follower_as_it_is(tmp_path: Path) -> None:
    place = placed(2)

    async def scene() -> None:
        follower = await Follower.join(replace(place, rank=1, local_rank=1), TIMEOUT_SECONDS)
        with pytest.raises(torch.OutOfMemoryError):
            await follower.serve({"micros": out_of_memory})

    async def leading() -> None:
        follower = asyncio.create_task(scene())
        with pytest.raises(RankError, match=r"^rank 1 \(pid .*was lost in command 'micros': .*CUDA out of memory"):
            async with lead(2, place, [], tmp_path, TIMEOUT_SECONDS) as ranks:
                await ranks.execute("micros", None, executed(None))
        await follower

    asyncio.run(leading())


def test_what_breaks_off_is_known_by_its_error() -> None:
    def work(group: DataGroup) -> bool:
        if group.rank:
            return True  # without its part
        with pytest.raises(RuntimeError) as caught:
            group.finish([group.all_reduce(torch.zeros(4))], "a rank that never comes")
        return broke_off(caught.value)

    assert on_ranks(2, work, seconds=1.0) == [True, True]
    assert broke_off(torch.distributed.DistBackendError("NCCL communicator was aborted"))
    assert not any(map(broke_off, (torch.OutOfMemoryError("x"), RuntimeError("shapes"), ValueError("gloo"))))


def test_a_rank_that_is_lost_while_groups_are_made_ends_the_lead(tiny_model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny_model}\nsteps: 3\nenv: arithmetic\nranks: 2\nthreads: 1\n")
    place = placed(2)

    async def scene() -> float:
        other = replace(place, rank=1, local_rank=1)
        follower = asyncio.create_task(following(other, {"begin": executed, "connect": lost}))
        try:
            async with AsyncExitStack() as stack:
                ranks = await stack.enter_async_context(lead(2, place, [], tmp_path, TIMEOUT_SECONDS))
                ranks.on_failure.append(lambda: since.append(time.monotonic()))
                with pytest.raises(RankError, match=r"^rank 1 \(pid .*was lost in command 'connect': .*it was killed"):
                    await ManyRanks.loaded(stack, load(recipe).config, ranks, place, tmp_path)
        finally:
            await follower
        return time.monotonic() - since[0]

    since: list[float] = []
    before = set(threading.enumerate())
    assert asyncio.run(scene()) < TIMEOUT_SECONDS / 4
    assert [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon] == []
