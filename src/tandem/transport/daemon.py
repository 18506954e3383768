"""Process groups' blocking calls on threads that no exit waits for: a wait inside gloo or NCCL cannot be cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def on_daemon(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking call and await its result; a caller that is cancelled leaves the call to itself."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # no longer can whoever awaits it cancel it
    threading.Thread(target=resolve, args=(answer, function, *args), name="process group", daemon=True).start()
    return await asyncio.wrap_future(answer)


def resolve(answer: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Give a call's result or error to who waits for it."""
    try:
        answer.set_result(function(*args))
    except BaseException as error:  # raised again where the answer is awaited
        answer.set_exception(error)
