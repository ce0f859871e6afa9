"""Code rewards: the three forms of test, what is the answer's fault and what is not, and code that cheats."""

from __future__ import annotations

from typing import Any

import pytest

from reward_hooks import HookContext, Task
from reward_hooks.builtin.verifiable.code import Code, code_of
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.builtin.verifiable.having import needs_sandbox
from tests.reward_hooks.making import answered, candidate, values

ADD = "def add(a, b):\n    return a + b\n"
CALL: dict[str, Any] = {"call": "add(1, 2)", "returns": 3}


pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def code() -> Code:
    # the time limit is not what these tests look at, and a machine may stand still for seconds
    return Code(limits={"memory_bytes": 1 << 28, "seconds": 30.0})


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
    ("statements", "passes"),
    [
        ("x = add(1, 2)\nassert x == 3\nassert 4 == add(2, 2)", True),
        ("x = add(1, 2)\nassert x == 3\nassert 5 == add(2, 2)", False),
        ("assert add((1,), (2,)) == (1, 2)", True),
        ("assert add((1,), (2,)) == [1, 2]", False),
        ("assert {add('a', 'b'): [add(b'a', b'b'), {1}, 1j]} == {'ab': [b'ab', {1}, 1j]}", True),
        ("assert (add(1, 1) == 2) is True", True),
        ("assert (add(1, 1) - 1) is True", False),
        ("for n in range(3):\n    assert add(n, 1) == 2", False),
        ("for n in range(3):\n    assert add(n, 1) == n + 1", True),
        ("assert add(1, 1) != 3 and add(1, 1) < 3", True),
        ("try:\n    add(1, None)\n    assert 1 == 2\nexcept TypeError:\n    pass", True),
        ("try:\n    assert add(1, 1) == 3\nexcept AssertionError:\n    pass", True),
        ("def check(candidate):\n    assert candidate(1, 1) == 2\n    assert candidate(2, 2) == 5\ncheck(add)", False),
        ("class C: pass\nassert add(1, 1) == 2, C()", True),
        ("import fractions\nassert add(fractions.Fraction(1, 2), 0) == 0.5", True),
        ("assert object() == 1", False),
        ("this is no Python", False),
    ],
)
def test_statements_mean_what_they_say(code: Code, statements: str, passes: bool) -> None:
    assert values(code, [ADD], with_tests(statements)) == [float(passes)]


def test_an_answer_may_give_built_in_names_another_meaning(code: Code) -> None:
    shadows = "list = dict = set = map = type = isinstance = open = print = exec = compile = json = os = None\n"
    assert values(code, [shadows + ADD], with_tests(CALL, "assert add(1, 2) == 3")) == [1.0]


def test_expected_values_do_not_enter_the_sandbox(code: Code) -> None:
    # what the epilogue says, an answer can find in its open files
    looks = """
import os, sys
def add(a, b):
    for number in range(3, 64):
        try:
            text = os.pread(number, 1 << 20, 0).decode()
            if "987654" in text:
                return 987654
        except OSError:
            pass
    return "987" in open(__file__).read().replace("987654", "").replace('"987"', "")
"""
    tests = with_tests({"call": "add(1, 2)", "returns": 987654}, "assert add(1, 2) == 987654")
    assert values(code, [looks], tests) == [0.0]


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
    asleep, busy, greedy = "import time\ntime.sleep(60)", "while True: pass", "x = 'a' * (1 << 30)"
    assert values(Code(limits={"seconds": 1.5}), [asleep], with_tests(CALL)) == [0.0]
    hog = Code(limits={"seconds": 60.0, "cpu_seconds": 1, "memory_bytes": 1 << 28})
    assert values(hog, [busy, greedy, ADD], with_tests(CALL)) == [0.0, 0.0, 1.0]


def test_a_deadline_too_short_for_the_tests_is_an_error(code: Code) -> None:
    # no answer is at fault, so none of them is wrong
    context = HookContext(num_repeat=2, deadline_seconds=0.001)
    with pytest.raises(HookError) as caught:
        values(code, [ADD, ADD], with_tests(CALL), context)
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
        ("```Python3 \t\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\nThen:\n```python\nx = 1\n```\nIt prints\n```text\n1\n```\n", "x = 1\n"),
        ("Call ```f()``` like this:\n```python\nx = 1\n```", "x = 1\n"),
        ("So: ```python\nx = 1\n```", "x = 1\n"),
        ("1. First\n   ```sh\n   ls\n   ```\n2. Then\n   ```python\nx = 1\n   ```", "x = 1\n   "),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
        ("```text\n3\n```", "```text\n3\n```"),
        ("```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```bash\r\nls\r\n```\r\n```py\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```markdown\nUse\n```python\nx = 1\n```\n```", "x = 1\n"),
    ],
)
def test_the_last_block_is_the_code(text: str, found: str) -> None:
    assert code_of(text) == found


def test_wrong_options_are_refused() -> None:
    for options in ({"limits": {"seconds": -1}}, {"limits": {"sceonds": 1}}, {"parallel": 0}):
        with pytest.raises(ConfigError):
            Code(**options)
