"""``swarm-gateway train`` as a process of its own whose events a test waits for, with the stand-in engine or the real
one; and a workflow that holds tasks back."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from swarm.data import epochs_of
from tests.engine.engine_process import processes_with

ROOT = Path(__file__).parents[2]
_MARK = "SWARM_GATEWAY_TRAIN_TEST"

#: Before a module's ``solve``: ``held`` answers only the tasks that the file ``allowed`` beside it names, if it exists.
HELD = """
import pathlib, threading
ALLOWED = pathlib.Path(__file__).with_name("allowed")

def held(task, client):
    with ALLOWED.with_name("asked").open("a") as file:
        file.write(f"{task.task_id}\\n")
    if ALLOWED.exists() and task.task_id not in ALLOWED.read_text():
        threading.Event().wait(600)
    return solve(task, client)
"""


class TrainProcess:
    """A context manager that ends with nothing left of the process or what it started."""

    def __init__(self, command: Sequence[str], folder: Path, **environ: str) -> None:
        self._mark = uuid.uuid4().hex
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        self.events: list[dict[str, Any]] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._output: list[str] = []
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ, _MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def until(self, kind: str | None, seconds: float) -> None:
        """Read events until one of ``kind``, or with ``None`` until the end of the output."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind or 'end'} within {seconds:g} s: {self.tail}") from None
            if line is None:
                assert kind is None, f"it ended before {kind}: {self.tail}"
                return
            self._output.append(line)
            if line.startswith("{"):
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == kind:
                    return

    def interrupt(self) -> None:
        """Ctrl-C, once."""
        self._process.send_signal(signal.SIGINT)

    def ended(self, seconds: float) -> int:
        """Its exit code; nothing that it started is left then."""
        self.until(None, seconds)
        code = self._process.wait(seconds)
        assert not processes_with(_MARK, self._mark), "train left processes behind"
        return code

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of this kind that were read."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return "".join(self._output)[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in processes_with(_MARK, self._mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(10)
        self._reader.join(10)


def check_resume(command: Sequence[str], folder: Path, tasks: str, seconds: float, **environ: str) -> None:
    """Interrupt a run after its first step, while workflows block, and go on from its checkpoint to step 3.

    Args:
        command: ``train FILE --json``; its workflow is ``held`` of :data:`HELD`, its job has batches of two tasks,
            three steps, a checkpoint after each, and seed 0; its run folder is ``run``.
        tasks: the file of its tasks.
        seconds: that each of the two runs may take.
    """
    trained = _first(tasks, folder, 2)
    (folder / "allowed").write_text("\n".join(trained))
    with TrainProcess(command, folder, **environ) as first:
        first.until("step", seconds)
        first.interrupt()
        assert first.ended(seconds) == 130, first.tail
        assert [one["step"] for one in first.of("step")] == [1]
        (report,) = first.of("report")
        assert report["interrupted"] and [one["step"] for one in report["steps"]] == [1]
    for name in ("allowed", "asked"):
        (folder / name).unlink()
    with TrainProcess(command, folder, **environ) as second:
        assert second.ended(seconds) == 0, second.tail
        assert [(one["step"], one["saved"]) for one in second.of("going_on")] == [(1, 1)]
        assert [one["step"] for one in second.of("step")] == [2, 3]
        (report,) = second.of("report")
        assert report["stopped_because"] == "all steps are done"
        assert [one["step"] for one in report["steps"]] == [1, 2, 3]
    assert json.loads((folder / "run/report.json").read_text())["steps"] == report["steps"]
    asked = set((folder / "asked").read_text().split())
    assert not asked.intersection(trained), "a task of the first run was done again"
    assert asked.issuperset(_first(tasks, folder, 6)[2:])


def _first(tasks: str, folder: Path, count: int) -> list[str]:
    order: Iterable[Any] = epochs_of(folder / tasks, 0)
    return [task.task_id for task in islice(order, count)]
