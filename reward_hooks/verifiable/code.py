"""``code``: the share of a task's tests that the answer's Python code passes, run in a sandbox.

The reward is ``passed / tests`` (unit tests as in HumanEval, Chen et al. 2021, arXiv:2107.03374; the share of them as
in APPS, arXiv:2105.09938), or 1 or 0 with ``all_or_nothing``. The code is the last fenced block of the answer, or all
of it where there is none. ``task.metadata["tests"]`` is a list of

* ``{"call": "add(1, 2)", "returns": 3}``: an expression and its JSON value;
* ``{"stdin": "1 2", "stdout": "3"}``: the program's input and output, ignoring white space at the ends of lines;
* a string: statements that must run to their end, such as ``assert add(1, 2) == 3``.

The first two are compared outside the sandbox, so the code never sees the expected value. Each test runs in its own
process, within the limits of :mod:`reward_hooks.verifiable.sandbox`.

Fails when: the tests are weak; the model learns to pass them, not to be right. Statements share a process with the
code, which can search for the expected values or replace what they call: prefer the other two forms for training. The
result of a test near the time limit depends on the machine's load.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.verifiable.launcher import NO_SANDBOX
from reward_hooks.verifiable.sandbox import Finished, Limits, Sandbox
from swarm.errors import ConfigError, HookError
from swarm.types import Task

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

#: A source text, its standard input, and whether a run passed.
_Check = tuple[str, str, Callable[[Finished], bool]]


class Code:
    """The hook.

    Args:
        key: of ``task.metadata``.
        limits: fields of :class:`reward_hooks.verifiable.sandbox.Limits`.
        all_or_nothing: 1 for code that passes every test, else 0.
        parallel: concurrent tests, over all groups; default: one per processor.
        python: see :class:`reward_hooks.verifiable.sandbox.Sandbox`.
        allow_network: see there; without it, code never runs on a system that grants no isolation.

    Raises:
        ConfigError: the system grants no sandbox, or a limit is wrong.
    """

    def __init__(
        self,
        key: str = "tests",
        limits: Mapping[str, Any] | None = None,
        *,
        all_or_nothing: bool = False,
        parallel: int | None = None,
        python: str | None = None,
        allow_network: bool = False,
    ) -> None:
        try:
            self._limits = Limits.model_validate(dict(limits or {}))
        except ValueError as exc:
            raise ConfigError(f"Code: wrong limits: {exc}") from exc
        if parallel is not None and parallel < 1:
            raise ConfigError("Code needs parallel of at least 1")
        self._key = key
        self._sandbox = Sandbox(self._limits, python=python, allow_network=allow_network)
        self._all_or_nothing = all_or_nothing
        self._pool = ThreadPoolExecutor(parallel or os.cpu_count() or 1, thread_name_prefix="code-reward")

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The rewards of a group.

        Raises:
            HookError: the task has no tests (``no_reference``), they could not all run within the deadline
                (``hook_timeout``), or no sandbox could be made (``no_sandbox``).
        """
        deadline = time.monotonic() + context.deadline_seconds
        tests = self._tests(task)
        runs = {
            (index, number): self._pool.submit(self._passes, code_of(candidate.text), test, deadline)
            for index, candidate in enumerate(candidates)
            for number, test in enumerate(tests)
        }
        try:
            passed = {place: run.result() for place, run in runs.items()}
        finally:
            for run in runs.values():
                run.cancel()
        rewards: list[Reward] = []
        for index in range(len(candidates)):
            failures = [why for number in range(len(tests)) if (why := passed[index, number])]
            share = 1 - len(failures) / len(tests)
            rewards.append(
                Reward(
                    value=float(not failures) if self._all_or_nothing else share,
                    components={"passed": share},
                    reason=f"{len(failures)} of {len(tests)} tests fail: {failures[0]}" if failures else "",
                )
            )
        return rewards

    def _tests(self, task: Task) -> list[Any]:
        tests: Any = task.metadata.get(self._key)
        if not isinstance(tests, list) or not tests:
            raise HookError(f"task {task.task_id} has no metadata[{self._key!r}] with tests", code="no_reference")
        for test in cast("list[Any]", tests):
            _check("", test)
        return cast("list[Any]", tests)

    def _passes(self, code: str, test: Any, deadline: float) -> str:
        """Why the test fails; empty where it passes."""
        if not code.strip():
            return "no code"
        left = deadline - time.monotonic()
        # a test with less time than the others is unfair
        if left < self._limits.seconds and left < 1.0:
            raise HookError("the tests could not all be run within the hook's deadline", code="hook_timeout")
        program, given, passed = _check(code, test)
        try:
            finished = self._sandbox.run(program, given, seconds=left)
        except OSError as exc:
            raise HookError(f"no sandbox could be made: {exc}", code="no_sandbox") from exc
        if finished.status == NO_SANDBOX and finished.errors.startswith("no sandbox: "):
            raise HookError(finished.errors.strip(), code="no_sandbox")
        if finished.status is None:
            if left < self._limits.seconds:
                raise HookError("the tests could not all be run within the hook's deadline", code="hook_timeout")
            return f"took longer than {self._limits.seconds:g} s"
        if passed(finished):
            return ""
        if finished.status == 0:
            return "wrong result"
        last = finished.errors.strip().splitlines()[-1:] or [f"status {finished.status}"]
        return last[0][:200]

    __call__ = on_compute_relative_reward


def code_of(text: str) -> str:
    """The last fenced Python block of an answer, or the whole answer."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _check(code: str, test: Any) -> _Check:
    # the code cannot print the mark, which it does not know, except when statements share its process
    mark = secrets.token_hex(16)
    match test:
        case str():
            return f"{code}\n{test}\nprint({mark!r})\n", "", lambda run: run.output.rstrip().endswith(mark)
        case {"call": str() as call, "returns": expected}:
            epilogue = f"import json as _json\nprint('\\n' + {mark!r} + _json.dumps({call}))\n"
            return f"{code}\n{epilogue}", "", lambda run: _returned(run.output, mark, expected)
        case {"stdin": str() as given, "stdout": str() as wanted}:
            return code, given, lambda run: run.status == 0 and _lines(run.output) == _lines(wanted)
        case _:
            raise HookError(f"this is no test: {str(test)[:200]}", code="bad_reference")


def _returned(output: str, mark: str, expected: Any) -> bool:
    _, found, value = output.rpartition(f"\n{mark}")
    try:
        return bool(found) and _same(json.loads(value), expected)
    except (ValueError, RecursionError):
        return False


def _same(value: Any, expected: Any) -> bool:
    # 1 and True are equal in Python, not in JSON
    return json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True) or (
        isinstance(value, int | float)
        and isinstance(expected, int | float)
        and not isinstance(value, bool)
        and not isinstance(expected, bool)
        and abs(value - expected) <= 1e-9 * max(1.0, abs(expected))
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
