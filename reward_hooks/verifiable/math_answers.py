"""``math``: the answer is mathematically equal to a known one (``task.metadata["answer"]``).

The reward is 1 or 0, by the math-verify package (https://github.com/huggingface/Math-Verify; extra
``swarm-gateway[rewards]``): the last expression of the answer, or what is in ``\\boxed{}``, is read as LaTeX or as a
plain number and compared by sympy, so that 0.5, 1/2, ½ and ``$\\frac{1}{2}$`` are one (what is read as LaTeX:
:mod:`reward_hooks.verifiable.math_worker`).

Fails when: the last number is not the answer ("42, and I checked it 3 times"), units carry the meaning, or a wrong
derivation ends in the right number. Where every answer of a group is right, or wrong, it teaches nothing: choose tasks
that the model solves sometimes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.verifiable.match import references
from swarm.errors import ConfigError, HookError
from swarm.importer import python_path
from swarm.types import Task

_WORKER = [sys.executable, "-P", "-m", "reward_hooks.verifiable.math_worker"]


class Math:
    """The hook; one worker process serves all groups, one at a time, and starts with the first of them.

    Args:
        key: of ``task.metadata``.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, key: str = "answer") -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "math answers need the math-verify package: pip install 'swarm-gateway[rewards]'", code="missing_extra"
            )
        self._key = key
        self._worker = _Worker(_WORKER)

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """1 or 0 each.

        Raises:
            HookError: the task has no known answer (``no_reference``) or one that is no mathematics
                (``bad_reference``), or the worker died or did not answer in time (``math_worker``).
        """
        question = {
            "accepted": references(task, self._key),
            "answers": [candidate.text for candidate in candidates],
        }
        answer = self._worker.ask(question, context.deadline_seconds)
        if "unreadable" in answer:
            raise HookError(
                f"task {task.task_id}: metadata[{self._key!r}] is no mathematics: {answer['unreadable']!r}",
                code="bad_reference",
            )
        return [Reward(value=value, reason=reason) for value, reason in answer["verdicts"]]

    def __call__(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        return self.on_compute_relative_reward(task, candidates, context)


class _Worker:
    """One process that is asked one thing at a time, killed when it is late, and started again for the next."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; ``seconds`` include the wait for others.

        Raises:
            HookError: see :class:`Math`.
        """
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise HookError("the math worker is busy with other groups", code="math_worker")
        try:
            process = self._running()
            line = self._exchange(process, json.dumps(question).encode() + b"\n", deadline)
            if not line:
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
            )
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
        """One line for another; empty when the process is dead or late. Neither pipe may block, for a worker that hangs
        does not read either."""
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout.fileno(), process.stdin.fileno()
        os.set_blocking(sink, False)
        answer = b""
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            readable, writable, _ = select.select([source], [sink] if line else [], [], max(0.0, left))
            if not readable and not writable:
                return b""
            if writable:
                try:
                    line = line[os.write(sink, line) :]
                except BrokenPipeError:
                    return b""
            if readable:
                if not (part := os.read(source, 65536)):
                    return b""
                answer += part
        return answer

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None

    def __del__(self) -> None:
        if self._process is not None:
            self._end(self._process)
