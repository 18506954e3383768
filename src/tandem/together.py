"""Several coroutines at once, of which one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
