# ruff: noqa: RUF001 - signs that look like others are what is tested
"""Mathematical answers, and a worker that hangs, dies or is busy."""

from __future__ import annotations

import contextlib
import importlib.util
import sys

import pytest

from reward_hooks.verifiable.math_answers import Math, _Worker
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import answered, values

SERVES = "import sys\nfor line in sys.stdin: print('{\"verdicts\": []}', flush=True)"


needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Math:
    """Its worker, which takes seconds to start, is started in a folder with a package of our name that it must not
    import."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "reward_hooks").mkdir()
    (folder / "reward_hooks/__init__.py").write_text("raise SystemExit('imported from the working directory')")
    hook = Math()
    with contextlib.chdir(folder):
        assert values(hook, ["1"], answered("1")) == [1]
    return hook


@needs_math_verify
@pytest.mark.slow
def test_equal_expressions_are_equal_and_others_are_not(hook: Math) -> None:
    texts = ["It is $\\frac{1}{2}$.", "so 0.5", "2/4", "\\boxed{\\frac{2}{4}}", "50", "no idea", "9^9^9^9^9^9", ""]
    assert values(hook, texts, answered("\\frac{1}{2}")) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert values(hook, ["1,000", "1000.0", "100"], answered([1000, "7"])) == [1, 1, 0]
    with pytest.raises(HookError, match="metadata"):
        values(hook, ["1"], answered(None))


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        # algebra without dollar signs
        ("x^2-1", ["x^2-1", "$x^2-1$", "x²-1", "It is x^2 - 1.", "f(x) = x^2 - 1"], ["x^2+1", "1", "2"]),
        ("x**2 - 1", ["x^2-1", "**x^2-1**", "`x^2-1`", "so we get:\n- x^2 - 1"], ["x^2", "-1"]),
        ("x = 3", ["x = 3", "3", "$x=3$", "so x = 3."], ["x = 4", "4"]),
        ("2xy", ["2xy", "$2xy$", "2*x*y"], ["2", "2x"]),
        ("|x|", ["|x|", "$|x|$"], ["x"]),
        ("x₁ + 1", ["x_1 + 1", "$1 + x_{1}$"], ["1"]),
        # pairs, intervals, sets
        (
            "(2, 3)",
            ["(2,3)", "(2, 3)", "$(2,3)$", "$\\left(2, 3\\right)$", "\\left(2, 3\\right)", "\\boxed{(2,3)}"],
            ["(3, 2)", "3", "2", "[2, 3]"],
        ),
        ("$(2, 3)$", ["so the point (2,3) lies on it", "The answer is (2, 3), as claimed."], ["(2, 4)"]),
        ("(1, 2, 3)", ["(1,2,3)", "$(1,2,3)$"], ["(1, 3, 2)"]),
        ("[0, 1)", ["[0,1)", "$[0, 1)$", "the interval [0, 1)"], ["(0, 1)", "1", "[0, 1]"]),
        ("(-∞, 3]", ["(-\\infty, 3]", "$(-\\infty,3]$", "(−∞, 3]", "(-inf, 3]"], ["3", "(-∞, 3)"]),
        ("{1, 2}", ["{2, 1}", "\\{1,2\\}", "$\\{1,2\\}$", "{1,2}"], ["{1, 3}", "2"]),
        # signs and digits of other alphabets
        ("-7", ["−7", "$−7$", "-7", "–7", "－7", "the answer is −7", "−７"], ["7", "−8"]),
        ("−7", ["-7", "−7"], ["7"]),
        ("37", ["３７", "٣٧", "𝟑𝟕"], ["3", "7"]),
        ("1/2", ["½", "1⁄2", "0.5", "１／２", "$\\frac12$"], ["1", "2"]),
        ("3½", ["3.5", "7/2", "3 ½", "3½"], ["3", "1/2"]),
        ("6", ["2×3", "2 × 3", "2·3", "12÷2", "6"], ["2", "3"]),
        ("√2", ["sqrt(2)", "\\sqrt{2}", "$\\sqrt{2}$", "√2", "√(2)", "2^(1/2)"], ["2"]),
        ("2√3", ["2*sqrt(3)", "2\\sqrt{3}", "sqrt(12)"], ["2", "3"]),
        ("2π", ["2pi", "2*pi", "$2\\pi$", "2π", "6.283185307"], ["2"]),
        ("x ≤ 3", ["x <= 3", "$x \\le 3$", "3 ≥ x"], ["x ≥ 3"]),
        # numbers
        ("50%", ["50%", "50 %", "0.5", "$50\\%$", "50％", "1/2"], ["5", "5%"]),
        ("1,000", ["1000", "1 000", "1\u202f000", "1,000", "$1{,}000$", "1e3", "10^3"], ["1", "100"]),
        ("1e6", ["1000000", "10^6", "1,000,000", "1E+6"], ["1"]),
        ("1.5e-3", ["0.0015", "1.5E-3", "$1.5 \\times 10^{-3}$"], ["1.5"]),
        (
            "5",
            ["5 m/s", "5m/s", "5 apples", "It is 5!", "100m, no: 5m", "the point (2, 3) has distance 5 of it"],
            ["6 m"],
        ),
        ("42", ["x is 6 by 7: 42", "f(6) = 42", "I have a 42", "A = 42", "The answer: 42\nI hope that helps."], ["24"]),
        ("\\boxed{7}", ["7", "\\boxed{7}"], ["8"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mathematics_is_read_as_people_write_it(hook: Math, reference: str, right: list[str], wrong: list[str]) -> None:
    given = dict(zip(right + wrong, values(hook, right + wrong, answered(reference)), strict=True))
    assert given == dict.fromkeys(right, 1) | dict.fromkeys(wrong, 0)


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize("reference", ["no mathematics at all", "Paris", "so it is"])
def test_a_reference_must_be_mathematics(hook: Math, reference: str) -> None:
    with pytest.raises(HookError) as caught:
        values(hook, ["1"], answered(reference))
    assert caught.value.code == "bad_reference"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"swarm-gateway\[rewards\]") as caught:
        Math()
    assert caught.value.code == "missing_extra"


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "raise SystemExit", "print('half', end='')"])
def test_a_worker_that_hangs_or_dies_is_an_error_and_the_next_starts_anew(program: str) -> None:
    worker = _Worker([sys.executable, "-S", "-c", program])
    # more than a pipe holds: a worker that hangs does not read
    with pytest.raises(HookError) as caught:
        worker.ask({"answers": ["x" * 1_000_000]}, 0.5)
    assert caught.value.code == "math_worker"
    worker._command = [sys.executable, "-S", "-c", SERVES]
    assert worker.ask({"answers": []}, 20) == {"verdicts": []}


def test_waiting_for_a_busy_worker_ends_at_the_deadline() -> None:
    worker = _Worker([sys.executable, "-S", "-c", SERVES])
    with worker._lock, pytest.raises(HookError, match="busy"):
        worker.ask({}, 0.05)
