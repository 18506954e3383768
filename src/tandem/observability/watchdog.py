"""Watchdog thread: ends a run that hangs, and names the part that is late.

Waits with a deadline end by themselves. This thread handles what asyncio cannot: a wait without a deadline that makes
no progress, an event loop that is blocked, a call in native code, a run that does not end although it must. First it
gives up the wait, so that the run unwinds as after any error; if that does not help, it writes stacks, ends the run's
child processes and then the process. It does not touch the disk before it has decided, for the disk may be what hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import Bounded, Deadline, bounded, command
from tandem.observability import vitals, waits
from tandem.processes import family, identity, kill

LOOKS = 20
"""Looks at the waits within the shortest timeout, at most a second apart."""
_DISK_SECONDS = 2.0
"""Longest time to write stacks: the disk may be what hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts(Bounded):
    """Timeouts of a run without progress; then it stops and names the parts that waited. Progress resets them."""

    wait_seconds: float = bounded(3600.0, above=0)
    """Longest that one part may wait for another that has no deadline of its own, without anything coming of it."""
    loop_seconds: float = bounded(300.0, above=0)
    """Longest that one call may hold up everything else in the trainer's process."""
    end_seconds: float = bounded(60.0, above=0)
    """How long a run that is stopped for this may take to end its parts; then its process is ended."""


class Watchdog:
    """Watches one run. ``folder`` may be set once the run has one."""

    def __init__(
        self, timeouts: Timeouts, *, loop: asyncio.AbstractEventLoop, leave: Callable[[int], None] = os._exit
    ) -> None:
        """Watch with these timeouts.

        Args:
            timeouts: of the recipe.
            loop: the run's event loop.
            leave: ends this process with an exit code.
        """
        self.folder: Path | None = None
        self._timeouts = timeouts
        self._loop = loop
        self._leave = leave
        self._thread = threading.get_ident()
        self._period = min(1.0, min(timeouts.wait_seconds, timeouts.loop_seconds, timeouts.end_seconds) / LOOKS)
        self._stacks = ""
        self._late: Deadline | None = None
        self._over = threading.Event()
        self._running_since = self._heard = time.monotonic()
        self._begun = 0
        self._abandoned: dict[waits.Wait, float] = {}
        self._ending: float | None = None

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Wrap all of a run: once a passed deadline ends it, the rest has ``end_seconds`` to unwind."""
        try:
            yield
        except BaseException as error:
            if self._late is None and (late := deadline_in(error)) is not None:
                self._late = late
                say(f"{late}; the run is stopped for it")
                self._write(str(late))
            raise

    def explain(self, late: Deadline) -> str:
        """The whole message on why a run was stopped."""
        if self.folder is None:
            return str(late)
        stacks, log = vitals.stacks(self.folder), self.folder / "logs" / "run.log"
        return f"{late}. Stacks are in {stacks}, the log in {log}; go on with: {command('train', self.folder)}"

    # The thread

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block lasts; afterwards too, if a deadline ended it and the process does not exit."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beat = vitals.Beat(self._loop, self._period)
        thread.start()
        try:
            yield
        finally:
            self._beat.stop()
            self._over.set()
            thread.join()
            if self._late is not None:
                threading.Thread(target=self._end_process, name="watchdog at exit", daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            if now - last > LOOKS / 2 * self._period:  # the whole process was stopped: all have their time anew
                self._running_since = now
            last = now
            # A timer in C: if this thread no longer runs, native code holds the interpreter.
            seconds = min(self._timeouts.loop_seconds + self._timeouts.end_seconds, threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
            self._look(now)
        faulthandler.cancel_dump_traceback_later()

    def _idle(self, moved: float, now: float) -> float:
        """Seconds since something moved, or since the process was last stopped."""
        return now - max(moved, self._running_since)

    def _look(self, now: float) -> None:
        """Give up waits that last too long; end the process where that did not help."""
        timeouts, every = self._timeouts, waits.current()
        if self._late is not None:
            self._ending = self._ending or now
            if self._idle(self._ending, now) > timeouts.end_seconds:
                self._stop(f"{self._late}; the run did not end within {timeouts.end_seconds:g} s after that")
            return
        loop_idle = self._idle(self._beat.last, now)
        self._judge_loop(loop_idle)
        # While the event loop stands still no wait can begin or be given up, nor can what a task waits for come.
        stands = loop_idle > LOOKS / 2 * self._period
        if every or stands or waits.begun() != self._begun:
            self._begun, self._heard = waits.begun(), now
        elif (idle := self._idle(self._heard, now)) > timeouts.wait_seconds:
            limit = f"{timeouts.wait_seconds:g} s (timeouts.wait_seconds)"
            self._stop(f"nothing has happened for {idle:.1f} s, and no wait is registered; the deadline is {limit}")
        for wait in every:
            if wait.give_up is None or not stands:
                self._decide(wait, self._idle(wait.moved, now), every)

    def _decide(self, wait: waits.Wait, idle: float, every: list[waits.Wait]) -> None:
        timeouts = self._timeouts
        if wait in self._abandoned:
            if idle - self._abandoned[wait] > timeouts.end_seconds:
                self._stop(f"{wait.sentence()}; and it could not be given up")
        elif wait.deadline is not None:
            if idle > wait.deadline + timeouts.end_seconds:  # what waits should have seen to that
                self._stop(wait.sentence())
        elif idle > timeouts.wait_seconds and _is_last(wait, every):
            self._stacks = self._collect_stacks()
            if wait.give_up is None:
                self._stop(wait.sentence())
            else:
                self._abandoned[wait] = idle
                wait.deadline = timeouts.wait_seconds  # for the message
                say(f"{wait.sentence()}; it is given up")
                wait.give_up()

    def _judge_loop(self, idle: float) -> None:
        """Stop if the event loop is blocked for too long: a call in a task does not return."""
        limit = self._timeouts.loop_seconds
        if idle <= limit:
            return
        task = asyncio.current_task(self._loop)
        inner = [wait for wait in waits.current() if wait.task is task]
        known = [wait for wait in inner if wait.give_up is None and wait.deadline is not None]
        if idle <= (limit := max([limit, *(wait.deadline or 0.0 for wait in known)])):
            return  # a registered call that may block for so long
        frame = sys._current_frames().get(self._thread)
        where = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "native code"
        named = f"; {inner[-1].sentence()}" if inner else ""
        self._stop(f"the event loop was held up for {idle:.1f} s in {where}, but the deadline is {limit:g} s{named}")

    # The end

    def _stop(self, why: str) -> None:
        """Explain why, and end the process and its children."""
        self._stacks = self._stacks or self._collect_stacks()
        self._write(why)
        say(self.explain(Deadline(why)))
        if (process := identity(os.getpid())) is not None:
            kill(family(process) - {process})
        self._leave(Deadline.exit_code)

    def _end_process(self) -> None:
        """End the process if the interpreter, while exiting, waits for a thread that does not end."""
        threading.main_thread().join()
        time.sleep(min(self._timeouts.end_seconds, threading.TIMEOUT_MAX))
        self._leave(Deadline.exit_code)

    def _collect_stacks(self) -> str:
        """Stacks of every thread and task."""
        text = io.StringIO()
        with contextlib.suppress(RuntimeError):  # tasks come and go while they are looked at
            vitals.write_stacks(text, self._loop)
        return text.getvalue()

    def _write(self, why: str) -> None:
        """Write stacks and an event into the run's folder, unless its disk hangs too."""
        folder, stacks = self.folder, self._stacks or self._collect_stacks()
        if folder is None:
            return

        def write() -> None:
            with contextlib.suppress(OSError):
                with vitals.stacks(folder).open("a", encoding="utf-8") as out:
                    out.write(f"\n== {why}\n{stacks}")
                with (folder / "events.jsonl").open("a", encoding="utf-8") as events:
                    events.write(json.dumps({"time": time.time(), "event": "stalled", "why": why}) + "\n")

        writer = threading.Thread(target=write, name="stacks", daemon=True)
        writer.start()
        writer.join(_DISK_SECONDS)


def say(line: str) -> None:
    """Write to the terminal, not to the log, whose disk may hang."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"tandem: {line}\n")
        sys.stderr.flush()


def deadline_in(error: BaseException | None) -> Deadline | None:
    """The passed deadline that caused an error, if any."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Deadline):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _is_last(wait: waits.Wait, every: list[waits.Wait]) -> bool:
    """True if the chain of waits ends here: what is waited for waits for nothing, or for this one."""
    links = waits.chain(wait, every)
    return len(links) == 1 or waits.is_part(links[-1].on, wait.owner)


@contextmanager
def watching(timeouts: Timeouts) -> Iterator[Watchdog]:
    """Watch a run within its event loop.

    Raises:
        Deadline: a wait ended the run; the message explains it.
    """
    dog = Watchdog(timeouts, loop=asyncio.get_running_loop())
    with dog.watching():
        try:
            with dog.ends():
                yield dog
        except Exception as error:
            if (late := deadline_in(error)) is None:
                raise
            raise Deadline(dog.explain(late), on=late.on) from error
