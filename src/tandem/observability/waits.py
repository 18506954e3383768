"""Registry of waits: which part waits for which, and since when, across processes and threads.

Past its deadline a wait raises and names the part that did not deliver, so that nothing hangs in silence. A wait
without a deadline of its own has the run's ``timeouts`` (``observability/watchdog.py``). Standard library only: any
module may import this one.

Names chain: a wait that begins within another one explains it, and so does one whose ``owner`` is, or is of the kind,
that another waits ``on``. ``actor`` is for code that waits on behalf of its caller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

from tandem.errors import Deadline

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG = 10.0
"""Seconds after which listeners are told of a wait that fails."""

State = Literal["done", "cancelled", "failed", "deadline"]
"""done: it was answered; cancelled: its owner was, as by Ctrl-C; failed: it ended by an error; deadline: it did not
come in time."""

_last = 0
_lock = threading.Lock()
_within: ContextVar[Wait | None] = ContextVar("within", default=None)


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """One registered wait."""

    owner: str
    """What waits: trainer, feed, sync."""
    reason: str
    """What for: the next batch, a healthy engine."""
    on: str
    """What has to deliver it: rollouts, engine http://127.0.0.1:8000 (pid 4711)."""
    deadline: float | None = None
    """Seconds it may last without progress; None is for as long as the run has patience."""
    since: float = field(default_factory=time.monotonic)
    """When it began, on the monotonic clock."""
    moved: float = field(default_factory=time.monotonic)
    """When it last came nearer to its end."""
    number: int = 0
    """Its name in this process, given when it is registered; later ones have higher numbers."""
    outer: Wait | None = None
    """The wait that it began in."""
    task: asyncio.Task[Any] | None = None
    """Whose it is; None in a thread."""
    give_up: Callable[[], None] | None = None
    """Ends it as late, from any thread; None where nothing can, as in a thread."""
    _sentence: str = ""
    _late: bool = False

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.since

    @property
    def within(self) -> int | None:
        """Number of the wait that it began in."""
        return None if self.outer is None else self.outer.number

    def snapshot(self) -> OpenWait:
        """As another process may know it."""
        left = None if self.deadline is None else round(self.moved + self.deadline - time.monotonic(), 3)
        return OpenWait(
            number=self.number, within=self.within, owner=self.owner, on=self.on, reason=self.reason,
            seconds=round(self.seconds, 3), left=left,
        )  # fmt: skip

    def late(self) -> Deadline:
        """The error of a passed deadline."""
        self._late = True
        return Deadline(self.sentence(), on=self.on)

    def sentence(self) -> str:
        """One sentence on what waited for what, as of its first call."""
        if not self._sentence:
            limit = "" if self.deadline is None else f", but the deadline is {self.deadline:g} s"
            waited = time.monotonic() - self.moved
            self._sentence = f"{self.owner} waited {waited:.1f} s for {self.on} ({self.reason}){limit}"
            if len(links := parties(self)) > 2:
                self._sentence += f"; who waits for whom: {' <- '.join(links)}"
        return self._sentence


Listener = Callable[[Wait, State], None]

_open: dict[Wait, None] = {}
_listeners: list[Listener] = []


def current() -> list[Wait]:
    """Open waits of this process, longest first."""
    with _lock:
        return list(_open)


def begun() -> int:
    """Number of waits ever registered in this process."""
    return _last


def actor(otherwise: str) -> str:
    """The part that acts here: the one that the enclosing wait is for, or ``otherwise`` outside of all waits."""
    wait = _within.get()
    return otherwise if wait is None or wait not in _open else wait.on


def progress() -> None:
    """Restart the deadlines of all enclosing waits."""
    wait, now = _within.get(), time.monotonic()
    while wait is not None:
        wait.moved = now
        wait = wait.outer


def parties(wait: Wait) -> list[str]:
    """Names of all parts in the chain of this wait, from its first owner to the part that itself waits for nothing."""
    every, before = current(), [wait]
    while True:
        first = before[0]
        outer = first.outer if first.outer in _open else None
        if outer is None:
            outer = next((one for one in every if one not in before and is_part(one.on, first.owner)), None)
        if outer is None or outer in before:
            break
        before.insert(0, outer)
    links = [before[0].owner]
    for one in [*before, *chain(wait, every)[1:]]:
        links += [name for name in (one.owner, one.on) if name != links[-1]]
    return links


def listen(listener: Listener) -> Callable[[], None]:
    """Tell the listener of every wait that passes its deadline, or fails after ``LONG`` seconds; from any thread.

    Returns:
        A function that stops it.
    """
    with _lock:
        _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def waiting(owner: str, reason: str, on: str, deadline: float | None = None) -> AbstractAsyncContextManager[Wait]:
    """Register a wait for as long as the block lasts, in a coroutine.

    Args:
        owner: what waits.
        reason: what for.
        on: what has to deliver it.
        deadline: seconds without progress after which the block is cancelled; None: the run's patience.

    Raises:
        Deadline: the block did not end in time.
    """
    return _TaskWait(Wait(owner=owner, reason=reason, on=on, deadline=deadline))


class _TaskWait:
    """A task's wait. A rollout has several, so it uses no generator, and a timer only if there is a deadline."""

    __slots__ = ("_cancelling", "_expired", "_loop", "_task", "_timer", "_token", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    async def __aenter__(self) -> Wait:
        wait, loop = self._wait, asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError(f"{wait.owner} waits for {wait.on} outside of a task; await it in one")
        self._loop, self._task, self._cancelling = loop, task, task.cancelling()
        wait.task, wait.give_up = task, self._give_up
        self._token = _begin(wait)
        if wait.deadline is not None:
            self._timer = loop.call_later(max(0.0, wait.deadline), self._expire)
        return wait

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait = self._wait
        if self._timer is not None:
            self._timer.cancel()
        wait.give_up = None  # else the two would keep each other
        if self._expired:
            # As asyncio.timeout: a task that was cancelled from elsewhere too stays cancelled.
            only_expired = self._task.uncancel() <= self._cancelling
            if (only_expired and isinstance(error, asyncio.CancelledError)) or isinstance(error, TimeoutError):
                late = wait.late()
                _end(wait, self._token, "failed")
                raise late from error
        _end(wait, self._token, _ending(kind))

    def _give_up(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._expire)

    def _expire(self) -> None:
        """Cancel the task if the deadline has passed without progress."""
        wait = self._wait
        if self._expired or wait not in _open:
            return
        left = 0.0 if wait.deadline is None else wait.moved + wait.deadline - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._expire)
            return
        wait.sentence()  # while those that it depends on are there
        self._expired = True
        self._task.cancel()


async def wait(awaitable: Awaitable[T], *, owner: str, reason: str, on: str, deadline: float | None = None) -> T:
    """Await something as a registered wait; see `waiting`.

    Raises:
        Deadline: it did not arrive in time; the awaitable is cancelled.
    """
    async with waiting(owner, reason, on, deadline):
        return await awaitable


@contextmanager
def blocking(owner: str, reason: str, on: str, deadline: float | None = None) -> Iterator[Wait]:
    """Register a wait of a thread. A thread cannot be cancelled: what it calls has to end by the deadline.

    ::

        with waits.blocking("sync", "the new engine", "engine", deadline=60) as wait:
            if not healthy.wait(60):
                raise wait.late()
    """
    wait = Wait(owner=owner, reason=reason, on=on, deadline=deadline, task=_task())
    token = _begin(wait)
    kind: type[BaseException] | None = None
    try:
        yield wait
    except BaseException as error:
        kind = type(error)
        raise
    finally:
        _end(wait, token, _ending(kind))


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None


def _begin(wait: Wait) -> Token[Wait | None]:
    global _last
    outer = _within.get()
    wait.outer = outer if outer in _open else None
    token = _within.set(wait)
    with _lock:
        _last += 1
        wait.number = _last
        _open[wait] = None
    return token


def _ending(kind: type[BaseException] | None) -> State:
    """State of a wait whose block was left by this exception."""
    if kind is None:
        return "done"
    return "cancelled" if issubclass(kind, (asyncio.CancelledError, KeyboardInterrupt)) else "failed"


def _end(wait: Wait, token: Token[Wait | None], state: State) -> None:
    if state != "done" and wait._late:  # a late wait inside this one fails it, but is not its own lateness
        state = "deadline"
    with _lock:
        _open.pop(wait, None)
    try:
        _within.reset(token)
    except ValueError:  # an asynchronous generator may be closed in another context than it began in
        _within.set(None)
    if state == "deadline" or (state == "failed" and wait.seconds >= LONG):
        for listener in list(_listeners):
            try:
                listener(wait, state)
            except Exception:
                logger.exception("a listener of waits failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWait:
    """A wait as a heartbeat tells it to other processes."""

    number: int
    """By which waits name one another in ``within``."""
    within: int | None
    """The wait that this one is part of."""
    owner: str
    """The part that waits."""
    on: str
    """The part that has to deliver."""
    reason: str
    """What for."""
    seconds: float
    """How long it has lasted."""
    left: float | None
    """Seconds until its deadline; None: it has none."""


L = TypeVar("L", Wait, OpenWait)


def chain(wait: L, every: Sequence[L]) -> list[L]:
    """Chain of waits from one to the last, whose awaited part does not itself wait, or which closes a circle.

    Args:
        wait: the first.
        every: all there are, longest first; among several that explain one the longest is taken.
    """
    links = [wait]
    while True:
        last = links[-1]
        inner = [wait for wait in every if wait.within == last.number and wait not in links]
        named = inner or [wait for wait in every if wait not in links and is_part(last.on, wait.owner)]
        if not named:
            return links
        links.append(named[0])


def is_part(party: str, owner: str) -> bool:
    """True if the owner of a wait is this part (``rollouts``) or one of its kind (``rollouts group 12``)."""
    return owner == party or owner.startswith(f"{party} ")
