# ruff: noqa: RUF001 - signs that look like others are what is tested
"""Mathematical answers, and a worker that hangs, dies or is busy."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import math
import os
import sys
import threading
import time
from typing import Any

import pytest

from reward_hooks import HookContext
from reward_hooks.builtin.verifiable import math_worker
from reward_hooks.builtin.verifiable.math_answers import Math, _Worker
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import answered, values

SERVES = "import sys\nfor line in sys.stdin: print('{\"verdicts\": []}', flush=True)"


#: Between two answers, for who hopes that one of them is right.
JOINS = (
    *(
        " or ",
        " xor ",
        " and ",
        ", ",
        "; or ",
        " / ",
        "|",
        "…",
        "..",
        " to ",
        "-",
        " – ",
        "~",
        " vs ",
        " else ",
        " oder ",
    ),
    *("或", "、", "∨", "\n", "\t", "  ", "\u200b", "\u2028", " (", ":", " = ", " & ", "\\text{ or }", "\\mathrm{or}"),
    *("\\lor ", "\\quad ", "\\\\", "\\mid ", "\\approx ", "\\,"),
)

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
        # marks of LaTeX, of Markdown and of a template around a number
        ("12%", ["\\boxed{12\\%}", "\\boxed{12%}", "\\boxed{12}\\%", "$\\boxed{12 \\%}$"], ["\\boxed{13\\%}"]),
        ("0.12", ["$12\\%$", "\\boxed{12\\%}", "12\\%"], ["\\boxed{1.2\\%}"]),
        ("33\\frac{1}{3}\\%", ["\\boxed{33\\frac{1}{3}\\%}", "33 1/3%"], ["33"]),
        ("45^\\circ", ["\\boxed{45°}", "45°"], ["\\boxed{46°}"]),
        ("1,000", ["1\\,000", "\\boxed{1\\,000}", "$1\\,000$", "\\$1,000", "\\boxed{\\$1,000.}"], ["1", "0"]),
        ("58,\\!500", ["58500", "\\boxed{58,500}", "\\boxed{58,\\!500}"], ["58", "\\boxed{58, 500}"]),
        (
            "18",
            [
                *("The answer is \\$18.", "It is **\\$18**", "The answer is `18`.", "*18*", "\\boxed{18.}"),
                *("\\boxed{18~\\text{cm}}", "<think>\n3\n</think>\n<answer>18</answer>", "<answer>\n18\n</answer>"),
            ],
            ["18x", "18i", "18x^2", "<answer>3</answer>", "18:30"],
        ),
        ("-0.5", ["-.5", "The answer is - .5"], [".5"]),
        ("5", ["5"], ["The answer is - 5"]),
        # ratios, and lists without blanks
        ("3:4", ["3:4", "3 : 4", "$3:4$", "\\boxed{3:4}", "The ratio is 3:4."], ["3", "4", "3:5", "4:3"]),
        ("1:2:3", ["1:2:3", "\\boxed{1:2:3}"], ["1:2:4", "1"]),
        ("1,-2", ["-2, 1", "$1,-2$", "\\boxed{1,-2}"], ["1", "1,2"]),
        ("1,2,3", ["1, 2, 3", "\\boxed{1,2,3}", "{3,2,1}", "3,2,1"], ["1,2", "1.2", "1,2,4"]),
        (
            "-2,1",
            ["\\boxed{-2,1}", "\\boxed{1, -2}", "x = -2 or x = 1", "-2, 1", "-2,1"],
            ["-2", "\\boxed{2,1}", "-2, 2"],
        ),
        ("7,1", ["\\boxed{7,1}", "{1, 7}", "7,1", "7.1"], ["7", "8, 1"]),
        ("-10,-8,4", ["\\boxed{-10,-8,4}", "-10, -8, 4", "$4,-8,-10$"], ["-10, -8.4", "4"]),
        (
            "11,\\! 111,\\! 111",
            ["11111111", "\\boxed{11,111,111}", "\\boxed{11,\\! 111,\\! 111}"],
            ["111", "11, 111, 111"],
        ),
        # repeating decimals
        (
            "0.\\overline{3}",
            ["1/3", "\\boxed{0.\\overline{3}}", "$0.\\bar{3}$", "0.\\overline{33}"],
            ["0.3", "3", "0", "0.333"],
        ),
        ("-41/330", ["\\boxed{-0.1\\overline{24}}", "$-0.1\\overline{24}$"], ["\\boxed{-0.1\\overline{25}}"]),
        # a box with a unit, with a currency, or with two forms of one number
        (
            "18",
            [
                "\\boxed{18 dollars}",
                "\\boxed{18 fresh eggs.}",
                "\\boxed{\\text{18 cm}}",
                "\\boxed{€18}",
                "\\boxed{18 £}",
            ],
            [
                "\\boxed{18 or more}",
                "\\boxed{18 times pi}",
                "\\boxed{18 squared}",
                "\\boxed{18 million}",
                "\\boxed{\\text{17 cm}}",
                "\\boxed{18x}",
            ],
        ),
        (
            "1/4",
            ["\\boxed{\\frac{1}{4} = 0.25}", "\\boxed{0.25 = 25\\%}"],
            ["\\boxed{\\frac{1}{3} = 0.25}", "\\boxed{0.25 = 0.3}"],
        ),
        # a set by its condition
        (
            "$\\{x|-2\\leq x < 1\\}$",
            [
                *("[-2, 1)", "\\boxed{[-2,1)}", "$-2 \\le x < 1$", "\\boxed{\\{x \\mid -2 \\le x < 1\\}}"),
                *("$\\left\\{x : -2 \\leqslant x < 1\\right\\}$", "{x | -2 ≤ x < 1}"),
            ],
            ["1", "-2", "\\boxed{\\{x|-3\\leq x < 1\\}}", "\\boxed{\\{x|x<1\\}}"],
        ),
        ("(\\frac{1}{2}, \\infty)", ["\\boxed{\\{x \\in \\mathbb{R} \\mid x > \\frac{1}{2}\\}}"], ["\\{x | x > 2\\}"]),
        ("{x | x ≠ 2}", ["$x \\ne 2$", "\\boxed{\\{x|x \\neq 2\\}}"], ["2", "\\boxed{\\{x|x \\neq 3\\}}"]),
        # blanks between all signs, as some sets of data have them
        ("- 16", ["-16", "\\boxed{-16}", "The answer is - 16."], ["16", "\\boxed{16}"]),
        ("y = 2 x - 1", ["y = 2x - 1", "\\boxed{y=2x-1}", "$2 x - 1$"], ["1", "-1", "2x"]),
        ("4 a ^ { 2 } - 3 a", ["4a^2 - 3a", "\\boxed{4a^2-3a}"], ["3", "4", "-3"]),
        ("x = 5 m", ["5 m", "\\boxed{5}"], ["6 m"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mathematics_is_read_as_people_write_it(hook: Math, reference: str, right: list[str], wrong: list[str]) -> None:
    given = dict(zip(right + wrong, values(hook, right + wrong, answered(reference)), strict=True))
    assert given == dict.fromkeys(right, 1) | dict.fromkeys(wrong, 0)


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        # one claim: neither a list nor a range nor a denial is 5
        (
            "5",
            [
                "5, not 6",
                "not 6 but 5",
                "isn't 6, it is 5",
                "5 or 5",
                "$5$ or $5.0$",
                "Whether 2 or 3, the result is 5",
                "We use 3 and 4 to get 5",
                "5 and that is odd.",
                "5, which is odd.",
                "=> 5",
                "-> 5",
                "x = 5",
                "5%",
                "٥",
                "5 percent",
                "Answer: 6\nAnswer: 5",
                "Answer: 5\nCheck: $2 \\cdot 5 = 10$",
                "Let me answer step by step: 16 - 3 - 4 = 9.\nThat makes $5$.",
            ],
            [
                "5 or 6",
                "6 or 5",
                "either 6 or 5",
                "6 or maybe 5",
                "5 or it could be 6",
                "The answer is 6. Or 5.",
                "The answer is 6, maybe 5",
                "6 (or 5)",
                "6 (alternatively 5)",
                "6, 5",
                "6; 5",
                "6 and 5",
                "The answers are 6 and 5.",
                "$6$ or $5$",
                "It could be $6$ or maybe $5$",
                "x = 6 or x = 5",
                "x = 6, x = 5",
                "6 cm or 5 cm",
                "6 or 5 apples",
                "Answer: \\(6\\) or \\(5\\)",
                "{5, 6}",
                "$\\{5, 6\\}$",
                "$x \\in \\{5, 6\\}$",
                "[4, 6]",
                "$4 \\le x \\le 6$",
                "$5 \\pm 1$",
                "$\\pm 5$",
                "not 5",
                "It is not 5.",
                "It isn't 5",
                "It isn’t 5",
                "It is not equal to 5",
                "It is not 5 cm",
                "The answer is not 5",
                "5 is not the answer.",
                "5 is wrong",
                "6, not 5",
                "$\\neg 5$",
                "> 5",
                "≥ 5",
                "x > 5",
                "$5 \\ne 6$",
                "5.0000001",
                "4.9999999",
                "Answer: 5\nAnswer: 6",
                "5\n6",
            ],
        ),
        # the last box counts, and what is joined to it
        (
            "7",
            [
                "\\boxed{6} wait, \\boxed{7}",
                "I first got \\boxed{6}. Correcting: \\boxed{7}.",
                "\\boxed{6}\n\nActually:\n\\boxed{7}",
                "$\\boxed{6}$ and then $\\boxed{7}$",
                "\\boxed{7}, since 7 is not 6",
                "\\boxed{\\boxed{7}}",
                "\\boxed{\\frac{14}{2}}",
                "\\boxed{7 \\text{ cm}}",
                "\\boxed{x = 7}",
            ],
            [
                "\\boxed{7} wait, \\boxed{6}",
                "\\boxed{6} or \\boxed{7}",
                "$\\boxed{6}$ or $\\boxed{7}$",
                "$\\boxed{6}$, $\\boxed{7}$",
                "\\boxed{6} \\boxed{7}",
                "\\boxed{7}\\boxed{8}\\boxed{7}",
                "\\boxed{8 or 7}",
                "\\boxed{8, 7}",
                "\\boxed{8 \\text{ or } 7}",
                "\\boxed{7} or 8",
                "\\boxed{\\text{not } 7}",
                "not \\boxed{7}",
                "\\boxed{> 7}",
                "\\boxed{7",
            ],
        ),
        # a decimal is the number that its digits say, except for an irrational number
        (
            "22/7",
            ["22/7", "44/14", "3 1/7", "$3\\frac{1}{7}$", "$3 1/7$", "3\\frac17"],
            ["3.142857", "3.14285714285714285714", "31/7", "\\pi", "3.1428571 or 22/7 or 3"],
        ),
        ("3 1/7", ["22/7", "3 1/7", "3\\frac{1}{7}"], ["31/7", "3", "3.142857", "3/7"]),
        ("-3 1/2", ["-3.5", "-7/2", "−3 1/2"], ["-2.5", "3.5"]),
        ("1/3", ["1/3", "2/6", "$\\frac13$"], ["0.333333", "0.3333333333333333", "33.3333%", "0.33"]),
        ("0.333333", ["0.333333", "0.3333330", "333333/1000000"], ["1/3", "0.3333333", "0.33"]),
        ("\\sqrt{2}", ["1.414214", "1.41421356", "2^(1/2)"], ["1.4142", "1.41421", "99/70"]),
        ("(\\sqrt{2}, 1)", ["(1.41421356, 1)", "(sqrt(2), 1)"], ["(1, sqrt(2))", "sqrt(2), 2"]),
        ("1e-20", ["1e-20", "10^-20", "$\\frac{1}{10^{20}}$"], ["1e-21", "0"]),
        ("$10^{-20}$", ["10^(-20)"], ["$10^{-21}$", "$2 \\cdot 10^{-20}$"]),
        ("50%", ["50%", "0.5", "1/2"], ["5000%", "0.5%"]),
        # lists and sets
        (
            "$\\{2, -3\\}$",
            [
                "x = 2 or x = -3",
                "x = -3 or x = 2",
                "$x = 2$ or $x = -3$",
                "x = 2, x = -3",
                "x = 2 or -3",
                "2, -3",
                "-3 and 2",
                "so the roots are 2 and -3",
                "{-3, 2}",
                "\\boxed{2, -3}",
                "\\boxed{2} and \\boxed{-3}",
                "\\boxed{x=2 \\text{ or } x=-3}",
            ],
            ["x = 2", "-3", "x = 2 or x = 3", "x = 2 or x = -3 or x = 5", "2 or 2", "(2, -3) or 5"],
        ),
        ("2, -3", ["x = 2 or x = -3", "{2, -3}", "-3, 2"], ["2", "2, 3", "2, -3, 4"]),
        ("x = 2 or x = -3", ["x = -3 or x = 2", "{2, -3}", "-3, 2"], ["x = 2", "x = 2 or x = 3"]),
        # inequalities and intervals
        (
            "[0,1)",
            ["0 \\le x < 1", "$0 \\le x < 1$", "0 <= x < 1", "1 > x ≥ 0", "x ≥ 0 and x < 1", "$x \\in [0,1)$"],
            ["0 < x < 1", "0 \\le x \\le 1", "0.5", "x ≥ 0 or x < 1", "0 \\le x"],
        ),
        ("$(-\\infty, 1) \\cup (3, \\infty)$", ["x < 1 or x > 3", "$x<1$ or $x>3$"], ["x < 1 and x > 3", "x < 1"]),
        ("(2, 3)", ["so (2,3) lies on it"], ["the point (2, 3) has distance 5 of it", "(2, 3) or (3, 2)"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_makes_one_claim(hook: Math, reference: str, right: list[str], wrong: list[str]) -> None:
    context = HookContext(num_repeat=2, deadline_seconds=120)
    given = dict(zip(right + wrong, values(hook, right + wrong, answered(reference), context), strict=True))
    assert given == dict.fromkeys(right, 1) | dict.fromkeys(wrong, 0)


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    ["5{}6", "$5{}6$", "$5${}$6$", "\\boxed{{5}}{}6", "\\boxed{{5{}6}}", "\\boxed{{5}}{}\\boxed{{6}}", "x = 5{}x = 6"],
)
def test_no_text_pays_for_two_answers(hook: Math, form: str) -> None:
    texts = [form.format(join) for join in JOINS]
    context = HookContext(num_repeat=2, deadline_seconds=120)
    paid = [values(hook, texts, answered(answer), context) for answer in ("5", "6")]
    assert [text for text, five, six in zip(texts, *paid, strict=True) if five and six] == []


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        "9^9^9^9",
        "$9^{9^{9^9}}$",
        "\\boxed{9^{9^{9^{9}}}}",
        "$100000000!$",
        "$2^{10^{12}}$",
        "1e999999999",
        "$\\sum_{n=1}^{10^{10}} n^n$",
        "1+" * 20_000 + "1",
        "$" + "(" * 5_000 + ")" * 5_000 + "$",
        "$" + "x^" * 3_000 + "2$",
        "\\boxed{" * 20_000,
        "$\\frac{" * 3_000,
        "√(" * 5_000,
        "7 or " * 5_000 + "7",
        "9" * 100_000,
        "7 is " * 20_000,
        "not " * 20_000,
        " " * 200_000,
        "1/0",
        "∞",
    ],
    ids=lambda bomb: f"{bomb[:20]}-{len(bomb)}",
)
def test_a_bomb_costs_the_others_nothing(hook: Math, bomb: str) -> None:
    context = HookContext(num_repeat=3, deadline_seconds=60)
    assert values(hook, ["5", bomb, "5"], answered("5"), context) == [1, 0, 1]
    assert values(hook, ["5"], answered("5")) == [1]


@needs_math_verify
@pytest.mark.slow
def test_if_no_answer_can_be_compared_the_group_has_no_rewards(hook: Math) -> None:
    with pytest.raises(HookError, match="no answer could be compared") as caught:
        values(hook, ["9^9^9^9", "$100000000!$"], answered("5"), HookContext(num_repeat=2, deadline_seconds=60))
    assert caught.value.code == "math_worker"


@needs_math_verify
@pytest.mark.slow
def test_an_answer_is_not_wrong_because_other_groups_took_the_time(hook: Math) -> None:
    # on a busy machine, a right answer takes a second
    task, context = answered("5"), HookContext(num_repeat=3, deadline_seconds=12)
    assert values(hook, ["5", "9^9^9^9", "5"], task, context) == [1, 0, 1]
    lock = hook._worker._lock
    lock.acquire()
    threading.Timer(2, lock.release).start()
    with pytest.raises(HookError, match="other groups") as caught:
        values(hook, ["5", "9^9^9^9", "5"], task, context)
    assert caught.value.code == "math_worker"


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize("reference", ["no mathematics at all", "Paris", "so it is"])
def test_a_reference_must_be_mathematics(hook: Math, reference: str) -> None:
    with pytest.raises(HookError) as caught:
        values(hook, ["1"], answered(reference))
    assert caught.value.code == "bad_reference"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.\[rewards\]") as caught:
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


def test_a_dead_worker_is_told_where_it_takes_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in macOS, once it has ended."""

    worker, kill = _Worker([sys.executable, "-S", "-c", "raise SystemExit"]), os.killpg

    def refuse(group: int, number: int) -> None:
        if worker._process is not None and group == worker._process.pid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        # an earlier test's worker may be collected as garbage just now, which kills it and waits for its end
        kill(group, number)

    monkeypatch.setattr(os, "killpg", refuse)
    with pytest.raises(HookError, match="died"):
        worker.ask({}, 20)


def test_what_judges_an_answer_ends_with_its_worker() -> None:
    program = (
        "import os, sys, time; print(end='x', flush=True); os.fork() and os.kill(os.getpid(), 9); time.sleep(3600)"
    )
    worker = _Worker([sys.executable, "-S", "-c", program])
    # the child has the worker's end of the pipe
    with pytest.raises(HookError, match="no answer"):
        worker.ask({}, 5)


@needs_math_verify
@pytest.mark.slow
def test_a_system_that_takes_no_limit_of_memory_judges_all_the_same() -> None:
    """As macOS, which refuses each in these words."""
    program = (
        "import resource\n"
        "def refuse(*_): raise ValueError('current limit exceeds maximum limit')\n"
        "resource.setrlimit = refuse\n"
        "from reward_hooks.builtin.verifiable.math_worker import main\n"
        "main()"
    )
    worker = _Worker([sys.executable, "-P", "-c", program])
    assert worker.ask({"accepted": ["5"], "answers": ["$5$"]}, 60) == {"verdicts": [[1.0, ""]]}


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize("computes", [False, True])
def test_an_expression_waits_for_a_busy_machine_and_computes_for_no_longer_than_it_may(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, a right answer had no mathematical expression on a busy machine, and the worker did not start."""
    from math_verify import parser

    read = parser.extract_target_from_pred

    def late(*args: Any, **kwargs: Any) -> list[Any]:
        began = time.thread_time()
        while computes and time.thread_time() < began + 0.5:
            pass
        # others have the processor
        time.sleep(0.5)
        return read(*args, **kwargs)

    monkeypatch.setattr(parser, "extract_target_from_pred", late)
    assert [str(part) for part in math_worker._parsed("$5$", 0.2)] == ([] if computes else ["5", "5"])


def test_a_deadline_may_be_infinite() -> None:
    worker = _Worker([sys.executable, "-S", "-c", SERVES])
    assert worker.ask({}, math.inf) == {"verdicts": []}


def test_waiting_for_a_busy_worker_ends_at_the_deadline() -> None:
    worker = _Worker([sys.executable, "-S", "-c", SERVES])
    with worker._lock, pytest.raises(HookError, match="busy"):
        worker.ask({}, 0.05)
