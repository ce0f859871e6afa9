"""The process in which math-verify compares answers, one JSON line in, one out.

A process of its own, because math-verify keeps its deadlines with SIGALRM, which only a main thread gets, and because
an expression that a model wrote ("9^9^9^9") can take any time and memory, which only a process can be denied.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
from typing import Any

from reward_hooks.verifiable.math_text import answer_forms, reference_forms

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


def _verdict(golds: list[Any], answer: str) -> tuple[float, str]:
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    try:
        forms, each = answer_forms(answer)
        readings = [said for form in forms if (said := _read(form))] if each else [_first_read(forms)]
        if not any(readings):
            return 0.0, "no mathematical expression found"
        if any(verify(gold, said, timeout_seconds=STEP_SECONDS) for said in readings for gold in golds):
            return 1.0, ""
    except Exception as exc:  # sympy raises anything at all on what models write; such an answer is not verified
        return 0.0, f"cannot be compared: {type(exc).__name__}"
    return 0.0, f"says {str(readings[0][-1])[:80]}"


def _read(text: str) -> list[Any]:
    """The expression and its text; the text alone where that is marked as mathematics and is none; or nothing."""
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    return parse(text, parsing_timeout=STEP_SECONDS)


def _first_read(forms: list[str]) -> list[Any]:
    """The first of ``forms`` that is an expression, else what the last is."""
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
    with contextlib.redirect_stdout(sys.stderr):  # nothing else may write into the protocol
        for line in sys.stdin:
            request = json.loads(line)
            out.write(json.dumps(judge(request["accepted"], request["answers"])) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
