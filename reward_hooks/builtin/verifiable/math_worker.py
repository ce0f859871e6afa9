"""The process in which math-verify compares answers: one JSON line in, one out.

A process of its own, because only a main thread gets the signal that ends a step. Each answer is judged in a child of
it, because only a process can be limited in the time and memory that an expression of a model ("9^9^9^9") takes.

Invariant: whatever an answer says, the others get their verdict, and the next one finds the worker as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

from reward_hooks.builtin.verifiable.math_text import Denial, Statement, answer, reference, reference_as_list

#: Seconds of the processor for reading one expression, and for comparing two.
STEP_SECONDS = 2.0
#: How far a decimal may be from an irrational number, as a share of it: six digits, rounded.
ROUNDED = 5e-7
#: Two irrational numbers that agree to this share are equal.
_EQUAL = 1e-30
_DIGITS = 40
_MEMORY_BYTES = 4 << 30
#: Seconds for one answer, at most.
LONGEST_SECONDS = 5.0
_MOST_OF_THE_TIME = 0.9


def judge(accepted: list[str], answers: list[str], until: float, *, crowded: bool) -> dict[str, Any]:
    """``{"verdicts": [[value, reason], ...]}``, or why there are none: ``{"error": message, "code": code}``.

    Args:
        accepted: known answers.
        answers: of a group.
        until: when all must be judged, by the monotonic clock. Each answer has an equal share of what is left.
        crowded: other groups took some of the time.
    """
    golds: list[list[Any]] = []
    for text in accepted:
        gold = _read(reference(text))
        if not gold:
            return {"error": f"the known answer {text!r} is no mathematics", "code": "bad_reference"}
        golds.append(gold)
        if listed := reference_as_list(text):
            golds.append(_read(listed))
    verdicts: list[tuple[float, str] | None] = []
    for index, text in enumerate(answers):
        share = _MOST_OF_THE_TIME * (until - time.monotonic()) / (len(answers) - index)
        verdicts.append(_apart(golds, text, min(share, LONGEST_SECONDS)))
    if crowded and not all(verdicts):
        return {"error": "other groups left the math worker too little time", "code": "math_worker"}
    if not any(verdicts):
        return {"error": f"no answer could be compared within {LONGEST_SECONDS:g} s", "code": "math_worker"}
    return {"verdicts": [verdict or (0.0, "takes too long or too much memory to compare") for verdict in verdicts]}


def _apart(golds: list[list[Any]], text: str, seconds: float) -> tuple[float, str] | None:
    """The verdict of a child of this process; ``None`` if it takes too long or dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(_verdict(golds, text)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        # a verdict is short: it comes in one piece
        ready = select.select([reading], [], [], max(0.0, seconds))[0]
        value, reason = json.loads(os.read(reading, select.PIPE_BUF) if ready else b"")
        return value, reason
    except ValueError:
        return None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _verdict(golds: list[list[Any]], text: str) -> tuple[float, str]:
    try:
        statement = answer(text)
        if statement.each:
            readings = [reading for form in statement.parts[0] if (reading := _parsed(form)[:1])]
        else:
            readings = [reading] if (reading := _read(statement)) else []
        if not readings:
            return 0.0, "no mathematical expression found"
        if any(_equal(gold, parts) for parts in readings for gold in golds):
            return 1.0, ""
    except Denial as exc:
        return 0.0, f"says what the answer is not: {exc}"
    except Exception as exc:  # sympy raises many kinds of errors on models' texts
        return 0.0, f"cannot be compared: {type(exc).__name__}"
    return 0.0, f"says {', '.join(str(part) for part in readings[0])[:80]}"


def _read(statement: Statement) -> list[Any]:
    """The expression of each part, or a text that is marked but no mathematics; nothing if a part is neither.

    Inequalities are one set: where all of them hold, or where one does.
    """
    from sympy import Eq, Intersection, Ne, Union
    from sympy.core.relational import Relational

    readings = [_first_read(forms) for forms in statement.parts]
    if not all(readings):
        return []
    parts = [reading[0] for reading in readings]
    if len(parts) > 1 and all(isinstance(part, Relational) and not isinstance(part, Eq | Ne) for part in parts):
        sets = [part.as_set() for part in parts]
        return [Union(*sets) if statement.either else Intersection(*sets)]
    return parts


def _first_read(forms: Sequence[str]) -> list[Any]:
    """The first of ``forms`` that is an expression, else the last."""
    reading: list[Any] = []
    for form in forms:
        reading = _parsed(form)
        if reading and not isinstance(reading[0], str):
            break
    return reading


def _parsed(text: str, seconds: float = STEP_SECONDS) -> list[Any]:
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    with _step(seconds):
        return parse(text, parsing_timeout=0)


@contextlib.contextmanager
def _step(seconds: float = STEP_SECONDS) -> Generator[None]:
    """A block that ends, as by math-verify's own timeouts, once it has computed for so long; 0: it may take its time.
    Those go by the clock, by which a busy machine reads no expression in a right answer."""
    from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingImports]

    def end(*_: object) -> None:
        raise TimeoutException

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _equal(gold: list[Any], answered: list[Any]) -> bool:
    """Whether a list of expressions, which a set of them is too, equals another in any order."""
    gold, answered = _elements(gold), _elements(answered)
    if len(gold) == len(answered) == 1:
        return _same(gold[0], answered[0])
    answered = _distinct(answered)
    left = _distinct(gold)
    if len(left) != len(answered):
        return False
    for part in answered:
        match = next((index for index, other in enumerate(left) if _same(other, part)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _elements(parts: list[Any]) -> list[Any]:
    from sympy import FiniteSet

    return [element for part in parts for element in (part.args if isinstance(part, FiniteSet) else [part])]


def _distinct(parts: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        if not any(_same(other, part) for other in kept):
            kept.append(part)
    return kept


def _same(gold: Any, answered: Any) -> bool:
    """Whether two expressions are equal. A decimal is the number that its digits say: 0.333333 is not 1/3.

    Where the other number is irrational, it may be rounded (:data:`ROUNDED`).
    """
    from math_verify import verify  # pyright: ignore[reportMissingImports]
    from sympy import Basic, Eq, Tuple

    if isinstance(gold, str) or isinstance(answered, str):
        with _step():
            return bool(verify(gold, answered, timeout_seconds=0))
    if isinstance(gold, Tuple) and isinstance(answered, Tuple):
        return len(gold) == len(answered) and all(map(_same, gold.args, answered.args))
    if isinstance(answered, Eq) and all(getattr(side, "is_number", False) for side in (gold, *answered.args)):
        # one number in two forms; else two claims
        return _same(answered.lhs, answered.rhs) and _same(gold, answered.rhs)
    if isinstance(answered, Eq) and answered.lhs.is_Symbol and getattr(gold, "is_number", False):
        answered = answered.rhs
    elif isinstance(gold, Eq) and gold.lhs.is_Symbol and getattr(answered, "is_number", False):
        gold = gold.rhs
    left, right = _exact(gold), _exact(answered)
    if isinstance(left, Basic) and isinstance(right, Basic) and left.is_number and right.is_number:
        equal = _same_number(left, right, rounded=left != gold or right != answered)
        if equal is not None:
            return equal
    with _step():
        return bool(verify(left, right, timeout_seconds=0, allow_set_relation_comp=True))


def _exact(expression: Any) -> Any:
    """With the fractions that its decimals say."""
    from sympy import Float, Rational

    decimals = expression.atoms(Float)
    return expression.xreplace({number: Rational(str(number)) for number in decimals}) if decimals else expression


def _same_number(left: Any, right: Any, *, rounded: bool) -> bool | None:
    """Whether two constants are equal; ``None`` where they have no finite value.

    As in math-verify, a percentage is a share of one, and also the number before its sign.
    """
    shares = [_percent(number) for number in (left, right)]
    if None not in shares:
        return _same_number(*shares, rounded=rounded)
    for share, other in ((shares[0], right), (shares[1], left)):
        if share is not None and _same_number(share, other, rounded=rounded):
            return True
    left, right = left.doit(), right.doit()
    if left.is_Rational and right.is_Rational:
        return left == right
    values = [abs(number.evalf(_DIGITS)) for number in (left, right, left - right)]
    if not all(value.is_Float or value.is_Rational for value in values) or not all(value.is_finite for value in values):
        return None
    share = ROUNDED if rounded and (left.is_Rational or right.is_Rational) else _EQUAL
    return bool(values[2] <= share * max(values[:2]))


def _percent(number: Any) -> Any:
    """The number before the sign of a percentage."""
    from sympy import Mul, Rational, UnevaluatedExpr

    hundredth = UnevaluatedExpr(Rational(1, 100))
    return number.args[0] if isinstance(number, Mul) and number.args[1:] == (hundredth,) else None


def warm_up() -> None:
    """Load what math-verify imports and builds on first use, which each child would do anew."""
    for gold, answered in (
        ("5", "$x = 5$"),
        (r"$\frac{1}{2}$", "0.5"),
        ("$[0, 1)$", r"$0 \le x < 1$"),
        ("$x^2$", "$x*x$"),
    ):
        # to load takes longer than one expression may
        _verdict([_parsed(gold, 0)[:1]], answered)


def main() -> None:
    """Serve until standard input ends."""
    # macOS refuses every limit below what a process has at its start
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # keeps other output out of the protocol
        warm_up()
        for line in sys.stdin:
            request = json.loads(line)
            out.write(json.dumps(judge(**request)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
