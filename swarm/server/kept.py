"""``KeptVersions``: the versions whose checkpoints a run folder keeps, what made them, and the removal of one; and
``HeldPolicies``, which tells the trainer which of them stay: those of versions that were promoted, are an incumbent, or
in which a stage was pinned.

Invariant: a run may go on meanwhile, and what it needs is refused before anything is touched. What is held follows from
the stages and who follows them; a restarted server holds no less for a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.checkpoints import (
    check_kept,
    checkpoint,
    checkpoint_folder,
    held_steps,
    hold,
    latest_step,
    remove,
    score_of,
    size_of,
    why_kept,
)
from swarm.errors import ConflictError, SwarmGatewayError
from swarm.server.journal.lineage import latest_job, record_of
from swarm.status import KeptVersion, PolicyRecord

if TYPE_CHECKING:
    from swarm.server.engine.runs import TrainingRun

logger = logging.getLogger(__name__)

#: Seconds until the next try where there is no job yet, or the disk refuses; and between two looks at a run whose
#: stages do not change.
_PAUSE, _LONGEST = 1.0, 30.0


class KeptVersions:
    """Those of ``run_dir``, as its files are now.

    Attributes:
        folder: of the checkpoints.

    Raises:
        ConfigError: nothing was trained there.
    """

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal.db"
        self._job, _ = latest_job(self._journal)
        self.folder = checkpoint_folder(self._job, run_dir)

    def all(self) -> list[KeptVersion]:
        """In the order of their steps."""
        return [
            self._version(step, why)
            for step, why in why_kept(self.folder, self._job.keep_checkpoints, self._job.keep_gb).items()
        ]

    def record(self, step: int) -> PolicyRecord:
        """What made the version of ``step``, which is kept or was trained.

        Raises:
            ConfigError: it is neither.
        """
        record = record_of(self._journal, step)
        kept = next((version for version in self.all() if version.step == step), None)
        if kept is None and step not in [each.step for each in record.steps]:
            check_kept(self.folder, step)
        return record.model_copy(update={"kept": kept})

    def delete(self, step: int, held: Mapping[int, str] | None = None) -> KeptVersion:
        """Remove the checkpoint of ``step``; its rows in the journal stay, and so do exports and forks.

        Args:
            step: of the version.
            held: steps that stay, and why; default: those that the folder names.

        Raises:
            ConfigError: it is not kept.
            ConflictError: the run goes on from it, or it is held.
            SwarmGatewayError: the disk refuses.
        """
        check_kept(self.folder, step)
        if step == latest_step(self.folder):
            raise ConflictError(
                f"the run goes on from step {step}, and its weights are served: let it save a later step, or go back "
                "to an earlier one (`up --step`), then delete it"
            )
        if (why := (held_steps(self.folder) if held is None else held).get(step)) is not None:
            raise ConflictError(
                f"step {step} is {why}: `policies rollback` or `policies pin --off` lets it go, where it is still the "
                "challenger; the next promotion does where it is not"
            )
        gone = self._version(step, [])
        try:
            remove(self.folder, step)
        except OSError as exc:
            raise SwarmGatewayError(f"cannot remove {gone.path}: {exc.strerror or exc}", code="disk") from exc
        return gone

    def _version(self, step: int, why: list[str]) -> KeptVersion:
        path = checkpoint(self.folder, step)
        reward = score_of(path).get("reward_mean")
        return KeptVersion(step=step, path=str(path), bytes=size_of(path), reward=reward, why=why)


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
