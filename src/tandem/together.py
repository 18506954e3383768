"""Several coroutines at once, of which one that fails, or comes first, ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these, and wait until each has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def together(works: Iterable[Awaitable[T]]) -> list[T]:
    """All results, in order; where one fails or this is cancelled, the others are cancelled and waited for first.

    Unlike a task group it raises the first error as it is.

    Example:
        >>> async def double(number):
        ...     return 2 * number
        >>> asyncio.run(together([double(1), double(2)]))
        [2, 4]
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def all_ended(works: Iterable[Awaitable[T]]) -> list[T]:
    """All results, in order, once every one has ended, whatever the others do; then the first error is raised."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)


async def unless(event: asyncio.Future[Any], work: Awaitable[T]) -> T | None:
    """Await ``work``, or give it up, wait until it has ended and return None as soon as ``event`` is done.

    Work that is done by then counts.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, event), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        if not task.done():
            await cancel(task)
