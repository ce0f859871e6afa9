"""What `policies eval` found of the versions of a run: ``run_dir/held_out.jsonl``, a line for each comparison.

Invariant: a line is whole and on disk, or it is not read. Nothing of what people wrote is in it.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from swarm.credentials import append_private
from swarm.errors import ConfigError
from swarm.types import Model

_FILE = "held_out.jsonl"


class HeldOutComparison(Model):
    """One version against another one on held-out prompts."""

    step: int
    batch: str = Field(default="", description="of the step: after a step back another one comes under its number")
    earlier: str = Field(description="what the other one is called")
    data: str = Field(description="the file of the prompts, without its folder")
    hook: str = Field(description="what judged, with the digest of its code")
    verdict: str
    at: float = Field(default_factory=time.time, description="seconds since 1970")

    @property
    def sentence(self) -> str:
        """What people read."""
        day = f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%d}"
        return f"against {self.earlier} on {self.data}, judged by {self.hook}, {day}: {self.verdict}"


def keep(run_dir: Path, step: int, **fields: str) -> None:
    """Append a comparison of ``step``; ``fields`` are the others of :class:`HeldOutComparison`.

    Raises:
        ConfigError: the disk refuses it.
    """
    path = run_dir / _FILE
    try:
        append_private(path, HeldOutComparison.model_validate({"step": step, **fields}).model_dump())
    except OSError as exc:
        raise ConfigError(f"what was found is not kept: cannot write {path}: {exc.strerror or exc}") from exc


def kept(run_dir: Path, step: int, batch: str) -> list[HeldOutComparison]:
    """Those of ``step``, which trained on ``batch``, in the order in which they were made; those that name no batch
    too."""
    path = run_dir / _FILE
    comparisons: list[HeldOutComparison] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        # a full disk may have cut it off
        with contextlib.suppress(ValidationError):
            comparisons.append(HeldOutComparison.model_validate_json(line))
    return [each for each in comparisons if each.step == step and each.batch in ("", batch)]
