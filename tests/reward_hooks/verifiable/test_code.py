"""Code rewards: the three forms of test, what is the answer's fault and what is not, and code that cheats."""

from __future__ import annotations

from typing import Any

import pytest

from reward_hooks import HookContext, Task
from reward_hooks.verifiable.code import Code, code_of
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import answered, candidate, values

ADD = "def add(a, b):\n    return a + b\n"
CALL: dict[str, Any] = {"call": "add(1, 2)", "returns": 3}


@pytest.fixture(scope="module", autouse=True)
def code() -> Code:
    try:
        return Code(limits={"memory_bytes": 1 << 28, "seconds": 5.0})
    except ConfigError as exc:
        pytest.skip(f"this system grants no sandbox: {exc.message}")


def with_tests(*tests: Any) -> Task:
    return answered(list(tests), "tests")


def test_all_forms_of_test(code: Code) -> None:
    reads = "a, b = map(int, input().split())\nprint(a + b)\n"
    assert values(code, [ADD], with_tests(CALL, "assert add(1, 2) == 3", {"call": "[add(1, 1)]", "returns": [2]})) == [
        1.0
    ]
    assert values(code, [reads], with_tests({"stdin": "1 2\n", "stdout": "3"}, {"stdin": "1 1", "stdout": "3"})) == [
        0.5
    ]


def test_the_share_of_passed_tests_or_all_of_them(code: Code) -> None:
    task = with_tests(CALL, {"call": "add(2, 2)", "returns": 4}, "assert add('a', 'b') == 'ab'", "assert False")
    assert values(code, [ADD, "", "def add(a, b:"], task) == [0.75, 0.0, 0.0]
    assert values(Code(all_or_nothing=True), [ADD], task) == [0.0]
    [reward] = code.on_compute_relative_reward(task, [candidate(ADD)], HookContext(num_repeat=1))
    assert reward.reason == "1 of 4 tests fail: AssertionError"


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('3')",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b):\n    return Any()",
        "def add(a, b):\n    return True",
        "def add(a, b):\n    return '3'",
        "import json\njson.dumps = lambda value: '4'\ndef add(a, b): return 3",
    ],
)
def test_code_that_cheats_fails(code: Code, cheat: str) -> None:
    assert values(code, [cheat], with_tests(CALL)) == [0.0]


@pytest.mark.slow
def test_an_answer_that_exceeds_a_limit_fails() -> None:
    hog = Code(limits={"seconds": 1.5, "cpu_seconds": 1, "memory_bytes": 1 << 28})
    task = with_tests(CALL)
    asleep, busy, greedy = "import time\ntime.sleep(60)", "while True: pass", "x = 'a' * (1 << 30)"
    assert values(hog, [asleep, busy, greedy, ADD], task) == [0.0, 0.0, 0.0, 1.0]


def test_a_deadline_too_short_for_the_tests_is_an_error(code: Code) -> None:
    context = HookContext(num_repeat=2, deadline_seconds=0.5)
    with pytest.raises(HookError) as caught:
        values(code, [ADD], with_tests(CALL), context)
    assert caught.value.code == "hook_timeout"


@pytest.mark.parametrize("tests", [None, [], "assert True", [3], [{"call": "f()"}]])
def test_without_tests_there_is_no_reward(code: Code, tests: Any) -> None:
    with pytest.raises(HookError) as caught:
        values(code, [ADD], answered(tests, "tests"))
    assert caught.value.code in ("no_reference", "bad_reference")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1", "x = 1"),
        ("Use\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```\nx = 1\n```\nbetter:\n``` py\nx = 2\n```", "x = 2\n"),
    ],
)
def test_the_last_block_is_the_code(text: str, found: str) -> None:
    assert code_of(text) == found


def test_wrong_options_are_refused() -> None:
    for options in ({"limits": {"seconds": -1}}, {"limits": {"sceonds": 1}}, {"parallel": 0}):
        with pytest.raises(ConfigError):
            Code(**options)
