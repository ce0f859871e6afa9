"""How long the answer that goes out is sampled alone, before the others of its group begin.

Invariant: the others begin, at the latest :data:`LEAD_SECONDS` after it, whatever becomes of it; who gives them up
before has sampled nothing of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gateway.background import HEAD_START

#: An engine that has not come to the first token by then has others to serve, or much to read.
LEAD_SECONDS = 1.0


class Lead:
    """The start that one answer has.

    The others would compete with it for its first token, on the way as in the engine, which would compute their prompt
    a second time; once the first token is there, they find their prompt in the engine's prefix cache.
    """

    def __init__(self) -> None:
        self._over = asyncio.Event()

    def end(self) -> None:
        """Its first token is there, or no more of it will come; repeating it changes nothing."""
        self._over.set()

    async def over(self) -> None:
        """Return when the others may begin."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAD_SECONDS):
                await self._over.wait()
        await asyncio.sleep(HEAD_START)
