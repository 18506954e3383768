"""Who waits for whom, and since when. Every wait across processes or threads is registered here.

Past its deadline a wait raises and names who was waited for, so that nothing hangs in silence; one that lasts
is told to listeners while it is still going on. Standard library only: any module may import this one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar, overload

from tandem.errors import Deadline

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG = 10.0
"""Seconds after which a wait is told to listeners."""

State = Literal["waiting", "done", "failed", "deadline"]
"""waiting: it lasts and goes on; done: it was answered; failed: it ended by an error; deadline: nobody came in time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """One registered wait."""

    owner: str
    """Who waits: trainer, feed, sync."""
    reason: str
    """What for: the next batch, a healthy engine."""
    on: str
    """Who has to deliver it: rollout workers, engine (pid 4711)."""
    deadline: float | None = None
    """Seconds it may last; None is for ever."""
    since: float = field(default_factory=time.monotonic)
    """When it began, on the monotonic clock."""

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.since

    @overload
    def left(self) -> float | None: ...

    @overload
    def left(self, at_most: float) -> float: ...

    def left(self, at_most: float | None = None) -> float | None:
        """Seconds until the deadline, for the timeout of a blocking call; None is for ever.

        Args:
            at_most: a shorter timeout, for calls that are repeated.

        Raises:
            Deadline: it has passed.
        """
        _tell_if_long(self)
        if self.deadline is None:
            return at_most
        left = self.deadline - self.seconds
        if left <= 0:
            raise self.late()
        return left if at_most is None else min(left, at_most)

    def late(self) -> Deadline:
        """The error of a passed deadline."""
        with _lock:
            _late.add(self)
        return Deadline(
            f"{self.owner} waited {self.seconds:.1f} s for {self.on} ({self.reason}), but the deadline is "
            f"{self.deadline:g} s; look at what {self.on} did last in the run's logs folder and events.jsonl"
        )


Listener = Callable[[Wait, State], None]

_lock = threading.Lock()
_open: set[Wait] = set()
_told: set[Wait] = set()
_late: set[Wait] = set()
_listeners: list[Listener] = []


def current() -> list[Wait]:
    """Waits going on now in this process, longest first."""
    with _lock:
        return sorted(_open, key=lambda wait: wait.since)


def listen(listener: Listener) -> Callable[[], None]:
    """Tell the listener of every wait that lasts ``LONG`` seconds, then and when it ends; from any thread.

    Returns:
        A function that stops it.
    """
    with _lock:
        _listeners.append(listener)

    def stop() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)

    return stop


@asynccontextmanager
async def waiting(owner: str, reason: str, on: str, deadline: float | None = None) -> AsyncIterator[Wait]:
    """Register a wait for as long as the block lasts, in a coroutine.

    Args:
        owner: who waits.
        reason: what for.
        on: who has to deliver it.
        deadline: seconds after which the block is cancelled; None is for ever.

    Raises:
        Deadline: the block did not end in time.
    """
    with _registered(Wait(owner=owner, reason=reason, on=on, deadline=deadline)) as wait:
        alarm = asyncio.get_running_loop().call_later(LONG, _tell_if_long, wait)
        limit = asyncio.timeout(deadline)
        try:
            async with limit:
                yield wait
        except TimeoutError as error:
            if limit.expired():  # any other timeout is the block's own
                raise wait.late() from error
            raise
        finally:
            alarm.cancel()


async def wait(awaitable: Awaitable[T], *, owner: str, reason: str, on: str, deadline: float | None = None) -> T:
    """Await something as a registered wait; see `waiting`.

    Raises:
        Deadline: it did not arrive in time; the awaitable is cancelled.
    """
    async with waiting(owner, reason, on, deadline):
        return await awaitable


@contextmanager
def blocking(owner: str, reason: str, on: str, deadline: float | None = None) -> Iterator[Wait]:
    """Register a wait of a thread. A thread cannot be cancelled: ask ``wait.left()`` for each timeout.

    ::

        with waits.blocking("sync", "the new engine", "engine", deadline=60) as wait:
            while not healthy():
                time.sleep(wait.left(at_most=0.1))     # raises Deadline once it is late
    """
    with _registered(Wait(owner=owner, reason=reason, on=on, deadline=deadline)) as wait:
        yield wait


@contextmanager
def _registered(wait: Wait) -> Iterator[Wait]:
    with _lock:
        _open.add(wait)
    failed = True
    try:
        yield wait
        failed = False
    finally:
        with _lock:
            # a late wait inside this one fails it, but is not its own lateness
            state: State = "done" if not failed else "deadline" if wait in _late else "failed"
            worth_telling = wait in _told or state == "deadline" or wait.seconds >= LONG
            for waits in (_open, _told, _late):
                waits.discard(wait)
        if worth_telling:
            _tell(wait, state)


def _tell_if_long(wait: Wait) -> None:
    """Tell listeners of a wait that lasts, once."""
    with _lock:
        # an alarm may ring a clock tick early
        if wait not in _open or wait in _told or wait.seconds < 0.99 * LONG:
            return
        _told.add(wait)
    _tell(wait, "waiting")


def _tell(wait: Wait, state: State) -> None:
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        try:
            listener(wait, state)
        except Exception:
            logger.exception("a listener of waits failed")
