"""``math``: the answer is mathematically equal to a known one (``task.metadata["answer"]``).

The reward is 1 or 0, by the math-verify package (https://github.com/huggingface/Math-Verify; extra
``swarm-gateway[rewards]``): what the answer says in the end (``math_text.py``) is read as LaTeX or as plain numbers and
compared by sympy, so that 0.5, 1/2, ½ and ``$\\frac{1}{2}$`` are equal. An answer makes one claim: "5 or 6" is a
list, which equals a set and never 5. Decimals are the numbers that their digits say; only an irrational number may be
rounded (``ROUNDED`` in ``math_worker.py``).

Fails when: the last number is not the answer ("42, and I checked it 3 times"), units carry the meaning, or a wrong
derivation ends in the right number. If all answers of a group are right, or all wrong, it teaches nothing: choose tasks
that the model solves sometimes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from reward_hooks.builtin.verifiable.match import references
from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.concurrency import kill_group
from swarm.errors import ConfigError, HookError
from swarm.importer import python_path
from swarm.types import Task

#: Of a group's time: where other groups leave it less, an answer that takes too long may be right.
_FAIR_SHARE = 0.9
_WORKER = [sys.executable, "-P", "-m", "reward_hooks.builtin.verifiable.math_worker"]


class Math:
    """The hook; one worker process, started with the first group, serves all groups one by one.

    Args:
        key: of ``task.metadata``.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, key: str = "answer") -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "math answers need the math-verify package: pip install '.[rewards]' in a clone", code="missing_extra"
            )
        self._key = key
        self._worker = _Worker(_WORKER)

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """1 or 0 each.

        Raises:
            HookError: the task has no known answer (``no_reference``), the known answer is no mathematics
                (``bad_reference``), or the worker died, did not answer in time, or was left too little of it by other
                groups (``math_worker``).
        """
        question = {
            "accepted": references(task, self._key),
            "answers": [candidate.text for candidate in candidates],
        }
        answer = self._worker.ask(question, context.deadline_seconds)
        if "error" in answer:
            raise HookError(f"task {task.task_id}: {answer['error']}", code=answer["code"])
        return [Reward(value=value, reason=reason) for value, reason in answer["verdicts"]]

    __call__ = on_compute_relative_reward


class _Worker:
    """A process that answers one question at a time; killed at the deadline, and restarted for the next question."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; ``seconds`` include the wait for other groups.

        Raises:
            HookError: see :class:`Math`.
        """
        # no lock waits for ever, as a hook with an infinite deadline may
        seconds = min(seconds, threading.TIMEOUT_MAX)
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise HookError("the math worker is busy with other groups", code="math_worker")
        try:
            process, left = self._running(), deadline - time.monotonic()
            limits = {"until": deadline, "crowded": left < _FAIR_SHARE * seconds}
            line = _exchange(process, json.dumps({**question, **limits}).encode() + b"\n", left)
            if not line.endswith(b"\n"):
                self._end(process)
                raise HookError(f"the math worker gave no answer within {seconds:g} s or died", code="math_worker")
            return json.loads(line)
        finally:
            self._lock.release()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,
            )
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # with the child that judges an answer, which would hold the pipe open, and compute on
        kill_group(process.pid)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unsent input
                    pipe.close()
        self._process = None

    def __del__(self) -> None:
        if self._process is not None:
            self._end(self._process)


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """One line for another, cut short if the process dies. Killed at the deadline, it blocks neither pipe any more."""
    assert process.stdin is not None
    assert process.stdout is not None
    kill = threading.Timer(seconds, kill_group, (process.pid,))
    kill.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
    finally:
        kill.cancel()
