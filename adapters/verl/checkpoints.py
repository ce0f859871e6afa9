"""The checkpoints of a run: written aside, renamed once whole, as many kept as the job says, none where the disk lacks
room.

Invariant: a folder ``global_step_N`` is whole, and the note of the latest step names one that is there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from adapters.models import weight_bytes
from adapters.verl.cpu import CPU_BUILD, version_of
from swarm.checkpoints import (
    LATEST,
    NOTE,
    STEP,
    check_kept,
    checkpoint,
    half_removed,
    kept_steps,
    latest_step,
    noted_step,
    remove,
    score_of,
    size_of,
    surplus,
)
from swarm.errors import EngineError
from swarm.files import flush, free_bytes, replace_file

_ASIDE = ".incomplete"
#: Bytes of a checkpoint by those of the model's files: weights and Adam's two moments in fp32, of a model in bf16.
_MOST_OVER_MODEL = 6
#: The same with LoRA: weights in fp32, and what belongs to the adapter.
_MOST_WITH_ADAPTER = 3
#: Free bytes below which a write that failed found the disk full.
_FULL = 64 * 1024**2


class Checkpoints:
    """Those of one run.

    Args:
        keep: how many of the latest are kept; the best one and those that are held are kept beside them.
        model: path or hub name of the model, to estimate the size of the first checkpoint.
        keep_gb: what all of them may take, in GB, see :func:`swarm.checkpoints.surplus`.
        ranks: how many processes write a checkpoint together.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        model: Path,
        keep_gb: float | None = None,
        *,
        with_adapter: bool = False,
        ranks: int = 1,
    ) -> None:
        self._folder = folder
        self._keep, self._keep_gb = keep, keep_gb
        self._model = model
        self._most_over_model = _MOST_WITH_ADAPTER if with_adapter else _MOST_OVER_MODEL
        self._ranks = ranks
        self._rewards: list[float] = []
        #: the step of the last attempt, and whether it found no room
        self._tried, self._failing = 0, False

    def set_aside(self, *, resumes: bool) -> None:
        """Keep beside this run's checkpoints what is not of it: all that there are, or, where the run ``resumes``,
        those after the step that it goes on from. They could be resumed instead of its own, or be taken for later."""
        set_aside(self._folder, after=latest_step(self._folder) if resumes else 0)

    def latest(self) -> int:
        """The step of the latest; 0 where there is none."""
        return latest_step(self._folder)

    def reward(self, mean: float) -> None:
        """Note the mean reward of one step, for the checkpoint that comes next."""
        self._rewards.append(mean)

    def lacking(self) -> str:
        """Why there is no room for another checkpoint; empty if there is."""
        needed, free = self._needed(), free_bytes(self._folder) + sum(map(size_of, self._left()))
        if free >= needed:
            return ""
        return f"{free / 1e9:.1f} GB are free in {self._folder}, and a checkpoint takes up to {needed / 1e9:.1f} GB"

    def overdue(self, step: int) -> bool:
        """Whether a checkpoint is due at ``step`` because an earlier one could not be written."""
        return self._failing and step != self._tried

    def batch_of(self, step: int) -> str:
        """The batch of ``step``, which has a checkpoint; empty if it is not noted."""
        return str(score_of(checkpoint(self._folder, step)).get("batch_id") or "")

    def save(self, step: int, batch_id: str, write: Callable[[Path], None]) -> str:
        """Have ``write`` write the checkpoint of ``step``, which trained on ``batch_id``, and verl's note aside, in the
        folder that it gets; then both take their places, and the oldest ones go. What an error leaves is removed.

        Returns:
            What is to be told: why it is not written, if the disk lacks room and that is new; that it is written again.

        Raises:
            EngineError: the disk was full before all of several ranks had written.
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
        for left in self._left():
            shutil.rmtree(left, ignore_errors=True)
        try:
            write(aside)
            self._put_in_place(aside, step, batch_id)
        except Exception as exc:
            # before what was written is removed
            if not self._is_full(exc):
                raise
            why = f"the disk of {self._folder} is full"
            if self._ranks > 1:
                # a rank that had room waits for the others, and computes nothing more
                raise EngineError(f"the checkpoint of step {step} could not be written: {why}") from None
            return why
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._rewards.clear()
        self._prune()
        return ""

    def _put_in_place(self, aside: Path, step: int, batch_id: str) -> None:
        written = aside / f"{STEP}{step}"
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else None
        note = {"step": step, "reward_mean": reward, "batch_id": batch_id, "versions": _versions()}
        (written / NOTE).write_text(json.dumps(note))
        for path in (*written.rglob("*"), aside / LATEST):
            if path.is_file():
                flush(path)
        target = self._folder / written.name
        shutil.rmtree(target, ignore_errors=True)
        written.rename(target)
        (aside / LATEST).replace(self._folder / LATEST)

    def _is_full(self, exc: Exception) -> bool:
        # torch's writer tells no errno
        full = isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
        return full or free_bytes(self._folder) < _FULL

    def _prune(self) -> None:
        for step in surplus(self._folder, self._keep, self._keep_gb):
            # what cannot be removed now is tried again after the next one
            with contextlib.suppress(OSError):
                remove(self._folder, step)

    def _left(self) -> list[Path]:
        """What a save or a removal that was killed may have left, which goes before the next save."""
        return [self._folder / _ASIDE, *half_removed(self._folder)]

    def _needed(self) -> int:
        if steps := kept_steps(self._folder):
            return size_of(checkpoint(self._folder, steps[-1]))
        return self._most_over_model * weight_bytes(str(self._model))


def roll_back(folder: Path, step: int) -> Path | None:
    """Have a resumed run go on from ``step``; where the later checkpoints are kept now, ``None`` if there are none.

    One that is killed in the midst of it has gone back, and :meth:`Checkpoints.set_aside` does the rest.

    Raises:
        ConfigError: ``step`` is not kept; names those that are.
    """
    check_kept(folder, step)
    return set_aside(folder, after=step)


def set_aside(folder: Path, after: int = 0) -> Path | None:
    """Have a run go on from a step, if any: move the checkpoints ``after`` it into the first free folder ``earlier-N``;
    its path, if there were any."""
    if after and after != noted_step(folder):
        # verl reads the note alone
        replace_file(folder / LATEST, str(after).encode())
    later = [step for step in kept_steps(folder) if step > after]
    if not later:
        return None
    number = 1
    while (earlier := folder / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for step in later:
        checkpoint(folder, step).rename(earlier / f"{STEP}{step}")
    if not after:
        (folder / LATEST).unlink(missing_ok=True)
    (earlier / LATEST).write_text(str(later[-1]))
    return earlier


def _versions() -> dict[str, str]:
    """The installed versions of what trains and serves."""
    versions = {name: version_of(name) for name in ("verl", "vllm", "torch", "transformers")}
    versions["vllm"] = versions["vllm"] or version_of(CPU_BUILD)
    return {name: version for name, version in versions.items() if version is not None}
