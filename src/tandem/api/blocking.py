"""Coroutines that are run to their end by ordinary code, in a notebook's cell too."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tandem.errors import Interrupted

T = TypeVar("T")


def run_to_end(coroutine: Coroutine[Any, Any, T], stop: asyncio.Event | None = None) -> T:
    """Run a coroutine and return its result, also where this thread already runs an event loop, as a notebook's does.

    Such a loop stands still meanwhile, and the coroutine runs in another thread.

    Args:
        coroutine: what to run.
        stop: set by Ctrl-C (a notebook's stop button) to end the coroutine in order; a second one cancels it.
            None: the first one cancels it. Without a loop in this thread the coroutine handles signals itself.

    Raises:
        Interrupted: the user interrupted it.
    """
    beside_a_loop = True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        beside_a_loop = False
    try:
        return _in_a_thread(coroutine, stop) if beside_a_loop else asyncio.run(coroutine)
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        cancelled = error.__context__  # by asyncio.run, whose own KeyboardInterrupt says nothing
        raise Interrupted(str(error) or str(cancelled or "") or "interrupted") from error


def _in_a_thread(coroutine: Coroutine[Any, Any, T], stop: asyncio.Event | None) -> T:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def announced() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    with _interrupts(), ThreadPoolExecutor(1, thread_name_prefix="tandem") as threads:
        done = threads.submit(asyncio.run, announced())
        while not done.done():
            try:
                wait([done], timeout=0.2)  # a signal that another thread takes does not end a wait of this one
            except KeyboardInterrupt:
                loop, task = started.result(timeout=10)
                with contextlib.suppress(RuntimeError):  # the loop is closed: it has just ended
                    if stop is not None and not stop.is_set():
                        loop.call_soon_threadsafe(stop.set)
                    elif task is not None:
                        loop.call_soon_threadsafe(task.cancel)
        return done.result(timeout=0)


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here; asyncio.run's own handler would cancel a task of the loop that stands."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
