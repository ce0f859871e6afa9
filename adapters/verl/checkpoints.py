"""The checkpoints of a run: written aside, renamed once whole, as many kept as the job says, none where the disk lacks
room.

Invariant: a folder ``global_step_N`` is whole, and the note of the latest step names one that is there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Where verl writes the step of its last checkpoint.
LATEST = "latest_checkpointed_iteration.txt"
_STEP = "global_step_"
_ASIDE = ".incomplete"
#: In each checkpoint: its step, the mean reward that decides which one is the best, and its step's batch.
_NOTE = "score.json"
#: Bytes of a checkpoint by those of the model's files: weights and Adam's two moments in fp32, of a model in bf16.
_MOST_OVER_MODEL = 6
#: Free bytes below which a write that failed found the disk full.
_FULL = 64 * 1024**2


class Checkpoints:
    """Those of one run.

    Args:
        folder: holds them.
        keep: how many of the latest are kept; the best one is kept beside them.
        model: path of the model, to estimate the size of the first checkpoint.
    """

    def __init__(self, folder: Path, keep: int, model: Path) -> None:
        self._folder = folder
        self._keep = keep
        self._model = model
        self._rewards: list[float] = []
        #: the step of the last attempt, and whether it found no room
        self._tried, self._failing = 0, False

    def set_aside(self) -> None:
        """Keep what an earlier run wrote beside this run's checkpoints: with it, this run could be resumed with other
        weights, and its oldest steps could be taken for the latest."""
        if not self._steps() and not (self._folder / LATEST).exists():
            return
        number = 1
        while (earlier := self._folder / f"earlier-{number}").exists():
            number += 1
        earlier.mkdir()
        for path in (*self._folder.glob(f"{_STEP}*"), self._folder / LATEST):
            if path.exists():
                path.rename(earlier / path.name)

    def reward(self, mean: float) -> None:
        """Note the mean reward of one step, for the checkpoint that comes next."""
        self._rewards.append(mean)

    def lacking(self) -> str:
        """Why there is no room for another checkpoint; empty if there is."""
        self._folder.mkdir(parents=True, exist_ok=True)
        needed, free = self._needed(), shutil.disk_usage(self._folder).free
        if free >= needed:
            return ""
        return f"{free / 1e9:.1f} GB are free in {self._folder}, and a checkpoint takes up to {needed / 1e9:.1f} GB"

    def overdue(self, step: int) -> bool:
        """Whether a checkpoint is due at ``step`` because an earlier one could not be written."""
        return self._failing and step != self._tried

    def batch_of(self, step: int) -> str:
        """The batch of ``step``, which has a checkpoint; empty if it is not noted."""
        return str(self._note(step).get("batch_id") or "")

    def save(self, step: int, batch_id: str, write: Callable[[Path], None]) -> str:
        """Have ``write`` write the checkpoint of ``step``, which trained on ``batch_id``, and verl's note aside, in the
        folder that it gets; then both take their places, and the oldest ones go. What an error leaves is removed.

        Returns:
            What is to be told: why it is not written, if the disk lacks room and that is new; that it is written again.
        """
        self._tried, failed = step, self._failing
        why = self.lacking() or self._written(step, batch_id, write)
        self._failing = bool(why)
        if why and not failed:
            return (
                f"the checkpoint of step {step} is not written: {why}; free some space there, or set "
                "job.checkpoint_dir to a larger disk. Training goes on, and each further step tries again"
            )
        return f"the disk has room again: the checkpoint of step {step} is written" if failed and not why else ""

    def _written(self, step: int, batch_id: str, write: Callable[[Path], None]) -> str:
        """Write it; why the disk did not take it, or an empty string."""
        aside = self._folder / _ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write(aside)
            self._put_in_place(aside, step, batch_id)
        except Exception as exc:
            # before what was written is removed
            if not self._is_full(exc):
                raise
            return f"the disk of {self._folder} is full"
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._rewards.clear()
        self._prune()
        return ""

    def _put_in_place(self, aside: Path, step: int, batch_id: str) -> None:
        written = aside / f"{_STEP}{step}"
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else None
        note = {"step": step, "reward_mean": reward, "batch_id": batch_id}
        (written / _NOTE).write_text(json.dumps(note))
        for path in (*written.rglob("*"), aside / LATEST):
            if path.is_file():
                _sync(path)
        target = self._folder / written.name
        shutil.rmtree(target, ignore_errors=True)
        written.rename(target)
        (aside / LATEST).replace(self._folder / LATEST)

    def _is_full(self, exc: Exception) -> bool:
        # torch's writer tells no errno
        full = isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
        return full or shutil.disk_usage(self._folder).free < _FULL

    def _steps(self) -> list[int]:
        found = (path.name.removeprefix(_STEP) for path in self._folder.glob(f"{_STEP}*") if path.is_dir())
        return sorted(int(name) for name in found if name.isdigit())

    def _prune(self) -> None:
        steps = self._steps()
        kept = {*steps[-self._keep :], max(steps, key=self._reward_of)}
        for step in steps:
            if step not in kept:
                shutil.rmtree(self._folder / f"{_STEP}{step}", ignore_errors=True)

    def _reward_of(self, step: int) -> float:
        reward = self._note(step).get("reward_mean")
        return float("-inf") if reward is None else float(reward)

    def _note(self, step: int) -> dict[str, Any]:
        try:
            return dict(json.loads((self._folder / f"{_STEP}{step}" / _NOTE).read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    def _needed(self) -> int:
        if steps := self._steps():
            return _size(self._folder / f"{_STEP}{steps[-1]}")
        return _MOST_OVER_MODEL * sum(
            path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in self._model.glob(kind)
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    """A machine that loses its power keeps a whole file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
