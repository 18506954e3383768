"""The lead's side of several ranks: commands, one at a time and to all of them in one order.

Collectives occur within commands alone, so no two ranks can ever be at different ones, whatever else the lead is told
meanwhile. A rank that dies, raises or falls silent ends the run with one error that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tandem.distributed.channel import Channel
from tandem.distributed.children import Children
from tandem.distributed.placement import Placement
from tandem.errors import RankError
from tandem.observability import waits
from tandem.together import cancel, unless
from tandem.transport.rendezvous import Rendezvous, first_line, serve, visit

log = logging.getLogger(__name__)

T = TypeVar("T")

ALONG_SECONDS = 5.0
"""How long a rank that failed may take to say so once another one has noticed."""
NAME = "ranks"
"""Of the group in the store."""
OTHERS = "the other ranks"
"""As waits for them are told."""


def meeting(host: str, port: int, world: int, seconds: float) -> Rendezvous:
    """Where the ranks of this start meet: torchrun keeps one store over restarts."""
    name = f"{NAME}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Rendezvous(host=host, port=port, world=world, backend="gloo", name=name, seconds=seconds)


class _Follower:
    """What the lead knows of a follower."""

    def __init__(self, rank: int, host: str, pid: int, channel: Channel):
        self.rank, self.host, self.pid, self.channel = rank, host, pid, channel
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.reports: asyncio.Queue[Any] = asyncio.Queue()

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Ranks:
    """The ranks of a run, seen by the lead, which is rank 0.

    Args:
        rendezvous: where they meet.
        world: how many there are, the lead included.
    """

    def __init__(self, rendezvous: Rendezvous, world: int):
        self.rendezvous, self.world = rendezvous, world
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once a rank is lost."""
        self.error = RankError("no rank is lost")
        """What to tell then."""
        self.on_failure: list[Callable[[], None]] = []
        """Called once one is lost, so that nothing waits for it any more."""
        self._followers: dict[int, _Follower] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._all = asyncio.Event()
        self._turn = asyncio.Lock()
        self._doing = "start"
        self._ending = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in a follower that has connected; it says which it is."""
        channel = Channel(reader, writer)
        hello = await channel.receive()
        follower = _Follower(hello["rank"], hello["host"], hello["pid"], channel)
        if follower.rank in self._followers or not 0 < follower.rank < self.world:
            channel.close()
            return
        self._followers[follower.rank] = follower
        self._readers.append(asyncio.create_task(self._read(follower), name=f"replies of rank {follower.rank}"))
        if len(self._followers) == self.world - 1:
            self._all.set()

    async def wait_for_all(self, seconds: float, lost: Coroutine[Any, Any, str]) -> None:
        """Return once every follower has connected.

        Args:
            seconds: the longest wait.
            lost: returns, with what it said last, when a process that was started here is lost.

        Raises:
            RankError: one did not come.
        """
        gone = asyncio.ensure_future(lost)
        try:
            async with asyncio.timeout(seconds):
                come = waits.wait(self._all.wait(), owner=waits.actor("trainer"), reason="them to connect", on=OTHERS)
                await unless(gone, come)
        except TimeoutError:
            missing = [str(rank) for rank in range(1, self.world) if rank not in self._followers]
            raise RankError(
                f"of {self.world} ranks {', '.join(missing)} did not come to {self.rendezvous.host}:"
                f"{self.rendezvous.port} within {seconds:g} s; see their output, and let the port through"
            ) from None
        finally:
            await cancel(gone)
        if self.failure.done():
            raise self.error
        if not self._all.is_set():
            raise RankError(await gone)

    async def execute(
        self, command: str, body: Callable[[int], Any] | None, local: Coroutine[Any, Any, T]
    ) -> tuple[T, list[Any]]:
        """Have all ranks execute a command, the lead ``local``; its result, and the followers' in order of rank.

        Raises:
            RankError: a rank is lost, or could not.
        """
        async with self._turn:
            here = asyncio.ensure_future(local)
            replies = asyncio.ensure_future(self._ask(command, body))
            both = asyncio.gather(here, replies)
            try:
                await asyncio.wait((both, self.failure), return_when=asyncio.FIRST_COMPLETED)
                if not self.failure.done() and both.done() and isinstance(both.exception(), (RuntimeError, OSError)):
                    # A collective broke here; the rank that broke it is about to be heard, or missed.
                    await asyncio.wait((self.failure,), timeout=ALONG_SECONDS)
                if self.failure.done():
                    raise self.error
                result: tuple[T, list[Any]] = await both
                return result
            finally:
                for task in (here, replies):
                    task.cancel()
                both.add_done_callback(lambda done: done.cancelled() or done.exception())  # told already

    async def _ask(self, command: str, body: Callable[[int], Any] | None) -> list[Any]:
        if self.failure.done():
            raise self.error
        self._doing = command
        followers = [self._followers[rank] for rank in range(1, self.world)]
        for follower in followers:
            try:
                await follower.channel.send([command, None if body is None else body(follower.rank)])
            except ConnectionError as error:
                self._fail(follower, str(error))
                raise self.error from error
        async with waits.waiting(waits.actor("trainer"), f"{command!r} to be executed", on=OTHERS):
            return [await follower.replies.get() for follower in followers]

    async def reports(self, reason: str) -> list[Any]:
        """What each follower reports of what it does behind the commands, in order of rank; commands go on meanwhile.

        Raises:
            RankError: a rank is lost.
        """
        reports = await unless(self.failure, self._reports(reason))
        if reports is None or self.failure.done():
            raise self.error
        return reports

    async def _reports(self, reason: str) -> list[Any]:
        async with waits.waiting(waits.actor("trainer"), reason, on=OTHERS):
            return [await self._followers[rank].reports.get() for rank in range(1, self.world)]

    async def _read(self, follower: _Follower) -> None:
        try:
            while True:
                kind, body = await follower.channel.receive()
                if kind == "broke":
                    # A collective broke off there; the rank that broke it is about to be heard, or missed.
                    await asyncio.wait((self.failure,), timeout=ALONG_SECONDS)
                if kind in ("broke", "failed"):
                    self._fail(follower, body)
                    return
                (follower.reports if kind == "report" else follower.replies).put_nowait(body)
        except (ConnectionError, OSError) as error:
            self._fail(follower, f"it is gone: {first_line(error)}")

    def _fail(self, follower: _Follower, why: str) -> None:
        self._end(f"{follower} was lost in command {self._doing!r}: {why}")

    async def end_at(self, fault: Coroutine[Any, Any, str]) -> None:
        """End the run when ``fault`` returns, by what that says, unless a rank is lost that has caused it."""
        why = await fault
        await asyncio.wait((self.failure,), timeout=ALONG_SECONDS)
        self._end(f"in command {self._doing!r} {why}")

    def _end(self, why: str) -> None:
        if not self.failure.done() and not self._ending:
            self.error = RankError(
                f"{why}. All ranks end; go on from the newest checkpoint, with as many ranks or others"
            )
            self.failure.set_result(None)
            self._all.set()  # nobody waits for the others any more
            for give_up in self.on_failure:
                give_up()

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, and give it up as soon as a rank is lost."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.failure), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and (task.cancelled() or task.exception() is None or not self.failure.done()):
                return await task
            raise self.error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=ALONG_SECONDS)

    async def end(self, error: BaseException | None) -> None:
        """Let all followers end, and tell them why."""
        self._ending = True
        why = None if error is None else f"{type(error).__name__}: {error}"
        for follower in self._followers.values():
            with contextlib.suppress(ConnectionError, OSError):
                await asyncio.wait_for(follower.channel.send(["end", why]), 1.0)
        for reader in self._readers:
            if error is not None:
                reader.cancel()
        await asyncio.wait(self._readers or [asyncio.ensure_future(asyncio.sleep(0))], timeout=ALONG_SECONDS)
        for reader in self._readers:
            reader.cancel()
        for follower in self._followers.values():
            follower.channel.close()


@asynccontextmanager
async def lead(
    world: int, placement: Placement | None, command: Sequence[str], logs: Path, seconds: float
) -> AsyncIterator[Ranks]:
    """All ranks of a run, each connected; they end with the block.

    Args:
        world: how many.
        placement: this process's, where a launcher started all ranks; None: the others are started here.
        command: starts one.
        logs: folder of the output of those that are started here.
        seconds: the longest wait for one to come, and for a collective.

    Raises:
        RankError: one did not come.
    """
    host, port = ("127.0.0.1", 0) if placement is None else (placement.master_addr, placement.master_port)
    rendezvous = meeting(host, port, world, seconds)
    store = None  # torchrun serves one itself
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, rendezvous = serve(rendezvous)
    ranks = Ranks(rendezvous, world)
    server = await asyncio.start_server(ranks.connected, host, 0)
    children = Children(logs)
    ranks.on_failure.append(children.kill_soon)
    failed: BaseException | None = None
    try:
        visit(rendezvous).set("lead", str(server.sockets[0].getsockname()[1]))
        if placement is None:
            children.start(command, world, rendezvous.host, rendezvous.port)
        await ranks.wait_for_all(seconds, children.first_lost())
        yield ranks
    except BaseException as error:
        failed = error
        raise
    finally:
        await ranks.end(failed)
        server.close()
        await children.close(at_once=failed is not None)
        del store  # served until here
