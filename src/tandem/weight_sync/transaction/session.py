"""The publish transaction: pause, transfer, verify, set_version, resume; again where an engine dies under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self, TypeVar

from tandem.engines.base import ReportsChecksums, UnmappedWeights
from tandem.errors import EngineError, StaleWeights, TandemError, UnsupportedPair
from tandem.lazy import torch
from tandem.metrics import Max, Sum, Value
from tandem.observability import waits
from tandem.transport.checksums import digest
from tandem.transport.sharing import finish
from tandem.types import PolicyVersion
from tandem.weight_sync.base import SyncContext, SyncState, WeightSync
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.checksums import Checksums, compare_checksums, compare_frozen
from tandem.weight_sync.verify.probe import Behaviour, ProbeAnswers, Rollouts

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""Attempts at one publish whose engine dies."""

REQUESTS_DELAY = 0.01
"""Seconds in which a paused engine is told what comes, before the next requests are made: that takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Version, bytes and seconds of one publish."""

    version: PolicyVersion
    """Version of the policy now, which the engine serves if it was published."""
    moved: bool = True
    """False if this step was not published: the engine goes on with an older one."""
    seconds: float = 0.0
    """From pause to resume, without the optimizer's own time."""
    bytes: int = 0
    """Bytes that were copied; 0 where nothing was."""
    paused: float = 0.0
    """Seconds the engine sampled nothing."""
    probe_gap: float = 0.0
    """Largest difference of the probe's logprobs between engine and trainer."""
    probe_alone: bool = False
    """The engine could not checksum its bytes, so that the probe alone verified it."""


@dataclass(slots=True, kw_only=True)
class Commit:
    """Handle of a commit for the block that runs the optimizer."""

    published: Published | None = None
    """Set when the block is left and the publish succeeded."""
    unverified: PolicyVersion | None = None
    """The policy's version, before it is verified that engines hold it."""
    free_slots: Callable[[], None] | None = None
    """Frees the slots of the batch that is trained; None where the caller does that later."""
    began: float | None = None
    """When the engine was paused for the optimizer, later by the time that this took; None: it was not."""

    def accept_requests(self) -> None:
        """Free the slots of the batch: requests from now on are served by the new weights. Again does nothing."""
        free_slots, self.free_slots = self.free_slots, None
        if free_slots is not None:
            free_slots()

    def metrics(self) -> Mapping[str, Value]:
        """Metrics of this publish."""
        if self.published is None or not self.published.moved:
            return {}
        p = self.published
        return {"seconds/sync": Sum(p.seconds), "engine/paused_seconds": Sum(p.paused), "probe_gap": Max(p.probe_gap)}


@dataclass(slots=True, kw_only=True)
class WeightSyncSession(SyncContext):
    """A live weight-sync session between one policy and one engine.

    Entered before it is bound: what ends it then leaves the old version serving, or an engine that gives out nothing.
    """

    sync: WeightSync
    _bound: int = -1
    """Start of the engine that is bound: the memory of another is at other addresses."""
    _published: int = -1
    """Start of the engine that serves the published weights; another serves those it started on."""
    _current: PolicyVersion | None = None
    _behaviour: Behaviour = field(init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.trained = Trained(self.trainable, self.policy) if self.ranks is None else self.ranks.trained()
        self._behaviour = Behaviour(self.trained, self.policy, self.trainable, self.sync.tolerance, self.folder)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.abort(f"its trainer ended before it had published: {error or 'it was stopped'}")
        finally:
            await self.sync.unbind(self)

    async def abort(self, reason: str) -> None:
        """Leave the old version serving; where values may have been written, an engine that gives out nothing."""
        with contextlib.suppress(TandemError):  # what led here is the one to tell
            match self.state.state:
                case SyncState.WRITING:
                    self.state.become(SyncState.STOPPED)
                    await self.engine.stop(reason)
                case SyncState.PAUSED:
                    self.state.become(SyncState.SERVING)
                    await self.engine.resume_unchanged(reason)

    async def bind(self, *, fresh: bool) -> None:
        """Tie both ends together, before the optimizer is bound: the weights may move to the engine's memory."""
        await self._repeat(lambda: self._bind(fresh=fresh), "the engine is bound again")

    async def _bind(self, *, fresh: bool) -> None:
        if self.engine.sleeps > 1 and (frozen := sorted(self.trained.frozen)):
            raise UnsupportedPair(
                f"engine.sleep: 2 discards every weight, and {len(frozen)} of them are not trained, so no publish "
                f"brings them back, first {frozen[0]!r}; use engine.sleep: 1"
            )
        self.fresh = fresh
        await self.sync.bind(self)
        self._bound = self.engine.restart_count

    @property
    def _is_bound(self) -> bool:
        return self._bound == self.engine.restart_count

    @property
    def _is_published(self) -> bool:
        return self._published == self.engine.restart_count

    async def _repeat(self, work: Callable[[], Awaitable[T]], again: str) -> T:
        """Await ``work``; repeat it, saying ``again``, if the engine died meanwhile and was restarted.

        Raises:
            EngineError: the engine does not come back, or died ``ATTEMPTS`` times.
        """
        for _ in range(ATTEMPTS - 1):
            before = self.engine.restart_count
            try:
                return await work()
            except EngineError as error:
                # A request in flight may have seen to its restart.
                if not await self.engine.recover() and self.engine.restart_count == before:
                    raise
                log.warning("%s: %s", again, str(error).splitlines()[0])
        return await work()

    @asynccontextmanager
    async def open(self, start: PolicyVersion) -> AsyncIterator[WeightSyncSession]:
        """Publish the starting version and verify it.

        Raises:
            StaleWeights, TornWeights: verification failed.
        """
        self.engine.on_restart(self.recover)
        async with self._lock:
            await self._publish(start, Commit())
        yield self

    def accept_requests_for(self, step: int, free_slots: Callable[[], None]) -> None:
        """Free the slots at once if the engine lets new requests wait for the policy that ``commit`` is to publish."""
        stays = self.sync.due(step, last=False) and not self.sync.finishes and not self.engine.sleeps
        if stays and self.engine.accept_requests_for(step):
            free_slots()

    @asynccontextmanager
    async def commit(
        self, step: int, *, free_slots: Callable[[], None] | None = None, last: bool = False, recent: Rollouts = ()
    ) -> AsyncIterator[Commit]:
        """``[pause: step] -> optimizer (block) -> [pause: transfer] -> transfer -> verify -> set_version -> resume``.

        If the block or the verification fails, the engine gives out nothing more: it never serves weights in doubt.

        Args:
            step: of the policy that the block makes.
            free_slots: lets the next requests be made; called once those made from then on are served by this
                policy: as the engine is paused, or else after the publish. None: nothing is to be requested yet.
            last: it is the run's last.
            recent: a few rollouts, for further probes of an engine whose proof is in doubt.
        """
        async with self._lock:
            self._behaviour.recent = recent
            commit = Commit(free_slots=free_slots)
            if self.sync.pause == "step":
                commit.began = time.monotonic()
                await self._repeat(lambda: self._pause_for(step), "the engine is paused again")
                self.state.write()
                commit.accept_requests()
            optimizer_at = time.monotonic()
            yield commit
            if commit.began is not None:
                commit.began += time.monotonic() - optimizer_at
            if self.sync.due(step, last=last):
                commit.published = await self._publish(PolicyVersion(step=step, digest=""), commit)
            else:
                await self._fold()
                self._current = PolicyVersion(step=step, digest=digest(await self.trained.checksums()))
                commit.published = Published(version=self._current, moved=False)
            commit.accept_requests()

    async def _fold(self) -> None:
        """Bring the weights that are computed with up to date with the parameters, on every rank, and wait for it."""
        folding = self.policy.compute(self._fold_here)
        await (folding if self.ranks is None or not self.trainable.folds else self.ranks.fold(folding))

    def _fold_here(self) -> None:
        self.trainable.fold(self.policy.model)
        finish(self.policy.device)

    async def sleep(self) -> None:
        """Let an engine that is to sleep while a step is trained do so, until the next publish; others go on."""
        if self.engine.sleeps:
            async with self._lock:
                await self._repeat(self._sleep, "the engine is put to sleep again")

    async def _sleep(self) -> None:
        await self.pause(finish=True)
        await self.engine.sleep()

    async def _wake(self) -> None:
        """Wake the engine for a publish, in the memory that the training pass left free."""
        if self.engine.sleeps:
            await self.policy.compute(torch.cuda.empty_cache)
            await self.engine.wake()

    async def recover(self) -> None:
        """Publish the policy's weights to an engine that was restarted; they may be newer than those it served."""
        async with waits.waiting(waits.actor("engine"), "weights after a start", on="publish"), self._lock:
            await self.engine.recover()
            if self._current is not None and not self._is_published:
                await self._publish(self._current, Commit())

    async def _publish(self, version: PolicyVersion, commit: Commit) -> Published:
        """Publish; repeat it if an engine dies meanwhile."""
        async with waits.waiting(waits.actor("trainer"), f"version {version.step} to be published", on="publish"):
            again = f"version {version.step} is published again"
            return await self._repeat(lambda: self._transaction(version, commit), again)

    async def _pause_for(self, step: int) -> None:
        async with waits.waiting(waits.actor("trainer"), "it to stand still", on="engine"):
            await self.pause(finish=self.sync.finishes, step=step)
        if not self._is_bound:  # it was started again since, so its storage is another
            await self._bind(fresh=False)

    async def _transaction(self, version: PolicyVersion, commit: Commit) -> Published:
        began = time.monotonic() if commit.began is None else commit.began
        trainer_sums: Checksums | None = None
        if self.sync.sums_before_pause:
            await self._fold()
            trainer_sums = await self.trained.checksums()
        # An engine that was paused for the optimizer still is, unless it was started again since.
        still_paused = commit.began is not None and self.state.state is SyncState.WRITING and self._is_bound
        if self.sync.pause != "never" and not still_paused:
            await self._pause_for(version.step)
            if not self.sync.finishes:  # where requests would die with the engine, later
                asyncio.get_running_loop().call_later(REQUESTS_DELAY, commit.accept_requests)
        elif not self._is_bound:
            await self._bind(fresh=False)
        # A way that never pauses lays the new version beside the old one, which is served on.
        self.state.pause()
        if self.sync.pause != "never":
            self.state.write()
        try:
            await self._wake()
            if trainer_sums is None:
                await self._fold()
            copied = await self.sync.transfer(self, version)
            version, gap = await self._verified(version, commit, trainer_sums)
            await self.engine.set_version(version)
        except BaseException as error:
            await self.abort(f"the publish of version {version.step} failed: {error}")
            raise
        paused = await self.engine.resume()
        self.state.become(SyncState.SERVING)
        self._current = version
        self._bound = self._published = self.engine.restart_count
        self.fresh = False
        return Published(
            version=version,
            seconds=time.monotonic() - began,
            bytes=copied,
            paused=paused,
            probe_gap=gap,
            probe_alone=not self.engine.sums_bytes,
        )

    async def _verified(
        self, version: PolicyVersion, commit: Commit, trainer_sums: Checksums | None
    ) -> tuple[PolicyVersion, float]:
        """Everything that a publish verifies: weights that it does not carry, the bytes of those that it does, a probe.

        Returns:
            The version with its digest, and the largest gap of a logprob.

        Raises:
            StaleWeights, TornWeights: the engine holds other weights. It gives out nothing more, the step is saved,
                and the run ends.
        """
        if not self._is_published:
            await compare_frozen(self.engine, self.trained)
        # Wrong bytes that are sampled from leave keys and values that are not finite, and those can be zeroed only
        # where no request is served meanwhile.
        async with self._probed(ask=self.sync.pause != "never") as answering:
            engines: Mapping[str, Checksums] = {}
            # In process, that ``transfer`` saw the same addresses is the comparison.
            if self.engine.sums_bytes and isinstance(self.engine, ReportsChecksums):
                try:
                    trainer_sums, stored, engines = await self.trained.sums(self.engine, trainer_sums)
                except UnmappedWeights as error:
                    log.warning("weights are proven by the probe alone: %s", error)
            if trainer_sums is None:
                trainer_sums = await self.trained.checksums()
            actual = digest(trainer_sums)
            if version.digest and version.digest != actual:
                raise StaleWeights(
                    f"the policy holds weights {actual}, but version {version.step} was {version.digest}; "
                    "the checkpoint's weights and its state do not belong together"
                )
            commit.unverified = version = PolicyVersion(step=version.step, digest=actual)
            advice = "the engine gives out nothing until a publish succeeds"
            if engines:
                compare_checksums(stored, engines, "published tensors", advice)
        answers = await (self._behaviour.ask(self.engine) if answering is None else answering)
        return version, await self._behaviour.compare(self.engine, version, answers)

    @asynccontextmanager
    async def _probed(self, *, ask: bool) -> AsyncIterator[asyncio.Task[ProbeAnswers] | None]:
        """Ask the probe while the bytes are summed, and forget it where they are wrong.

        The engine samples as soon as it is asked, and nothing of that is given out before the version is set: it need
        not stand still for the sums.
        """
        answers = asyncio.ensure_future(self._behaviour.ask(self.engine)) if ask else None
        try:
            yield answers
        except BaseException as error:
            if answers is not None:
                answers.cancel()
                (failed,) = await asyncio.gather(answers, return_exceptions=True)
                if isinstance(failed, EngineError):  # it died: what else is said of it is of one that was started again
                    raise failed from error
            raise
