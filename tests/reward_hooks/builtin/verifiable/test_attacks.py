"""Sampled code that attacks: the gateway's user, the other answers of its group, and the test that judges it.

Each attack is run for a gateway of an ordinary user and, where the tests run as root, for one of root; and in each form
of the sandbox that this machine grants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_hooks.builtin.verifiable.sandbox import Form
from tests.reward_hooks.builtin.verifiable.attacks import COSTLY, FORGES, LEAVES, REACHES
from tests.reward_hooks.builtin.verifiable.gateway_user import SECRET
from tests.reward_hooks.builtin.verifiable.having import MISSING, folder_of_programs

#: A user without a name, who owns nothing.
ORDINARY = 23_456
#: An interpreter that every user may read.
PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).parents[4]
LIMITS: dict[str, Any] = {"memory_bytes": 1 << 28, "seconds": 15.0, "cpu_seconds": 3}

pytestmark = pytest.mark.slow


class Gateway:
    """The process of a gateway's user, and what that user has."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.has = self._read()

    def rewards(self, answers: list[str], *tests: Any, seconds: float = 60.0, **options: Any) -> list[float]:
        """The rewards, or what went wrong instead."""
        return self.judged(answers, *tests, seconds=seconds, **options)["rewards"]

    def judged(self, answers: list[str], *tests: Any, seconds: float = 60.0, **options: Any) -> dict[str, Any]:
        answer = self._ask(
            {"answers": answers, "tests": list(tests), "seconds": seconds, "options": {"limits": LIMITS, **options}}
        )
        assert "error" not in answer, answer
        return answer

    def run_by_the_user(self, source: str) -> str:
        """What it prints without any sandbox."""
        return self._ask({"plain": source})["output"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module", params=["root", "ordinary"])
def user(request: pytest.FixtureRequest) -> int:
    if request.param == "root" and os.geteuid():
        pytest.skip("only root can run the gateway as root")
    return ORDINARY if request.param == "ordinary" and not os.geteuid() else 0


@pytest.fixture(scope="module", params=[Form.NAMESPACES, Form.LANDLOCK])
def form(request: pytest.FixtureRequest) -> Form:
    if MISSING[request.param]:
        pytest.skip(f"THE SANDBOX WITH {request.param} IS NOT TESTED HERE: {MISSING[request.param]}")
    return request.param


@pytest.fixture(scope="module")
def gateway(user: int, form: Form) -> Iterator[Gateway]:
    # not pytest's folder, which another user may not enter
    with (
        tempfile.TemporaryDirectory(prefix="gateway-of-") as folder,
        folder_of_programs("prlimit", *(["bwrap"] if form is Form.NAMESPACES else [])) as programs,
    ):
        if user:
            os.chown(folder, user, user)
        command = [
            sys.executable,
            "-P",
            "-m",
            "tests.reward_hooks.builtin.verifiable.gateway_user",
            str(user),
            folder,
            PYTHON,
        ]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # without HOME, as a user has it who has no name
            env={"PATH": str(programs), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        ) as process:
            yield Gateway(process)
            assert process.stdin is not None
            process.stdin.close()


def prints(text: str) -> dict[str, str]:
    """A test that is passed by printing ``text``."""
    return {"stdin": "", "stdout": text}


@pytest.mark.parametrize("attack", REACHES)
def test_nothing_outside_is_reached(gateway: Gateway, attack: str) -> None:
    source = REACHES[attack].format(**gateway.has)
    reached = gateway.run_by_the_user(source).strip()
    texts = [reached] if reached in (SECRET, "done") else [SECRET, "done"]
    # no reward, and a program that prints the same by itself has one
    rewards = gateway.rewards([source, *(f"print({text!r})" for text in texts)], *map(prints, texts))
    assert rewards == [0.0, *[1 / len(texts) for _ in texts]]
    if reached not in texts:
        pytest.skip(f"this machine does not let the user itself do it: {attack}")


@pytest.mark.parametrize("trace", LEAVES)
def test_nothing_is_left_behind(gateway: Gateway, trace: str) -> None:
    mark = f"left-{uuid.uuid4().hex}"
    source, path = (text.format(mark=mark) for text in LEAVES[trace])
    try:
        gateway.rewards([source], prints("done"))
        assert not Path(path).exists()
        gateway.run_by_the_user(source)
        assert Path(path).exists(), "the attack itself is wrong"
    finally:
        Path(path).unlink(missing_ok=True)


def test_a_neighbours_program_is_not_seen(gateway: Gateway) -> None:
    looks = f"""
import glob, time
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for path in glob.glob("/tmp/sandbox-*/program.py") + glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if "the-neighbours-own-idea" in open(path).read().replace(__file__, ""):
                if open(path).read() != open(__file__).read():
                    print({SECRET!r})
                    raise SystemExit
        except OSError:
            pass
    time.sleep(0.01)
"""
    waits = "import time\nthought = 'the-neighbours-own-idea'\ntime.sleep(2.5)\nprint('done')\n"
    assert gateway.rewards([looks, waits], prints(SECRET), prints("done"), parallel=4) == [0.0, 0.5]


@pytest.mark.parametrize("answer", COSTLY)
def test_one_bad_answer_does_not_cost_the_others_their_reward(gateway: Gateway, answer: str) -> None:
    good = "def f(x):\n    return x * 2\n"
    # one test: some of the answers use up all of its time
    rewards = gateway.rewards([good, COSTLY[answer], good], {"call": "f(2)", "returns": 4.0})
    assert rewards == [1.0, 0.0, 1.0]


def test_an_answer_without_end_does_not_use_up_the_time_of_the_others(gateway: Gateway) -> None:
    good = "def f(x):\n    return x * 2\n"
    tests = [{"call": f"f({number})", "returns": 2 * number} for number in range(4)]
    limits = {**LIMITS, "seconds": 4.0, "cpu_seconds": 60}
    judged = gateway.judged([good, "while True: pass", good], *tests, seconds=20.0, limits=limits, parallel=1)
    assert judged["rewards"] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "test",
    [{"call": "f(2)", "returns": 4}, "assert f(2) == 4", "def check(f):\n    assert f(2) == 4\ncheck(f)"],
    ids=["call", "assert", "check"],
)
def test_a_wrong_answer_does_not_look_right(gateway: Gateway, test: Any) -> None:
    *wrong, right = gateway.rewards([*FORGES.values(), "def f(x): return x + 2"], test, seconds=300.0)
    assert dict(zip(FORGES, wrong, strict=True)) == dict.fromkeys(FORGES, 0.0)
    assert right == 1.0


VALUES = [
    ("2432902008176640000 + 10**9", 2432902008176640000, 0.0),
    ("2432902008176640000", 2432902008176640000, 1.0),
    ("2432902008176640000.0 + 10**9", 2432902008176640000, 0.0),
    ("3.0", 3, 1.0),
    ("3.0000000001", 3, 0.0),
    ("True", 1, 0.0),
    ("1", True, 0.0),
    ("0.1 + 0.2", 0.3, 1.0),
    ("[0.1 + 0.2, {'a': 1}]", [0.3, {"a": 1}], 1.0),
    ("0.3001", 0.3, 0.0),
    ("[10**20 + 1]", [10**20], 0.0),
    ("float('nan')", 0.0, 0.0),
    ("(1, 2)", [1, 2], 1.0),
    ("None", 0, 0.0),
]


def test_integers_are_equal_or_not_and_floats_nearly(gateway: Gateway) -> None:
    source = "".join(f"def f{number}(): return {value}\n" for number, (value, _, _) in enumerate(VALUES))
    checks = [{"call": f"f{number}()", "returns": expected} for number, (_, expected, _) in enumerate(VALUES)]
    rewards = [gateway.rewards([source], check) for check in checks]
    assert rewards == [[reward] for _, _, reward in VALUES]
