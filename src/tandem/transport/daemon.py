"""Process groups' blocking calls on threads that no exit waits for: a wait inside gloo or NCCL cannot be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def on_daemon(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking call and await its result; a caller that is cancelled leaves the call to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            _tell(loop, deliver, None, error)
        else:
            _tell(loop, deliver, result, None)

    threading.Thread(target=run, name="process group", daemon=True).start()
    return await future


def _tell(loop: asyncio.AbstractEventLoop, deliver: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
        loop.call_soon_threadsafe(deliver, *args)
