"""What ran: one file for each start of the engine, ``run_dir/history/NUMBER.json``.

Invariant: a file is replaced as a whole, so every one that is there can be read, by its owner
only; only the latest are kept.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm.control_protocol import RunRecord, RunSummary
from swarm.errors import NotFoundError
from swarm.files import replace_file
from swarm.job import TrainJob

logger = logging.getLogger(__name__)

KEPT = 200


class History:
    """The starts on one run folder; it blocks on the disk for about a millisecond.

    A disk that fails is logged: history must not keep an engine from running.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "history"
        self._now: RunRecord | None = None

    def begin(self, run_id: str, job: TrainJob, code: str | None) -> None:
        """An engine starts."""
        numbers = self._numbers()
        number = max(numbers, default=0) + 1
        self._now = RunRecord(
            number=number, started=time.time(), run_id=run_id, job=job, code=code, model=job.model_name
        )
        self._write(self._now)
        for old in sorted(numbers)[: max(0, len(numbers) + 1 - KEPT)]:
            self._path(old).unlink(missing_ok=True)

    def resolved(self, config: dict[str, Any]) -> None:
        """It has resolved verl's configuration."""
        self._update(config=config)

    def end(self, reason: str) -> None:
        """It has ended."""
        self._update(ended=time.time(), reason=reason)
        self._now = None

    def all(self) -> list[RunSummary]:
        """All starts, oldest first."""
        summaries: list[RunSummary] = []
        for number in sorted(self._numbers()):
            try:
                record = self.record(number)
            except NotFoundError:
                continue
            summaries.append(RunSummary.model_validate(record.model_dump(include=set(RunSummary.model_fields))))
        return summaries

    def record(self, number: int) -> RunRecord:
        """One start.

        Raises:
            NotFoundError: there was none, or it is forgotten, or this version cannot read it.
        """
        try:
            return RunRecord.model_validate_json(self._path(number).read_bytes())
        except (OSError, ValidationError) as exc:
            raise NotFoundError(f"there is no run {number} in this server's history", code="no_run") from exc

    def _update(self, **changes: Any) -> None:
        if self._now is not None:
            self._now = self._now.model_copy(update=changes)
            self._write(self._now)

    def _numbers(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return [int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdigit()]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.json"

    def _write(self, record: RunRecord) -> None:
        path = self._path(record.number)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, record.model_dump_json().encode())
        except OSError as exc:
            logger.error("the history of runs cannot be written to %s: %s", path, exc)
