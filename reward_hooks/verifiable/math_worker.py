"""The process in which math-verify compares answers: one JSON line in, one out.

A process of its own, because math-verify keeps its deadlines with SIGALRM, which only a main thread gets, and because
only a process can be limited in the time and memory that an expression of a model ("9^9^9^9") takes.

Invariant: text marked as LaTeX keeps its marks; other text is marked as LaTeX only if it cannot be prose.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
import sys
import unicodedata
from typing import Any

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ", "0123456789+-=()n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")
_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{HYPHEN}": "-",
        "\N{NON-BREAKING HYPHEN}": "-",
        "\N{FULLWIDTH HYPHEN-MINUS}": "-",
        "\N{SMALL HYPHEN-MINUS}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{DIVISION SIGN}": "/",
        "\N{FRACTION SLASH}": "/",
        "\N{DIVISION SLASH}": "/",
        "\N{GREEK SMALL LETTER PI}": r"\pi ",
        "\N{INFINITY}": r"\infty ",
        "\N{LESS-THAN OR EQUAL TO}": r"\le ",
        "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
        "\N{NOT EQUAL TO}": r"\ne ",
        "\N{PLUS-MINUS SIGN}": r"\pm ",
        "\N{UNION}": r"\cup ",
        "\N{INTERSECTION}": r"\cap ",
    }
)
#: names that also occur without a backslash
_NAMES = {"pi": r"\pi ", "inf": r"\infty ", "infinity": r"\infty ", "oo": r"\infty "} | {
    name: f"\\{name} " for name in ("sin", "cos", "tan", "cot", "arcsin", "arccos", "arctan", "log", "ln", "exp")
}
_NAME = re.compile(rf"(?<![A-Za-z\\])(?:{'|'.join(_NAMES)})(?![A-Za-z])")
_INSIDE = r"((?:[^()]|\([^()]*\))*)"
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_TOKEN = re.compile(
    rf"(?P<word>\\[A-Za-z]+|\\[{{}}|,;:!%])|(?P<operand>\d+(?:[.,]\d+)*|\.\d+"
    rf"|(?:sqrt|{'|'.join(_NAMES)})(?![A-Za-z])|[abcxyz]{{1,3}}(?![A-Za-z])|[A-Za-z](?![A-Za-z]))"
    r"|(?P<operator>[-+*/^=<>|,()\[\]{}_%])|(?P<prose>[A-Za-z]+|\S)"
)
_GROUP = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
#: a number, perhaps with a unit
_MEASURED = re.compile(r"-?[\d.,]+[A-Za-z]+(?:/[A-Za-z]+)?(?:\^?\d|\^\{\d\})?")


def reference_forms(text: str) -> list[str]:
    """Ways to read a known answer; the first that is mathematics counts."""
    text = plain_signs(text)
    if _MARKED.search(text):
        return [text]
    piece = _last_piece(text)
    whole = piece == text.strip() and _needs_marks(piece)
    return [_marked(piece), text] if whole else [f"${text}$" if "\\" in text else text]


def answer_forms(text: str) -> tuple[list[str], bool]:
    """Ways to read an answer, and whether all of them count, or only the first that is mathematics."""
    text = plain_signs(text)
    if _MARKED.search(text):
        return [text], False
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return [text], False
    last = ([line for line in lines if "answer" in line.lower()] or lines)[-1]
    piece = _last_piece(last)
    if piece:
        return ([_marked(piece), text], bool(_MEASURED.fullmatch(piece))) if _needs_marks(piece) else ([text], False)
    # a pair or an interval in a sentence, which may be about a later number
    groups = [group for group in _GROUP.findall(last) if _last_piece(group) == group]
    return ([_marked(groups[-1]), text], True) if groups else ([text], False)


def plain_signs(text: str) -> str:
    """``text`` with ASCII or LaTeX in place of other digits, signs, fractions, powers and roots."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀-₎]+", lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    text = re.sub(r"(\d*)\s?([¼-¾⅐-⅞↉])", _fraction, text)
    text = unicodedata.normalize("NFKC", text)
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text.translate(_SIGNS))
    text = re.sub(rf"√\s*(?:\({_INSIDE}\)|(\d+(?:\.\d+)?|\w))", lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    # as a sign, not as a dash between words or in a range
    text = re.sub("(?<![\\w)\\]}])[\N{EN DASH}\N{EM DASH}](?=[\\d.(\\\\])", "-", text)
    text = re.sub(r"(?<=[\w)}]) ?[·⋅∙] ?(?=[\w(\\])", "*", text)
    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1*10^(\2)", text).replace("^(+", "^(")


def _fraction(found: re.Match[str]) -> str:
    value = unicodedata.normalize("NFKC", found[2]).replace("\N{FRACTION SLASH}", "/")
    return f"({found[1]}+{value})" if found[1] else value


def _last_piece(line: str) -> str:
    """The mathematics at the end of ``line``; empty if the line ends in prose, or the brackets do not match."""
    line = re.sub(r"(?<!\S)\*\*(.+?)\*\*(?!\w)", r"\1", line.replace("`", " ")).strip()
    line = re.sub(r"^[-*•]\s+", "", line).rstrip(".,;:!? ")
    start = after = len(line)
    kind = "operator"
    for token in reversed(list(_TOKEN.finditer(line))):
        if token["prose"]:
            break
        apart = token.end() < after
        if apart and kind == token.lastgroup == "operand":
            # two words, or a number and a unit
            return ""
        start = after = token.start()
        kind = token.lastgroup or ""
    piece = line[start:].lstrip("=,<>: ")
    if not re.search(r"[\d\\]|\w\s*[-+*/^=]", piece) and piece != line:
        return ""
    return piece if _balanced(piece) else ""


def _balanced(piece: str) -> bool:
    return sum(map(piece.count, "([")) == sum(map(piece.count, ")]")) and piece.count("{") == piece.count("}")


def _needs_marks(piece: str) -> bool:
    """Whether it is more than arithmetic; math-verify reads arithmetic without marks."""
    return bool(re.search(r"[A-Za-z\\\[{|=<>]", piece) or _GROUP.search(piece))


def _marked(piece: str) -> str:
    """As LaTeX in its marks."""
    piece = piece.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ")
    piece = re.sub(rf"(?<![A-Za-z\\])sqrt\({_INSIDE}\)", r"\\sqrt{\1}", piece)
    piece = _NAME.sub(lambda found: _NAMES[found[0]], piece)
    if piece.startswith("{") and piece.endswith("}"):
        piece = rf"\{{{piece[1:-1]}\}}"
    return f"${piece}$"


#: Seconds for reading one expression, and for comparing two.
STEP_SECONDS = 2
_MEMORY_BYTES = 4 << 30


def judge(accepted: list[str], answers: list[str]) -> dict[str, Any]:
    """``{"verdicts": [[value, reason], ...]}``, or ``{"unreadable": reference}``."""
    golds: list[Any] = []
    for text in accepted:
        gold = _first_read(reference_forms(text))
        if not gold:
            return {"unreadable": text}
        golds.append(gold)
    return {"verdicts": [_verdict(golds, answer) for answer in answers]}


def _warm_up() -> None:
    """Load what math-verify imports on first use, which may take longer than :data:`STEP_SECONDS`."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    verify(parse("$x^2$", parsing_timeout=0), parse("2", parsing_timeout=0), timeout_seconds=0)


def _verdict(golds: list[Any], answer: str) -> tuple[float, str]:
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    try:
        forms, each = answer_forms(answer)
        readings = [said for form in forms if (said := _read(form))] if each else [_first_read(forms)]
        if not any(readings):
            return 0.0, "no mathematical expression found"
        if any(verify(gold, said, timeout_seconds=STEP_SECONDS) for said in readings for gold in golds):
            return 1.0, ""
    except Exception as exc:  # sympy raises many kinds of errors on models' texts
        return 0.0, f"cannot be compared: {type(exc).__name__}"
    return 0.0, f"says {str(readings[0][-1])[:80]}"


def _read(text: str) -> list[Any]:
    """The expression and its text; only the text if it is marked but no mathematics; or nothing."""
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    return parse(text, parsing_timeout=STEP_SECONDS)


def _first_read(forms: list[str]) -> list[Any]:
    """The first of ``forms`` that is an expression, else the last."""
    said: list[Any] = []
    for form in forms:
        said = _read(form)
        if said and not isinstance(said[0], str):
            break
    return said


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # keeps other output out of the protocol
        _warm_up()
        for line in sys.stdin:
            request = json.loads(line)
            out.write(json.dumps(judge(request["accepted"], request["answers"])) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
