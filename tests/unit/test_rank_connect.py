"""A rank that is lost while ranks make their groups: the lead ends by name, and nothing keeps its process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.loading import load
from tandem.distributed.crew import lead
from tandem.distributed.follower import Follower
from tandem.distributed.placement import Placement
from tandem.errors import RankError
from tandem.trainer import assemble
from tandem.trainer.rank_parts import Together

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


def test_a_rank_that_is_lost_while_groups_are_made_ends_the_lead(tiny_model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny_model}\nsteps: 3\nenv: arithmetic\nranks: 2\nthreads: 1\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Placement(
        rank=0, world_size=2, local_rank=0, local_world_size=2, master_addr="127.0.0.1", master_port=port,
        launcher="torchrun",
    )  # fmt: skip

    async def scene() -> float:
        other = replace(place, rank=1, local_rank=1)
        follower = asyncio.create_task(following(other, {"begin": executed, "connect": lost}))
        try:
            async with AsyncExitStack() as stack:
                ranks = await stack.enter_async_context(lead(2, place, [], tmp_path, TIMEOUT_SECONDS))
                ranks.on_failure.append(lambda: since.append(time.monotonic()))
                with pytest.raises(RankError, match=r"^rank 1 \(pid .*was lost in command 'connect': .*it was killed"):
                    await assemble._loaded(stack, load(recipe).config, tmp_path, Together(ranks, place))
        finally:
            await follower
        return time.monotonic() - since[0]

    since: list[float] = []
    before = set(threading.enumerate())
    assert asyncio.run(scene()) < TIMEOUT_SECONDS / 4
    assert [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon] == []
