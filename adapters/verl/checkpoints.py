"""The checkpoints of a run: written aside, renamed once whole, as many kept as the job says, none where the disk lacks
room.

Invariant: a folder ``global_step_N`` is whole, and the note of the latest step names one that is there.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

#: Where verl writes the step of its last checkpoint.
LATEST = "latest_checkpointed_iteration.txt"
_STEP = "global_step_"
_ASIDE = ".incomplete"
#: In each checkpoint: what decides which one is the best.
_SCORE = "score.json"
#: Bytes of a checkpoint by those of the model's files: weights and Adam's two moments in fp32, of a model in bf16.
_MOST_OVER_MODEL = 6


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
        place = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        needed, free = self._needed(), shutil.disk_usage(place).free
        if free >= needed:
            return ""
        return f"{free / 1e9:.1f} GB are free in {self._folder}, and a checkpoint takes up to {needed / 1e9:.1f} GB"

    @contextlib.contextmanager
    def written_aside(self, step: int) -> Iterator[Path]:
        """The folder in which verl is to write the checkpoint of ``step`` and its note; at the end of the block both
        take their places, and the oldest ones go. What an error leaves is removed."""
        aside = self._folder / _ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        try:
            yield aside
            written = aside / f"{_STEP}{step}"
            reward = sum(self._rewards) / len(self._rewards) if self._rewards else None
            (written / _SCORE).write_text(json.dumps({"step": step, "reward_mean": reward}))
            target = self._folder / written.name
            shutil.rmtree(target, ignore_errors=True)
            written.rename(target)
            (aside / LATEST).replace(self._folder / LATEST)
            self._rewards.clear()
            self._prune()
        finally:
            shutil.rmtree(aside, ignore_errors=True)

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
        try:
            reward = json.loads((self._folder / f"{_STEP}{step}" / _SCORE).read_text())["reward_mean"]
        except (OSError, ValueError, LookupError, TypeError):
            reward = None
        return float("-inf") if reward is None else float(reward)

    def _needed(self) -> int:
        if steps := self._steps():
            return _size(self._folder / f"{_STEP}{steps[-1]}")
        return _MOST_OVER_MODEL * sum(
            path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in self._model.glob(kind)
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
