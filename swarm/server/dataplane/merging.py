"""Several async generators as one.

Invariant: no source outlives the merged generator; the first error of a source ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merged(*sources: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The items of all ``sources`` as they come; close it (``aclosing``) if you do not read it to the end."""
    # one place: a source runs no further ahead than its reader
    items: asyncio.Queue[_Item[T] | _End] = asyncio.Queue(maxsize=1)

    async def pump(source: AsyncGenerator[T]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(source):
                async for value in source:
                    await items.put(_Item(value))
        except Exception as exc:
            error = exc
        await items.put(_End(error))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await items.get()
            if isinstance(item, _Item):
                yield item.value
            elif item.error is not None:
                raise item.error
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
