"""The servers that hold one policy: starts, reattaches, restarts and ends them, always by their own handles."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tandem.engines.base import EngineRequirements, RankEngine
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.http import ApiKeyRefused, EngineServer, EngineUnreachable
from tandem.engines.vllm.client.process import EngineProcess, EngineRecord
from tandem.errors import Deadline, EngineError
from tandem.observability import waits
from tandem.together import all_ended, cancel, together
from tandem.transport import sharing

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two attempts to reach a server that is not there yet."""
HEALTH_SECONDS = 2.0
"""Between two checks that engines hold the weights published to them, and whether one that was away has returned."""


class Launch(NamedTuple):
    """Command lines and environment by which the trainer starts its own engine processes."""

    command: Callable[[str, int, int], list[str]]
    """By model folder, port, and how many were started before."""
    environment: Callable[[int, str], dict[str, str]]
    """By replica and API key."""
    trainer: str
    """This process, for them to watch."""
    log: Path
    """Folder of their logs."""
    records: Path | None
    """Folder of the files by which a resumed run finds them."""


class Fleet:
    """One or more servers of one policy; ``launch`` is None for servers that the trainer did not start.

    Start, recovery and health checks share one list of servers, one lock and one flag that says whether the current
    weights are everywhere.

    Args:
        servers: where they are, or will be.
        launch: how they are started.
        options: the recipe's.
        requirements: the run's; with ``hosts`` the first server is started here, and each other by its rank.
        first: number of the first server among those of the run, for its log and record.
        every: how far the numbers of two starts of one server are apart.
    """

    def __init__(
        self,
        servers: Sequence[EngineServer],
        *,
        launch: Launch | None,
        options: Any,
        requirements: EngineRequirements,
        first: int = 0,
        every: int = 1,
    ):
        self.servers = list(servers)
        self.context = 0
        """Most tokens that every server takes."""
        self.restart_count = 0
        self.started_elsewhere = launch is None
        """One of them was started elsewhere: by an earlier trainer, or as an external engine at ``urls``."""
        self.model = str(requirements.weights or requirements.model)
        """What the next start loads."""
        self.ready = asyncio.Event()
        """Clear while a server was started and nothing was published to it yet."""
        self.ready.set()
        self.least = 0
        """Tokens that a server must take to join later."""
        self.republish: Callable[[], Awaitable[None]] | None = None
        """Recovers, and brings the current weights to every server, while nothing else is published."""
        self.failure: Exception | None = None
        """Why servers that came back could not be published to."""
        self._away: list[EngineServer] = []
        self._warnings: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._launch = launch
        self.options = options
        self.requirements = requirements
        self._restarts = 0
        self._first, self._numbers = first, itertools.count(first, every)
        self._recovering = asyncio.Lock()
        self.closed = False

    async def start(self) -> None:
        """Start or find every server, and check it against the run's requirements; one that fails ends all."""
        here = 1 if self.requirements.hosts is not None else len(self.servers)
        await together([*(self._begin(i) for i in range(here)), self._begin_elsewhere()])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        """Started or found with the block, and closed with it."""
        try:
            await self.start()
            yield self
        finally:
            await self.close()

    async def _begin_elsewhere(self) -> None:
        """Have ranks on other hosts start theirs."""
        if self.requirements.hosts is not None:
            engines = await self.requirements.hosts.start_engines(self.requirements)
            await asyncio.gather(*(self._meet(index, engine) for index, engine in enumerate(engines, 1)))

    async def _meet(self, index: int, engine: RankEngine) -> None:
        """Go on with the engine that a rank has started on its host."""
        await self.servers[index].close()
        server = self.options.client(engine.url, engine.key)
        await self._check_server(server)
        self.servers[index] = server
        self.started_elsewhere = self.started_elsewhere or engine.reattached

    async def _begin(self, index: int) -> None:
        if self._launch is None:
            await self._arrival([self.servers[index]])
        elif not await self._reattach(self._launch, index):
            await self._spawn(index)

    async def _arrival(self, servers: Sequence[EngineServer]) -> EngineServer:
        """Wait for the first external server to answer, and check it: trainer and engines may start in any order."""
        seconds, warned = self.options.start_seconds, False
        deadline, names = time.monotonic() + seconds, ", ".join(server.name for server in servers)
        # The wait's own deadline is beyond the one below, which says more.
        async with waits.waiting(waits.actor("trainer"), "an engine to answer", on=names, deadline=seconds + 10):
            while True:
                errors = await asyncio.gather(*map(self._check_server, servers), return_exceptions=True)
                if None in errors:
                    break
                if not (unreachable := [error for error in errors if isinstance(error, EngineUnreachable)]):
                    raise next(error for error in errors if error is not None)
                message = f"{unreachable[0]}; is it running? Start one by: tandem serve engine RECIPE"
                if time.monotonic() >= deadline:
                    raise EngineError(f"{message} (engine.start_seconds: {seconds:g})") from unreachable[0]
                if not warned:
                    log.warning("%s; it is waited for", message)
                    warned = True
                await asyncio.sleep(LOOK_SECONDS)
        server = servers[errors.index(None)]
        if warned:
            log.warning("%s answers", server.name)
        return server

    async def _reattach(self, launch: Launch, index: int) -> bool:
        """Go on with an engine that an earlier trainer of this run left behind, if it still answers."""
        record = None if launch.records is None else EngineRecord.read(self._record(launch.records, index))
        process = None if record is None else EngineProcess.reattach(record)
        if record is None or process is None:
            return False
        server = self.options.client(record.url, record.key)
        server.process = process
        try:
            await server.get("/health", dict)
            await server.post("/bridge/adopt", wire.Reattach(trainer=launch.trainer))
            await self._check_server(server)
        except (EngineError, Deadline) as error:
            log.warning("%s, left by an earlier trainer, cannot be used, so another is started: %s", server.name, error)
            await server.close()
            await process.stop()
            return False
        log.info("going on with %s, which an earlier trainer started", server.name)
        await self.servers[index].close()
        self.servers[index], self.started_elsewhere = server, True
        return True

    async def _spawn(self, index: int) -> None:
        """Start a server, again if it is killed meanwhile: an error of its own would only come again."""
        while True:
            try:
                return await self._start(index)
            except EngineError as error:
                process = self.servers[index].process
                if process is None or not process.killed or self._restarts >= self.options.restarts:
                    raise
                self._restarts += 1
                log.warning("%s; starting it again", str(error).splitlines()[0])

    async def _start(self, index: int) -> None:
        launch, server = self._launch, self.servers[index]
        assert launch is not None
        sharing.remove_orphans()  # shared memory of an engine that was killed stays until it is removed
        process = server.process = EngineProcess.start(
            launch.command(self._loadable(), urlsplit(server.url).port or 0, next(self._numbers)),
            launch.environment(index, server.key),
            launch.log / f"engine-{self._first + index}.log",
        )
        self._note(launch, index)  # at once: a trainer that dies during the start must leave a trace
        try:
            seconds = self.options.start_seconds
            # It has a deadline of its own, and says more when that has passed.
            async with waits.waiting(waits.actor("trainer"), "its start", on=server.name, deadline=seconds + 10):
                await process.wait_healthy(server.url, seconds)
            self._note(launch, index)
            await self._check_server(server)
        except BaseException:
            await process.stop()
            raise

    def _loadable(self) -> str:
        """What the next start loads: the checkpoint that a run went on from, until that is pruned, and then the model.

        Which of them does not matter, since the current weights are published to it.
        """
        weights = self.requirements.weights
        pruned = weights is not None and self.model == str(weights) and not weights.exists()
        return self.requirements.model if pruned else self.model

    def _record(self, folder: Path, index: int) -> Path:
        return folder / f"engine-{self._first + index}.json"

    def _note(self, launch: Launch, index: int) -> None:
        server = self.servers[index]
        if launch.records is not None and server.process is not None:
            server.process.record(server.url, server.key).write(self._record(launch.records, index))

    async def _check_server(self, server: EngineServer) -> None:
        try:
            info = await server.info()
        except (EngineUnreachable, ApiKeyRefused):
            raise
        except EngineError as error:
            raise EngineError(
                f"{error}; engine.urls need vLLM's server or Tandem's, started by: tandem serve engine RECIPE"
            ) from error
        server.instance_id = info.engine
        if reason := server.lacks(self.requirements):
            raise EngineError(reason)
        if info.logprobs != "processed_logprobs":
            raise EngineError(f"{server.name} gives {info.logprobs}; start it with --logprobs-mode processed_logprobs")
        if self.requirements.payload == "adapter" and not info.adapters:
            raise EngineError(f"{server.name} was started without adapters; start it with --enable-lora")
        if info.context < self.least:
            raise EngineError(f"{server.name} takes {info.context} tokens and this run needs {self.least}")
        self.context = min(self.context or info.context, info.context)

    def dead(self) -> list[EngineProcess]:
        """Processes started here that have ended."""
        processes = [server.process for server in self.servers if server.process is not None]
        return [process for process in processes if not process.alive()]

    def restarts_of(self, server: EngineServer) -> bool:
        """Whether a server is started again where it dies: here, or by its rank."""
        return server.process is not None or (self.requirements.hosts is not None and self.ours)

    async def recover(self) -> bool:
        """Start dead servers of ours again, and go on without those of others; False if nothing is to be published to.

        Raises:
            EngineError: it happened too often, or all servers of others stay away.
        """
        async with self._recovering:
            if self.closed:
                return False
            if self._launch is None:
                return await self._regroup()
            dead = [i for i, s in enumerate(self.servers) if self.restarts_of(s) and await s.gone()]
            if not dead:
                return False
            self.ready.clear()
            self._restarts += 1
            for index in dead:
                await self._restart(index)
            self.restart_count += 1
            return True

    async def _restart(self, index: int) -> None:
        """Start a dead server again, or have its rank do so."""
        server = self.servers[index]
        if server.process is None:
            reason, summary = "does not answer", ""
        else:
            alive = server.process.alive()  # vLLM's server outlives its scheduler by some seconds
            reason = "lost the process of its scheduler" if alive else server.process.exit_reason()
            summary = server.process.log_summary()
        if self._restarts > self.options.restarts:
            raise EngineError(
                f"{server.name} {reason}, and engine.restarts allows {self.options.restarts} restarts{summary}"
            )
        log.warning("%s %s; starting it again", server.name, reason)
        if server.process is not None:
            await server.process.stop()
            await self._spawn(index)
        else:
            assert self.requirements.hosts is not None
            await self._meet(index, await self.requirements.hosts.restart_engine(index))

    async def settled(self) -> None:
        """Wait for the end of a recovery that is under way."""
        async with self._recovering:
            return

    async def _regroup(self) -> bool:
        """Go on with the external servers that respond; False if they are the same. Nothing may be published meanwhile.

        One that came back, or that is another process than before, has no weights of ours yet.
        """
        before = [(server.url, server.instance_id) for server in self.servers]
        every = [*self.servers, *self._away]
        answers = await asyncio.gather(*(self._answers(server, patient=server in self.servers) for server in every))
        reachable = [server for server, does in zip(every, answers, strict=True) if does]
        if not reachable:
            reachable = [await self._arrival(every)]
        elif names := ", ".join(server.name for server in self.servers if server not in reachable):
            log.warning("%s does not answer; the other engines take over until it does", names)
        self._away = [server for server in every if server not in reachable]
        for server in self._away:
            server.leave()
        if before == [(server.url, server.instance_id) for server in reachable]:
            return False
        self.servers[:] = reachable
        self.ready.clear()
        self.restart_count += 1
        return True

    async def _answers(self, server: EngineServer, *, patient: bool = False) -> bool:
        """True if an external server can be used; ``patient``: broken connections are tried again."""
        try:
            if patient and await server.gone():
                return False
            await self._check_server(server)
        except (EngineUnreachable, Deadline):
            return False
        except EngineError as error:  # a server responds, but not as this run needs it
            if str(error) not in self._warnings:
                log.warning("%s; it is left out", error)
            self._warnings.add(str(error))
            return False
        return True

    def watch(self, republish: Callable[[], Awaitable[None]]) -> None:
        """Have ``republish`` bring the weights back to servers that lose them; it replaces one named before."""
        self.republish = republish
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.create_task(self._watch(republish), name="engine health")

    async def _watch(self, republish: Callable[[], Awaitable[None]]) -> None:
        """Republish to engines that died, restarted or returned, also while nobody asks them for tokens.

        A run that takes its groups from a broker asks its engines for nothing between two publishes. One that died and
        came back holds no weights of the run, what is sampled from it is too old to be trained on, and so no next
        publish would ever come. Where it cannot be brought back, waits for groups raise ``failure``.
        """
        try:
            while True:
                await asyncio.sleep(HEALTH_SECONDS)
                if self.ready.is_set() and (await self._returned() or await self._lost_weights()):
                    await republish()
        except Exception as error:  # requests for tokens and waits for groups raise it, and so does a publish
            log.error("the engines cannot be brought back: %s", error)
            self.failure = error
            self.ready.set()

    async def _returned(self) -> bool:
        """True if an external server that was away answers again."""
        answers = await asyncio.gather(*(self._answers(server) for server in self._away))
        names = ", ".join(server.name for server, does in zip(self._away, answers, strict=True) if does)
        if names:
            log.warning("%s answers again; publishing the current weights to it", names)
        return bool(names)

    async def _lost_weights(self) -> bool:
        """True if a server answers as another process than was published to, or one that is started again has died.

        Of external servers also if none answers: a publish to them waits until one does, and not for ever.
        """
        away = 0
        for server in self.servers:
            try:
                health = await server.get("/health", dict)
            except EngineUnreachable:
                # A process of ours may be busy; one on another host is its rank's to look at.
                if self.restarts_of(server) and (server.process is None or not server.process.alive()):
                    return True
                away += 1
            except (EngineError, Deadline):
                continue  # stopped for a reason of its own
            else:
                if health.get("engine", server.instance_id) != server.instance_id:
                    return True
        return not self.ours and away == len(self.servers)

    async def relaunch(self) -> None:
        """End every server of ours and, once its memory is free, start it on ``model``."""
        async with self._recovering:
            self.ready.clear()
            for index, server in enumerate(self.servers):
                assert server.process is not None
                await server.process.stop()
                await self._spawn(index)
            self.restart_count += 1

    async def close(self) -> None:
        """End our servers and let go of the others."""
        self.closed = True
        self.ready.set()
        if self._watching is not None:
            await cancel(self._watching)
        for server in self._away:
            await server.close()
        for index, server in enumerate(self.servers):
            await server.close()
            if server.process is not None and self._launch is not None:
                await server.process.stop()
                if self._launch.records is not None:
                    self._record(self._launch.records, index).unlink(missing_ok=True)

    @property
    def ours(self) -> bool:
        """True if the servers are ours to start and end."""
        return self._launch is not None

    async def all(self, path: str, body: Any = None) -> list[Any]:
        """Tell every server at once; the first failure is raised when all have answered."""
        return await all_ended(server.post(path, body) for server in self.servers)
