"""Plays an environment's tasks for a broker: as many groups at once as the queue has room for, each handed in once.

How much is played follows the queue, as Atropos' environments do it: up to ``ahead`` batches of what this environment
may fill lie ready or are being played. Nothing that is under way is thrown away because the queue is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from tandem.errors import BrokerError, ConfigError, Deadline, EngineError, TandemError
from tandem.observability import waits
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.source import Draw
from tandem.rollout.task_sampler import TaskOrder
from tandem.rollout.turns import unrecorded_options
from tandem.together import cancel
from tandem.types import Group, Task
from tandem_broker.client import EnvClient, Receipt, RequestRefused
from tandem_broker.protocol.messages import EnvStatus, Info
from tandem_broker.recipe import Work

log = logging.getLogger(f"tandem.{__name__}")

IN_A_ROW = 3
"""Groups that fail one after the other before giving up: what ails them is not theirs."""


@dataclass(slots=True)
class GroupTally:
    """Counts of groups by outcome since the start."""

    groups: Counter[str] = field(default_factory=Counter)
    """By fate: sent, zero_variance, failed (a sibling without a reward, or too late), refused, lost and dropped (at the
    end)."""
    rewards: tuple[int, float] = (0, 0.0)
    """Rollouts with a reward since the last line, and their sum."""

    def line(self) -> str:
        """In words, for a person."""
        counts = [(self.groups[fate], fate) for fate in ("zero_variance", "failed", "refused", "lost", "dropped")]
        others = ", ".join(f"{count} {fate.replace('_', '-')}" for count, fate in counts if count)
        return f"{self.groups['sent']} groups sent" + (f" ({others})" if others else "")


@dataclass(slots=True, kw_only=True)
class Producer:
    """One environment at work."""

    worker: GroupRunner
    """Plays."""
    tasks: TaskOrder
    """What there is to play, in an order of its own for every registration."""
    client: EnvClient
    """The broker; open."""
    config: Work
    """What is played, how, and how much of it."""
    limit: Callable[[int], None] = lambda tokens: None
    """Told the most tokens that the trainer takes of one sequence."""
    tally: GroupTally = field(default_factory=GroupTally)
    """What became of it."""
    poll_seconds: float = 0.5
    """Between two looks at the queue."""
    drain_seconds: float = 30.0
    """How long groups under way may take to finish after a stop; the rest is dropped."""
    log_seconds: float = 10.0
    """Between two lines about how it goes."""
    _numbers: Iterator[int] = field(default_factory=count)
    _info: Info = field(default_factory=lambda: Info(batch_size=-1, max_token_len=-1))
    _info_of_registration: int = -1
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _in_a_row: int = 0
    _finished: int = 0
    _failure: BaseException | None = None
    _logged_at: float = -math.inf
    _nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    async def run(self, stop: asyncio.Event) -> None:
        """Play until the trainer has all it wanted, or until ``stop``; then finish what is under way.

        Raises:
            ConfigError: groups do not fit into the trainer's batches.
            EngineError: the engines fail, or stay away.
            BrokerError: the broker refuses group after group, or stays away.
            Deadline: group after group takes too long, or the broker does; names both parts of the wait.
        """
        playing, stopped = asyncio.ensure_future(self._keep_playing()), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((playing, stopped), return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            playing.cancel()
            if stop.is_set() and self._running:
                seconds = self.drain_seconds
                log.info("finishing %d groups, for %g s at most; Ctrl-C again drops them", len(self._running), seconds)
                await asyncio.wait(self._running, timeout=seconds)
        finally:
            self.tally.groups["dropped"] += len(self._running)
            await cancel(playing, stopped, *self._running)

    async def _keep_playing(self) -> None:
        ticket = await self.client.register()
        self.tasks.label = f"{ticket.wandb_name}/{ticket.starting_step}/"
        while self._failure is None:
            status = await self.client.status()
            await self._refresh_info()
            if self._is_finished(status):
                name = self.client.spec.desired_name
                log.info("%s: the trainer has taken %d steps: %s", name, status.current_step, self.tally.line())
                return
            for _ in range(self.wanted(status) - len(self._running)):
                self._start()
            self._log_progress(status)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.poll_seconds):
                    await self._changed.wait()
        raise self._failure

    async def _refresh_info(self) -> None:
        """Learn the run's parameters, again where the broker or the trainer may have changed."""
        if self._info_of_registration == self.client.registrations and self._info.batch_size > 0:
            return
        self._info = await self.client.info()
        self._info_of_registration = self.client.registrations
        batch, size = self._info.batch_size, self.config.group_size
        if self._info.max_token_len > 0:
            self.limit(self._info.max_token_len)
        if 0 < batch < size:
            raise ConfigError(f"group_size is {size}, a batch has {batch} sequences; lower group_size to {batch}")
        if batch > 0 and batch % size:
            log.warning("batches of %d are no multiple of group_size %d: others must fill them up", batch, size)

    def _is_finished(self, status: EnvStatus) -> bool:
        most = self.config.total_steps
        if most is None and self.client.ticket is not None:
            most = self.client.ticket.num_steps
        return most is not None and most > 0 and status.current_step >= most

    def wanted(self, status: EnvStatus) -> int:
        """How many groups should be under way."""
        batch, share = self._info.batch_size, self.client.spec.min_batch_allocation or 0.0
        if batch <= 0:
            return 0
        allowed = int(batch * min(1.0, status.unallocated_fraction + share))
        room = int(self.config.ahead * allowed / self.config.group_size) - status.queue_size
        # A guaranteed share is filled even while others fill the queue.
        guaranteed = math.ceil(self.config.ahead * int(batch * share) / self.config.group_size) - status.self_queue_size
        most = max(1, round(self.config.n * min(1.0, status.env_weight)))
        return max(0, min(most, max(room, guaranteed)))

    def _start(self) -> None:
        draw = next(self._numbers)
        task, name = self.tasks.of(Draw(self.tasks.name, draw))
        playing = asyncio.create_task(self._play(draw, task, name), name=f"group {draw}")
        self._running.add(playing)
        playing.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        self._changed.set()

    async def _play(self, draw: int, task: Task, name: str) -> None:
        """Consumes: a task. Waits for: the engine, the graders, the broker."""
        finished, in_a_row = self._finished, self._in_a_row
        try:
            await self._hand_in(await self._run_group(task, name, draw))
        except Deadline as error:
            # Those that were late together count as one, and not at all where others came through meanwhile.
            late = in_a_row + 1 if self._finished == finished else 0
            self._failed("failed", name, error, max(self._in_a_row, late))
        except (EngineError, BrokerError) as error:
            self._failed("refused" if isinstance(error, RequestRefused) else "failed", name, error, self._in_a_row + 1)

    async def _run_group(self, task: Task, name: str, draw: int) -> Group:
        """Play a group.

        Raises:
            Deadline: it took longer than ``group_seconds``, or one of its waits too long; names both parts.
        """
        seconds, worker = self.config.group_seconds, f"tandem work {self.client.spec.desired_name}"
        async with waits.waiting(worker, "a whole group", on=f"rollouts group {name}") as wait:
            # While those that it waits for are there, so before it is cancelled.
            telling = asyncio.get_running_loop().call_later(seconds, wait.sentence)
            try:
                async with asyncio.timeout(seconds):
                    return await self.worker.run(
                        task, id=name, index=draw, size=self.config.group_size, sampling=self.config.sampling
                    )
            except TimeoutError as error:
                raise Deadline(f"{wait.sentence()}; group_seconds is {seconds:g}", on=wait.on) from error
            finally:
                telling.cancel()

    def _failed(self, fate: str, name: str, error: TandemError, in_a_row: int) -> None:
        log.warning("group %s is lost: %s", name, error)
        self.tally.groups[fate] += 1
        self._in_a_row = in_a_row
        if in_a_row >= IN_A_ROW:
            self._failure = self._failure or error

    async def _hand_in(self, group: Group) -> None:
        rewards = [r.reward for r in group.scored if r.reward is not None]
        num, total = self.tally.rewards
        self.tally.rewards = (num + len(rewards), total + math.fsum(rewards))
        if len(group.scored) < self.config.group_size:
            # A broker joins odd groups to whole ones only by luck; until then they would lie there.
            why = next((r.error for r in group.rollouts if r.error), "no reward")
            level = logging.DEBUG if self.tally.groups["failed"] else logging.WARNING
            log.log(level, "group %s is left out: %d of %d answers have a reward: %s", group.id, len(rewards),
                    self.config.group_size, why)  # fmt: skip
            self.tally.groups["failed"] += 1
        elif self.config.zero_variance_groups == "drop" and group.zero_variance:
            self.tally.groups["zero_variance"] += 1
        else:
            self.tally.groups["lost" if await self._submitted(group) == "lost" else "sent"] += 1
        self._in_a_row = 0
        self._finished += 1

    async def _submitted(self, group: Group) -> Receipt:
        """Hand a group in, again where the broker put it off for too long: that it answers at all is seen elsewhere."""
        key, options = f"{self._nonce}/{group.index}", unrecorded_options(self.config.sampling)
        while True:
            try:
                return await self.client.submit(group, key, options)
            except Deadline as late:
                if self.client.connection.speaks != "tandem":  # which would not know that it is the same
                    log.warning("group %s may be lost: %s", group.id, late)
                    return "lost"
                log.warning("group %s is handed in again: %s", group.id, late)

    def _log_progress(self, status: EnvStatus) -> None:
        now = time.monotonic()
        if now - self._logged_at < self.log_seconds:
            return
        self._logged_at = now
        (num, total), self.tally.rewards = self.tally.rewards, (0, 0.0)
        mean = f"; mean reward {total / num:.3f}" if num else ""
        most = self.config.ahead * max(0, self._info.batch_size) / self.config.group_size
        queued = f"{status.queue_size} queued of {most:g}"
        log.info("%s at step %d: %s; %d being played, %s%s", self.client.spec.desired_name, status.current_step,
                 self.tally.line(), len(self._running), queued, mean)  # fmt: skip
