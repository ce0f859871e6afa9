"""Which episodes a run of user code has begun and not ended, so that the run leaves no episode open."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

from swarm.concurrency import Interruptible
from swarm.errors import UnavailableError


class UserRun:
    """User code under way: the episodes of ``client`` that it has begun and not ended, and the claims that wait.

    A context variable names the run, so each thread and task has its own, and a call that a thread makes on the event
    loop counts for the thread's run.
    """

    def __init__(self, client: object) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.episodes: set[str] = set()
        self._claims: set[Interruptible] = set()
        self._stopped = False

    def stop(self) -> None:
        """End the claims that wait, at whichever client, and those to come."""
        self._stopped = True
        for claim in tuple(self._claims):
            claim.interrupt(_run_stopped())

    @contextmanager
    def claiming(self) -> Generator[None]:
        """The block waits for a claim.

        Raises:
            UnavailableError: ``run_stopped``.
        """
        if self._stopped:
            raise _run_stopped()
        with Interruptible() as claim:
            self._claims.add(claim)
            try:
                yield
            finally:
                self._claims.discard(claim)


current_run: ContextVar[UserRun | None] = ContextVar("run", default=None)


def _run_stopped() -> UnavailableError:
    return UnavailableError("the run that this episode is part of is being stopped", code="run_stopped")


def note_ended(episode_uuids: Iterable[str]) -> None:
    """Tell the current run, if there is one, that these episodes have ended."""
    if (run := current_run.get()) is not None:
        run.episodes.difference_update(episode_uuids)
