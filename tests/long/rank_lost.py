"""``tandem`` with one rank that is lost at a boundary, for ``kills_ranks.py``: by a signal to itself, exactly there.

``RANK_LOST``: the rank, the boundary, ``before`` or ``after``, which time that it comes there, and the signal's number.
``TANDEM_TRIAL``: a folder in whose file ``lost`` the rank writes the monotonic time first; every process of a trial has
it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

RANK, BOUNDARY, MOMENT, TIMES, SIGNAL = os.environ["RANK_LOST"].split()
_times = 0


def strike(boundary: str, moment: str = "before") -> None:
    """Lose this rank, if it is the one and this is the place."""
    global _times
    if (os.environ.get("RANK", "0"), boundary, moment) != (RANK, BOUNDARY, MOMENT):
        return
    _times += 1
    if _times == int(TIMES):
        mark = Path(os.environ["TANDEM_TRIAL"], "lost")
        aside = mark.with_suffix(f".{os.getpid()}")
        aside.write_text(f"{time.monotonic()}")
        aside.rename(mark)
        os.kill(os.getpid(), int(SIGNAL))


class Handlers(Mapping[str, Any]):
    """A follower's handlers, each between two boundaries."""

    def __init__(self, handlers: Mapping[str, Any]):
        self._handlers = handlers

    def __getitem__(self, command: str) -> Callable[[Any], Awaitable[Any]]:
        handler = self._handlers[command]

        async def between(body: Any) -> Any:
            strike(command)
            reply = await handler(body)
            strike(command, "after")  # which the lead does not know yet
            return reply

        return between

    def __iter__(self) -> Iterator[str]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)


def planted() -> None:
    """Put the boundaries into both sides of ranks."""
    from tandem.distributed.crew import Ranks, lead
    from tandem.distributed.follower import Follower
    from tandem.trainer.ranks import lead as ranks_lead

    join, serve = Follower.join, Follower.serve
    execute, come, end = Ranks.execute, Ranks.wait_for_all, Ranks.end

    async def joined(*args: Any) -> Follower:
        strike("join")
        return await join(*args)

    async def served(self: Follower, handlers: Mapping[str, Any]) -> None:
        await serve(self, Handlers(handlers))
        strike("end")

    @functools.wraps(lead)
    def led(world: int, placement: Any, command: list[str], *others: Any) -> Any:
        return lead(world, placement, [sys.executable, __file__, *command[3:]], *others)

    async def executed(self: Ranks, command: str, *others: Any) -> Any:
        strike(command)
        result = await execute(self, command, *others)
        strike(command, "after")
        return result

    async def waited(self: Ranks, *args: Any) -> None:
        strike("join")
        await come(self, *args)

    async def ended(self: Ranks, error: BaseException | None) -> None:
        strike("end")
        await end(self, error)

    for owner, name, new in (
        (Follower, "join", joined),
        (Follower, "serve", served),
        (Ranks, "execute", executed),
        (Ranks, "wait_for_all", waited),
        (Ranks, "end", ended),
        (ranks_lead, "lead", led),
    ):
        setattr(owner, name, new)


if __name__ == "__main__":
    strike("start")  # before its imports
    planted()
    from tandem.cli import main

    main()
