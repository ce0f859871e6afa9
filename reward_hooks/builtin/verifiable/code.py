"""``code``: the share of a task's tests that the answer's Python code passes, run in a sandbox.

The reward is ``passed / tests`` (unit tests as in HumanEval, Chen et al. 2021, arXiv:2107.03374; the share of them as
in APPS, arXiv:2105.09938), or 1 or 0 with ``all_or_nothing``. The code is the last fenced block of the answer that
says that it is Python, else the last that names no language, or all of the answer where there is neither.
``task.metadata["tests"]`` is a list of

* ``{"call": "add(1, 2)", "returns": 3}``: an expression and its JSON value. Integers, strings and so on must be equal;
  where a float is expected, 1e-9 of it (or 1e-9, if that is more) is allowed;
* ``{"stdin": "1 2", "stdout": "3"}``: the program's input and output, ignoring white space at the ends of lines;
* a string: statements that must run to their end, such as ``assert add(1, 2) == 3``.

Expected values are compared outside the sandbox (``checks.py``), so the code never sees them; of a string, this holds
for comparisons with a literal. Each test runs in a sandbox of its own (``sandbox.py``).

An answer whose tests take more than its share of the hook's time fails those that are left; the others keep theirs.

Fails when: the tests are weak; the model learns to pass them, not to be right. What else statements say than
comparisons with a literal shares a process with the code, which can look for it there or change what it means: prefer
the other two forms for training. The result of a test near the time limit depends on the machine's load.
"""

from __future__ import annotations

import math
import re
import subprocess
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from reward_hooks.builtin.verifiable.checks import Check, check_of
from reward_hooks.builtin.verifiable.sandbox import Limits, Sandbox
from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.errors import ConfigError, HookError
from swarm.machine import processors
from swarm.types import Task
from swarm.validation import validated

# each character can match in one way only: an answer of a hundred thousand spaces takes no longer than another
# one of another language begins a line, and holds no Python: the end of it is not the beginning of the next
_BLOCK = re.compile(
    r"(?:^[ \t]*)?```[ \t]*(?:(?P<python>python3?|py)[ \t]*)?\r?\n(?P<code>.*?)```"
    r"|^[ \t]*```[^\n`]*\n(?:(?!```).)*```(?![ \t]*(?:python3?|py)[ \t]*\r?\n)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
#: The share of the hook's time in which all answers are to be judged.
_MOST_OF_THE_TIME = 0.9


class Code:
    """The hook.

    Args:
        key: of ``task.metadata``.
        limits: fields of :class:`reward_hooks.builtin.verifiable.sandbox.Limits`.
        all_or_nothing: 1 for code that passes every test, else 0.
        parallel: answers that are judged at the same time, over all groups; default: one per processor
            that the gateway may use.
        python: see :class:`reward_hooks.builtin.verifiable.sandbox.Sandbox`.
        unsafe: see there; without it, code never runs on a system that grants no sandbox.

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
        unsafe: bool = False,
    ) -> None:
        self._limits = validated(Limits, limits or {}, "the limits of Code")
        if parallel is not None and parallel < 1:
            raise ConfigError("Code needs parallel of at least 1")
        self._key = key
        self._sandbox = Sandbox(self._limits, python=python, unsafe=unsafe)
        self._all_or_nothing = all_or_nothing
        self._parallel = parallel or processors()
        self._pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="code-reward")

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The rewards of a group.

        Raises:
            HookError: the task has no tests (``no_reference``), no answer got through them in its share of the time, or
                other groups left too little of it (``hook_timeout``), or no sandbox could be made (``no_sandbox``).
        """
        deadline = time.monotonic() + context.deadline_seconds
        tests: Any = task.metadata.get(self._key)
        if not isinstance(tests, list) or not tests:
            raise HookError(f"task {task.task_id} has no metadata[{self._key!r}] with tests", code="no_reference")
        checks = [check_of(test) for test in cast("list[Any]", tests)]
        share = _MOST_OF_THE_TIME * context.deadline_seconds / math.ceil(len(candidates) / self._parallel)
        runs = [
            self._pool.submit(self._judge, code_of(candidate.text), checks, share, deadline) for candidate in candidates
        ]
        try:
            outcomes = [run.result() for run in runs]
        finally:
            for run in runs:
                run.cancel()
        if all(used_up for _, used_up in outcomes):
            raise HookError(
                f"no answer got through the tests in {share:.1f} s, its share of the hook's time: have fewer or faster "
                "tests, a smaller limit of seconds, or a longer timeout of the hook",
                code="hook_timeout",
            )
        return [self._reward(failures, len(checks)) for failures, _ in outcomes]

    def _reward(self, failures: list[str], tests: int) -> Reward:
        share = 1 - len(failures) / tests
        return Reward(
            value=float(not failures) if self._all_or_nothing else share,
            components={"passed": share},
            reason=f"{len(failures)} of {tests} tests fail: {failures[0]}" if failures else "",
        )

    def _judge(self, code: str, checks: list[Check], share: float, deadline: float) -> tuple[list[str], bool]:
        """Run the tests of one answer, one after the other: why tests fail, one reason each, and whether the answer
        used up its time before all of them had run."""
        if not code.strip():
            return ["no code"] * len(checks), False
        began = time.monotonic()
        failures: list[str] = []
        for number, check in enumerate(checks):
            now = time.monotonic()
            seconds = min(began + share - now, self._limits.seconds)
            if deadline - now < seconds:
                # other groups took it; a test with less time than those of other answers is unfair
                raise HookError("no time was left to run the tests", code="hook_timeout")
            if failure := self._failure(code, check, seconds):
                failures.append(failure)
            if time.monotonic() - began >= share:
                rest = len(checks) - number - 1
                reason = f"the answer's tests took more than {share:.1f} s in all"
                return failures + [reason] * rest, bool(rest or failure)
        return failures, False

    def _failure(self, code: str, check: Check, seconds: float) -> str:
        """Why the test fails; empty where it passes."""
        try:
            finished = self._sandbox.run(code, check.stdin, epilogue=check.epilogue, seconds=seconds)
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise HookError(f"no sandbox could be made: {exc}", code="no_sandbox") from exc
        if finished.status is None:
            return f"took longer than {seconds:.3g} s"
        if check.passed(finished):
            return ""
        if finished.status == 0:
            return "wrong result"
        last = finished.errors.strip().splitlines()[-1:] or [f"status {finished.status}"]
        return last[0][:200]

    __call__ = on_compute_relative_reward


def code_of(text: str) -> str:
    """The last fenced block of an answer that says that it is Python, or that says nothing, or the whole answer."""
    blocks = [block for block in _BLOCK.finditer(text) if block["code"] is not None]
    # what says nothing beside Python is what it prints, or how it is called
    named = [block for block in blocks if block["python"]]
    code = (named or blocks)[-1]["code"] if blocks else text
    # a block in an item of a list stands below the item's text
    return textwrap.dedent(code) if code.startswith((" ", "\t")) else code
