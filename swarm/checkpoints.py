"""The folder of a run's checkpoints as every process reads it: which steps are kept, and which ones are held there.

Invariant: a folder ``global_step_N`` is whole, and only the trainer makes one. ``held.json`` is the swarm server's: the
trainer keeps the steps that it names, beside the latest and the best.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError
from swarm.files import replace_file
from swarm.job import TrainJob

#: Where verl writes the step of its last checkpoint.
LATEST = "latest_checkpointed_iteration.txt"
STEP = "global_step_"
#: In each checkpoint: its step, the mean reward that decides which one is the best, its step's batch, and the versions
#: that wrote it.
NOTE = "score.json"
_HELD = "held.json"
#: begins the name of one that is being removed
_REMOVED = ".removed-"


def checkpoint_folder(job: TrainJob | None, run_dir: Path) -> Path:
    """Where ``job`` keeps its checkpoints; ``None``: a job that names no folder."""
    if job is not None and job.checkpoint_dir:
        return Path(os.path.expanduser(job.checkpoint_dir))
    return run_dir / "checkpoints"


def noted_step(folder: Path) -> int:
    """The step that the note names; 0: none."""
    try:
        return int((folder / LATEST).read_text())
    except (OSError, ValueError):
        return 0


def latest_step(folder: Path) -> int:
    """The step of the whole checkpoint that a resumed run goes on from; 0: there is none. The note may name one that is
    not there, as in a copy that was made while the run went on: then it is the latest that is."""
    if (noted := noted_step(folder)) and checkpoint(folder, noted).is_dir():
        return noted
    # one without our note is not of a trainer of ours, and may not be whole
    return max((step for step in kept_steps(folder) if (checkpoint(folder, step) / NOTE).exists()), default=0)


def saved_step(job: TrainJob, run_dir: Path) -> int:
    """The step of the last whole checkpoint; 0: there is none."""
    return latest_step(checkpoint_folder(job, run_dir))


def checkpoint(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"{STEP}{step}"


def kept_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in ``folder``, in their order."""
    names = (path.name.removeprefix(STEP) for path in folder.glob(f"{STEP}*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdigit())


def check_kept(folder: Path, step: int) -> None:
    """Raise :class:`ConfigError`, which names the steps that are kept, unless ``step`` is one of them."""
    kept = kept_steps(folder)
    if step not in kept:
        there = f"kept are {', '.join(map(str, kept))}" if kept else "no step is"
        # a run that went back, or began anew, has set it aside
        beside = [
            f"; one of that number is in {path.parent}" for path in sorted(folder.glob(f"earlier-*/{STEP}{step}"))
        ]
        raise ConfigError(f"step {step} is not kept in {folder}; {there}{''.join(beside)}", param="step")


def best_step(folder: Path) -> int:
    """The step of the checkpoint with the highest mean reward since the one before it; the later one of equals.

    Raises:
        ValueError: there is no checkpoint in ``folder``.
    """

    def reward(step: int) -> tuple[float, int]:
        mean = score_of(checkpoint(folder, step)).get("reward_mean")
        return (mean if isinstance(mean, int | float) else float("-inf"), step)

    return max(kept_steps(folder), key=reward)


def score_of(checkpoint: Path) -> dict[str, Any]:
    """What was noted of a checkpoint: ``reward_mean`` since the one before, ``batch_id`` of its step, and ``versions``;
    empty if unknown."""
    try:
        score = json.loads((checkpoint / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return score if isinstance(score, dict) else {}


def size_of(folder: Path) -> int:
    """Bytes of the files in ``folder``, of which another process may remove some meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(where, name))
    return total


def held_steps(folder: Path) -> dict[int, str]:
    """The steps that stay in ``folder`` until the swarm server lets them go, and why: all, where that cannot be
    read."""
    try:
        held = json.loads((folder / _HELD).read_text())
        return {int(step): str(why) for step, why in held.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError):
        return dict.fromkeys(kept_steps(folder), f"{_HELD} cannot be read, which says what stays")


def hold(folder: Path, held: Mapping[int, str]) -> None:
    """Have these steps stay in ``folder``, and no others; the file is whole at any time.

    Raises:
        OSError: it cannot be written; what was held is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / _HELD, json.dumps({str(step): why for step, why in held.items()}).encode())


def surplus(folder: Path, keep: int, keep_gb: float | None, *, coming: bool = False) -> list[int]:
    """The steps whose checkpoints are to go, in their order: neither among the ``keep`` latest, nor the best, nor held;
    and beyond ``keep_gb`` GB the oldest of the latest too, but for the very latest.

    Args:
        coming: one more as large as the latest is about to come.
    """
    steps = kept_steps(folder)
    if not steps:
        return []
    latest = steps[-1]
    stay = {best_step(folder), *held_steps(folder), *(() if coming else (latest,))}
    numbered = [*steps, latest + 1] if coming else steps
    kept = [step for step in steps if step in stay or step in numbered[-keep:]]
    if keep_gb is not None:
        sizes = {step: size_of(checkpoint(folder, step)) for step in {*kept, latest}}
        total = sum(sizes[step] for step in kept) + (sizes[latest] if coming else 0)
        for step in [step for step in kept if step not in stay]:
            if total > keep_gb * 1e9:
                kept.remove(step)
                total -= sizes[step]
    return [step for step in steps if step not in kept]


def why_kept(folder: Path, keep: int, keep_gb: float | None = None) -> dict[int, list[str]]:
    """The checkpoints in ``folder``, in their order, and what keeps each of them; which ones the next one replaces, by
    the rules of :func:`surplus`."""
    steps, held = kept_steps(folder), held_steps(folder)
    going = surplus(folder, keep, keep_gb, coming=True)
    return {
        step: [
            *(["the run goes on from it"] if step == latest_step(folder) else []),
            *(["the best"] if step == best_step(folder) else []),
            *([held[step]] if step in held else []),
            *(["goes once the next one is written"] if step in going else []),
        ]
        for step in steps
    }


def copy(folder: Path, step: int, into: Path) -> None:
    """Put the checkpoint of ``step`` into another folder too; on one disk they share files, which nobody changes.

    Raises:
        OSError: it cannot be written, or the checkpoint went meanwhile.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(checkpoint(folder, step), checkpoint(into, step), copy_function=_linked)
    except shutil.Error as exc:
        # of all its files that failed, the first says why
        raise OSError(exc.args[0][0][2]) from exc


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def remove(folder: Path, step: int) -> None:
    """Remove the checkpoint of ``step``, and what an earlier removal that was killed has left.

    Raises:
        OSError: it cannot be removed.
    """
    checkpoint(folder, step).rename(folder / f"{_REMOVED}{step}")
    for gone in half_removed(folder):
        shutil.rmtree(gone, ignore_errors=True)


def half_removed(folder: Path) -> list[Path]:
    """What is being removed, or was by somebody who was killed."""
    return list(folder.glob(f"{_REMOVED}*"))
