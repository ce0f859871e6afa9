"""What a text says in the end, as texts that math-verify reads.

Invariant: an answer makes one claim. The last box counts; without a box, the end of the line that says "answer", or of
the last line with mathematics. What is joined there by "or", "and" or commas is a list, and what is denied ("not 5") or
only limited ("> 5") is no answer.

Text marked as LaTeX keeps its marks; other text is marked as LaTeX only if it cannot be prose.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_SIGNS = str.maketrans(
    {
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
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
    rf"|(?:sqrt|{'|'.join(_NAMES)})(?![A-Za-z])|[abcxyz]{{1,3}}(?![A-Za-z])|(?<!['A-Za-z])[A-Za-z](?![A-Za-z]))"
    r"|(?P<operator>[-+*/^=<>|,()\[\]{}_%])|(?P<prose>[A-Za-z]+|\S)"
)
_GROUP = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
#: a number, perhaps with a unit; no unit is one of these letters
_MEASURED = re.compile(r"-?[\d.,]+(?![iknxyz](?![A-Za-z]))[A-Za-z]+(?:/[A-Za-z]+)?(?:\^?\d|\^\{\d\})?")
#: A number with words in a box, of which math-verify knows only some as units; some words change the number.
_COUNTED = re.compile(
    r"(?:\\text\{)?\s*(-?\d[\d.,/]*) (?:[A-Za-z]{1,3}(?=\})"
    r"|(?!percent|\w*illion|thousand|hundred|dozen|sqrt|times|plus|minus|over|divided|squared|cubed|choose|factorial)"
    r"[A-Za-z]{4,}(?: (?!or\b|and\b)[A-Za-z]+)*)\s*\}?"
)
#: math-verify reads these in no box
_WITH_SIGN = re.compile(r"-?\d[\d.,]*\s?[%°]")
#: A line that gives the answer, not one that only speaks of it.
_SAYS_ANSWER = re.compile(r"\banswer\W*(?:is\b|:|=)", re.IGNORECASE)
_TAG = re.compile(r"<(/?)([A-Za-z_]{4,})>")


#: Words that may stand between "or" and the alternative.
_PERHAPS = r"(?:else|maybe|perhaps|possibly|even|also|alternatively|rather|just|it|could|can|might|may|be|is)"
_JOINT = re.compile(
    rf"(?P<open>[(\[{{])(?!\s*or\b)|(?P<close>[)\]}}])"
    rf"|[,;]?\s*\(?\s*\b(?P<word>or|and|alternatively|maybe|perhaps|possibly)\b(?:\s+{_PERHAPS}\b)*|[,;](?=\s)",
    re.IGNORECASE,
)
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\[()\[\],;!]|\\q?quad|\\text\{\s*(?:or|and)\s*\}|\b(?:or|and)\b)*")
_AFTER_BOX = re.compile(r"[\s$]*(?:\\[)\]])?[\s,(]*\bor\b([^.\n]*\d[^.\n]*)")
_FILLING = r"(?:be|been|is|are|equal|equals|to|exactly|actually|just|simply|the|a|an|answer|result|value|number|\w\s*=)"
_DENIED_BEFORE = re.compile(
    rf"(?:\b(?:not|never|neither|nor|cannot|except|unlike)|n't|\\neg|\\lnot|¬)(?:\s+{_FILLING})*[\s:$(*]*$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\d)}\]][\s$*]*(?:is|was|are|were|would be|seems)"
    r"(?:\s+(?:not|wrong|incorrect|false|impossible)\b|n't)[^.\d]*\W*$",
    re.IGNORECASE,
)
_DENIED_END = re.compile(r"(.*\w.*?)[\s,;(]+(?:and\s+)?(?:not|instead of|rather than)\s[^.]*\W*$", re.IGNORECASE)
_ARROW = re.compile(r"^(?:[-=]+>|[=,: ])+")
_LIMIT = re.compile(r"[<>]|\\(?:[lg]e(?:q|qslant)?|[lg]t|neq?|neg|lnot)(?![a-z])")
#: A set by its condition.
_BUILDER = re.compile(
    r"(?:\\left)?\\?\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![a-z])|[|:])((?:[^{}]|\{[^{}]*\})*)\}"
)
#: Characters at the end of a text that are read.
_MOST_READ = 20_000
_UNIT = re.compile(r"(?:.*\s)?(-?(?:\d[\d.,/]*|\.\d+)\s*[A-Za-z°%]+(?:\s[A-Za-z]+)?)", re.DOTALL)
#: Numbers joined by commas alone.
_ROW = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?:,-?\d+(?:\.\d+)?){2,}(?![\w,])")
#: Two numbers, or a decimal; no thousands.
_COMMA = re.compile(r"-?[\d.]+,(?!\d{3}(?!\d))[\d.]+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
#: Signs that stand alone, where blanks mean nothing: they part no number from its unit.
_SPACED = re.compile(r"(?<!\S)[-+*^](?!\S)|\d [iknxyz](?!\w)")
_MIXED = re.compile(r"(?<![\w./,^])(\d+)\s+([1-9]\d*)/(\d+)(?![\w./]|,\d)")


class Denial(ValueError):
    """A text that denies the mathematics at its end, or only limits it."""


@dataclass(frozen=True)
class Statement:
    """What a text claims: for each of ``parts``, the ways to read it; several parts are a list.

    The first way that is mathematics counts, or with ``each``, any of them. ``either``: an "or" joins parts.
    """

    parts: Sequence[Sequence[str]]
    each: bool = False
    either: bool = False


def reference(text: str) -> Statement:
    """What a known answer says."""
    text = plain_signs(text)
    pieces, either = _listed(_bare(text))
    if pieces:
        return Statement([_forms(piece) for piece in pieces], either=either)
    if _MARKED.search(text):
        return Statement([[text]])
    dense = "".join(text.split())
    if _SPACED.search(text) and _last_piece(dense) == dense:
        text = dense
    piece = _last_piece(text)
    whole = piece == text.strip() and _needs_marks(piece)
    return Statement([[_marked(piece), text] if whole else [f"${text}$" if "\\" in text else text]])


def reference_as_list(text: str) -> Statement | None:
    """What a known answer such as ``2,5`` says as a list, if its comma may also be that of a decimal."""
    text = plain_signs(text).strip()
    return Statement([[f"${text}$"]]) if _COMMA.fullmatch(text) else None


def answer(text: str) -> Statement:
    """What an answer says in the end; of a long one, its last 20,000 characters are read.

    Raises:
        Denial: it says what the answer is not, or only limits it.
    """
    text = plain_signs(_TAG.sub(lambda tag: " " if tag[1] else f"{tag[2]}: ", text[-_MOST_READ:]))
    if (boxed := _last_boxes(text)) is not None:
        return _of_boxes(*boxed)
    last = _last_line(text)
    if _SAYS_ANSWER.search(last) and not _MARKED.search(last) and _last_piece(last):
        # formulas elsewhere, such as in a check of it, are not the answer
        text = last
    line = _bare(last)
    clause = _without_denied_end(line)
    pieces, either = _listed(clause)
    if pieces:
        return Statement([_forms(piece) for piece in pieces], either=either)
    _check(clause, _last_piece(clause))
    if clause != line:
        text = clause
    if _MARKED.search(text):
        return Statement([[text]])
    return _unmarked(text)


def _of_boxes(before: str, boxes: list[str]) -> Statement:
    pieces: list[str] = []
    either = False
    for box in map(_bare, boxes):
        _check(before + box, box.strip())
        listed, joined = _listed(box)
        pieces += listed or [box.strip()]
        either = either or joined
    if len(pieces) > 1:
        return Statement([_forms(piece) for piece in pieces], either=either)
    box = boxes[0].strip().rstrip(".")
    if counted := _COUNTED.fullmatch(box):
        box = counted[1]
    return Statement([[box if _WITH_SIGN.fullmatch(box) else rf"$\boxed{{{box}}}$"]])


def _unmarked(text: str) -> Statement:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return Statement([[text]])
    last = ([line for line in lines if "answer" in line.lower()] or lines)[-1]
    piece = _last_piece(last)
    if piece:
        return Statement([_forms(piece, text)], bool(_MEASURED.fullmatch(piece)))
    # a pair or an interval in a sentence, which may be about a later number
    for group in reversed(list(_GROUP.finditer(last))):
        if _last_piece(group[0]) == group[0]:
            return Statement([[text] if re.search(r"\d", last[group.end() :]) else [_marked(group[0]), text]])
    return Statement([[text]])


def _forms(piece: str, text: str = "") -> list[str]:
    return [_marked(piece) if _needs_marks(piece) else re.sub(r"^-\s+", "-", piece), text or piece]


def _last_boxes(text: str) -> tuple[str, list[str]] | None:
    r"""The contents of the last ``\boxed{}`` and of those that are joined to it, and what stands before them."""
    boxes: list[tuple[int, int, str]] = []
    for box in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth, end = 1, box.end()
        while end < len(text) and depth:
            if text[end - 1] != "\\":
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            boxes.append((box.start(), end, text[box.end() : end - 1]))
    if not boxes:
        return None
    start, end, content = boxes.pop()
    after = _AFTER_BOX.match(text, end)
    contents = [content, *([after[1]] if after else [])]
    while boxes and _BETWEEN_BOXES.fullmatch(text, boxes[-1][1], start):
        start, _, content = boxes.pop()
        contents.insert(0, content)
    return text[:start], contents


def _last_line(text: str) -> str:
    """The last line that says "answer", or else that has mathematics in it."""
    lines = [line for line in text.splitlines() if re.search(r"\d|\\[a-z]|(?<![a-z])[a-z]\s*=", line)]
    return ([line for line in lines if "answer" in line.lower()] or lines or [""])[-1]


def _bare(text: str) -> str:
    """Without marks of LaTeX and its spaces; its words become words."""
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{\s*(or|and|not)\s*\}", r" \1 ", text)
    text = re.sub(r"\\(?:lor|vee)(?![a-z])", " or ", text)
    return re.sub(r"\$|(?<!\\)\\[()\[\],;!]|\\q?quad(?![a-z])", " ", text)


def _listed(clause: str) -> tuple[list[str], bool]:
    """The pieces of mathematics that the end of ``clause`` joins, two or more, and whether by "or"."""
    segments = _segments(clause)
    while len(segments) > 1 and not re.search(r"\d|\\[a-z]", segments[-1][1]) and not _last_piece(segments[-1][1]):
        segments.pop()
    pieces: list[str] = []
    either = False
    for joint, segment in reversed(segments):
        segment = _trimmed(segment)
        piece, measured = _last_piece(segment), _UNIT.fullmatch(segment)
        if not piece and measured and "or" in (joint, *(word for word, _ in segments)):
            piece = measured[1]
        if not piece:
            break
        pieces.insert(0, piece)
        if not joint or piece != segment:
            break
        either = either or joint == "or"
    return (pieces, either) if len(pieces) > 1 else ([], False)


def _segments(clause: str) -> list[tuple[str, str]]:
    """What stands between the joints outside of brackets, each with the joint before it."""
    depth, start, joint = 0, 0, ""
    segments: list[tuple[str, str]] = []
    for token in _JOINT.finditer(clause):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth = max(0, depth - 1)
        elif not depth:
            segments.append((joint, clause[start : token.start()]))
            start, joint = token.end(), "or" if (token["word"] or "and").lower() != "and" else ","
    return [*segments, (joint, clause[start:])]


def _trimmed(segment: str) -> str:
    segment = re.sub(r"\*\*|`", "", segment).strip().rstrip(".,;:!? ")
    return segment[:-1].rstrip() if segment.endswith(")") and segment.count(")") > segment.count("(") else segment


def _without_denied_end(clause: str) -> str:
    """``5, not 6`` without the end that says what the answer is not."""
    cut = _DENIED_END.match(clause)
    return cut[1] if cut and not _DENIED_BEFORE.search(cut[1]) and _last_piece(cut[1]) else clause


def _check(clause: str, piece: str) -> None:
    """
    Raises:
        Denial: see :func:`answer`.
    """
    clause = _trimmed(clause)
    before = clause[: len(clause) - len(piece)] if piece and clause.endswith(piece) else ""
    if not piece and (numbers := list(re.finditer(r"-?\d[\d.,]*", clause))):
        # a number with a unit
        before = clause[: numbers[-1].start()]
    denied = _DENIED_BEFORE.search(before) or _DENIED_AFTER.search(clause) or re.match(r"not\b", piece)
    if denied or _LIMIT.match(piece):
        raise Denial(clause[-80:])


def plain_signs(text: str) -> str:
    """``text`` with ASCII or LaTeX in place of other digits, signs, fractions, powers and roots."""
    text = _latex_signs(text)
    # their characters are plain ones below
    text = re.sub("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ]+)", r"^{\1}", text)
    text = re.sub("([₀-₎]+)", r"_{\1}", text)
    text = re.sub(r"(\d*)\s?([¼-¾⅐-⅞↉])", _fraction, text)
    text = _MIXED.sub(_mixed, text)
    text = unicodedata.normalize("NFKC", text)
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text.translate(_SIGNS))
    text = re.sub(rf"√\s*(?:\({_INSIDE}\)|(\d+(?:\.\d+)?|\w))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    # as a sign, not as a dash between words or in a range
    text = re.sub("(?<![\\w)\\]}])[\N{EN DASH}\N{EM DASH}](?=[\\d.(\\\\])", "-", text)
    text = re.sub(r"(?<=[\w)}]) ?[·⋅∙] ?(?=[\w(\\])", "*", text)
    text = re.sub(r"(?<![\w.)\]}])\.(?=\d)", "0.", text)
    text = _BUILDER.sub(_condition, text)
    text = re.sub(r"(?<=\d)(?: : |:)(?=\d)", "/", text)
    # neither the comma of a decimal nor that of thousands
    text = _ROW.sub(lambda row: row[0] if _THOUSANDS.fullmatch(row[0]) else row[0].replace(",", ", "), text)
    text = re.sub(r"(?<=\d),(?=-\d)", ", ", text)
    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1*10^(\2)", text).replace("^(+", "^(")


def _latex_signs(text: str) -> str:
    r"""Without ``\$`` and other currencies, ``,\!`` and blanks of LaTeX within a number or before its unit, and ``%``
    where no plain number is before it."""
    text = re.sub(r"(?<!\\)\\\$|[€£¥₹]", "", text)
    text = re.sub(r"(?<=\d)(?:,\\!\s*|\\,)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\d)~(?=\\)", " ", text)
    text = re.sub(r"(\d{1,30})\.(\d{0,30})\\(?:overline|bar)\{(\d{1,30})\}(?!_)", _repeating, text)
    return re.sub(r"([})]|\d/\d+) ?%", r"\1", re.sub(r"(?<!\\)\\%", "%", text))


def _repeating(match: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as the fraction that it is: (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _condition(builder: re.Match[str]) -> str:
    """The inequality of a set that has one: math-verify reads the last number of it."""
    condition = re.sub(r"(?:\\right)?\\?$", "", builder[1])
    return condition if _LIMIT.search(condition) and "," not in condition else builder[0]


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return f"({whole}+{above}/{below})" if int(above) < int(below) else match[0]


def _fraction(match: re.Match[str]) -> str:
    value = unicodedata.normalize("NFKC", match[2]).replace("\N{FRACTION SLASH}", "/")
    return f"({match[1]}+{value})" if match[1] else value


def _last_piece(line: str) -> str:
    """The mathematics at the end of ``line``; empty if the line ends in prose, or the brackets do not match."""
    line = re.sub(r"(?<!\S)(\*\*?|__)(?=\S)(.{1,200}?)(?<=\S)\1(?!\w)", r"\2", line.replace("`", " ")).strip()
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
    piece = _ARROW.sub("", line[start:])
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
    piece = _NAME.sub(lambda match: _NAMES[match[0]], piece)
    if piece.startswith("{") and piece.endswith("}"):
        piece = rf"\{{{piece[1:-1]}\}}"
    return f"${piece}$"
