"""Questions to the journal that memory cannot answer, read in a thread of their own.

Invariant: nobody waits beyond a deadline for a disk that hangs: not who asks, not who closes, nor the interpreter at
its end, which waits for every thread that is no daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from swarm.errors import UnavailableError

T = TypeVar("T")

_Question = tuple[Callable[[sqlite3.Connection], Any], "asyncio.Future[Any]"]


class Lookups:
    """Reads on ``connection``, one after the other; it is closed by :meth:`close`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="swarm-journal-lookup", daemon=True)
        self._thread.start()

    async def ask(self, read: Callable[[sqlite3.Connection], T], within: float) -> T:
        """What ``read`` finds.

        Raises:
            UnavailableError: the disk does not say within so many seconds, or fails (``journal_unavailable``).
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._questions.put((read, answer))
        try:
            async with asyncio.timeout(within):
                return await answer
        except TimeoutError as exc:
            raise _unreadable(f"no answer within {within:g} s") from exc
        except sqlite3.Error as exc:
            raise _unreadable(str(exc)) from exc

    def close(self, within: float) -> bool:
        """Answer what was asked and end; false: the disk held it for so many seconds, and it is left behind."""
        self._questions.put(None)
        self._thread.join(within)
        if self._thread.is_alive():
            return False
        self._connection.close()
        return True

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            read, answer = question
            if answer.done():
                # whoever asked has given up
                continue
            found, error = None, None
            try:
                found = read(self._connection)
            except Exception as exc:
                error = exc
            # the loop may be gone by now, and whoever asked with it
            with contextlib.suppress(RuntimeError):
                answer.get_loop().call_soon_threadsafe(_tell, answer, found, error)


def _tell(answer: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)


def _unreadable(why: str) -> UnavailableError:
    return UnavailableError(f"the journal cannot be read: {why}", code="journal_unavailable")
