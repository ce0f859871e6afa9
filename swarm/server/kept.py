"""``KeptVersions``: the versions whose checkpoints a run folder keeps, what made them, and the removal of one.

Invariant: a run may go on meanwhile, and what it needs is refused before anything is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from swarm.checkpoints import (
    check_kept,
    checkpoint,
    checkpoint_folder,
    held_steps,
    latest_step,
    remove,
    score_of,
    size_of,
    why_kept,
)
from swarm.errors import ConflictError, SwarmGatewayError
from swarm.server.journal.lineage import latest_job, record_of
from swarm.status import KeptVersion, PolicyRecord


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
