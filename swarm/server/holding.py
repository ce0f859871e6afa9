"""Tells the trainer which checkpoints stay: those of versions that were promoted, are an incumbent, or in which a stage
was pinned.

Invariant: the file follows from the stages and who follows them; a restarted server holds no less for a minute.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from swarm.checkpoints import checkpoint_folder, held_steps, hold
from swarm.server.engine.runs import TrainingRun

logger = logging.getLogger(__name__)

#: Seconds until the next try where there is no job yet, or the disk refuses; and between two looks at a run whose
#: stages do not change.
_PAUSE, _LONGEST = 1.0, 30.0


class HeldPolicies:
    """What the stages of ``run``, whose folder is ``run_dir``, hold."""

    def __init__(self, run: TrainingRun, run_dir: Path) -> None:
        self._run = run
        self._run_dir = run_dir
        self._written: tuple[Path, dict[int, str]] | None = None
        self._complaint = ""

    async def run(self) -> None:
        """Tell what is held at each change of it, until this is cancelled."""
        while True:
            if (pool := self._run.found_pool) is None or not await self.tell():
                await asyncio.sleep(_PAUSE)
            else:
                await pool.stages.changed.until(self._is_news, _LONGEST)

    def _is_news(self) -> bool:
        """Whether other versions are held than were written."""
        return self._written is None or self._run.pool.stages.held != self._written[1]

    async def tell(self) -> bool:
        """Write what is held, unless that was written already; whether it is written."""
        if (pool := self._run.found_pool) is None:
            return False
        held = pool.stages.held
        wanted = (checkpoint_folder(self._run.job, self._run_dir), held)
        if wanted == self._written:
            return True
        try:
            # a run that never held anything gets no file
            if held or held_steps(wanted[0]):
                await asyncio.to_thread(hold, *wanted)
            self._written, self._complaint = wanted, ""
        except OSError as exc:
            # once: it is tried each second, and a disk may be full for days
            if str(exc) != self._complaint:
                logger.warning("cannot say in %s which checkpoints stay, and try again: %s", wanted[0], exc)
            self._complaint = str(exc)
            return False
        return True
