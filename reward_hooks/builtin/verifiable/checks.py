"""The tests of a task: what of a test runs in the sandbox, and what is compared outside.

Invariant: an expected value that can be told from the test's text never enters the sandbox. What a run prints and
returns is data of the answer's own making, and is compared here.

An ``assert EXPRESSION == LITERAL`` becomes the expression alone; its value comes out as data, and must be equal by
Python's ``==``. Everything else of a statement test runs where the answer's code runs, which can change what it means.
"""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reward_hooks.builtin.verifiable.sandbox import Finished
from swarm.errors import HookError

#: Relative and absolute tolerance where the expected value is a float: about half of a float's digits.
TOLERANCE = 1e-9
#: Writes values as JSON lists that say their type: only built-in types, so that reading them runs nothing of the
#: answer's. It has names of its own, since the answer's module may give ``list`` another meaning.
_RECORDER = """\
import json, numbers, os
compared = []
def plain(value):
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", *([plain(key), plain(inner)] for key, inner in value.items())]
    for kind, name in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if isinstance(value, kind):
            return [name, *map(plain, value)]
    raise TypeError("the test compares a value of type " + type(value).__name__ + ", which is no plain data")
def compare(number, value):
    compared.append([number, plain(value)])
def end(mark):
    os.write(RESULT, json.dumps([mark, *compared]).encode())
"""


@dataclass(frozen=True)
class Check:
    """One test: its standard input, what runs after the answer's code, and whether a run passed."""

    passed: Callable[[Finished], bool]
    stdin: str = ""
    epilogue: str = ""


def check_of(test: Any) -> Check:
    """The test in one of the three forms of :mod:`reward_hooks.builtin.verifiable.code`.

    Raises:
        HookError: it has none of them (``bad_reference``).
    """
    match test:
        case str():
            return _statements(test)
        case {"call": str() as call, "returns": expected}:
            epilogue = f"__import__('os').write(__result__, __import__('json').dumps({call}).encode())"
            return Check(lambda run: _returned(run.result, expected), epilogue=epilogue)
        case {"stdin": str() as stdin, "stdout": str() as wanted}:
            return Check(lambda run: run.status == 0 and _lines(run.output) == _lines(wanted), stdin)
        case _:
            raise HookError(f"this is no test: {str(test)[:200]}", code="bad_reference")


def same(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal: integers exactly, and within :data:`TOLERANCE` what is expected as a float."""
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or expected is None:
        return value is expected
    if isinstance(expected, float) and isinstance(value, int | float):
        try:
            return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:
            return False
    if isinstance(expected, list) and isinstance(value, list):
        left, right = cast("list[Any]", value), cast("list[Any]", expected)
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(expected, dict) and isinstance(value, dict):
        mine, wanted = cast("dict[str, Any]", value), cast("dict[str, Any]", expected)
        return mine.keys() == wanted.keys() and all(same(mine[key], wanted[key]) for key in wanted)
    return value == expected


def _statements(test: str) -> Check:
    comparisons = _Comparisons()
    try:
        test = ast.unparse(comparisons.visit(ast.parse(test)))
    except (SyntaxError, ValueError, RecursionError):
        comparisons = _Comparisons()
    # says that the end was reached; the answer's code cannot read it from a file
    mark = secrets.token_hex(16)
    epilogue = f"""\
__test__ = {{"RESULT": __result__}}
__import__("builtins").exec({_RECORDER!r}, __test__)
{test}
__test__["end"]({mark!r})
"""
    return Check(lambda run: _reached(run.result, mark, comparisons), epilogue=epilogue)


class _Comparisons(ast.NodeTransformer):
    """Replaces ``assert EXPRESSION == LITERAL`` and collects the literals."""

    def __init__(self) -> None:
        #: Literals, and whether they are compared by ``is``.
        self.expected: list[tuple[Any, bool]] = []
        #: Those that a run cannot pass by.
        self.required: set[int] = set()
        self._depth = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith):
            # it may expect the AssertionError
            return node
        self._depth += 1
        try:
            return super().generic_visit(node)
        finally:
            self._depth -= 1

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is() as operator], comparators=[right]):
                for side, literal in ((left, right), (right, left)):
                    try:
                        expected = ast.literal_eval(literal)
                    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                        continue
                    if self._depth == 1:
                        self.required.add(len(self.expected))
                    number = len(self.expected)
                    self.expected.append((expected, isinstance(operator, ast.Is)))
                    compare = ast.parse(f"__test__['compare']({number})", mode="eval").body
                    assert isinstance(compare, ast.Call)
                    compare.args.append(side)
                    return ast.copy_location(ast.Expr(compare), node)
            case _:
                pass
        return node


def _returned(result: str, expected: Any) -> bool:
    try:
        return bool(result) and same(json.loads(result), expected)
    except (ValueError, RecursionError):
        return False


def _reached(result: str, mark: str, comparisons: _Comparisons) -> bool:
    try:
        match json.loads(result):
            case [str() as label, *pairs] if label == mark:
                pass
            case _:
                return False
        compared: set[int] = set()
        for number, value in cast("Sequence[Any]", pairs):
            expected, identical = comparisons.expected[number]
            if not (_value(value) is expected if identical else _value(value) == expected):
                return False
            compared.add(number)
        return compared >= comparisons.required
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return False


def _value(plain: Any) -> Any:
    """What the recorder wrote, in built-in types."""
    match plain:
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
        case ["bytes", digits]:
            return bytes.fromhex(digits)
        case ["dict", *items]:
            return {_value(key): _value(inner) for key, inner in cast("Sequence[Any]", items)}
        case ["list", *values]:
            return [_value(value) for value in values]
        case ["tuple", *values]:
            return tuple(_value(value) for value in values)
        case ["set", *values]:
            return {_value(value) for value in values}
        case list() | dict():
            raise ValueError("the recorder writes no such value")
        case _:
            return plain


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
