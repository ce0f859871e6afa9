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

#: Seconds for reading one expression, and for comparing two.
STEP_SECONDS = 2
_MEMORY_BYTES = 4 << 30


def judge(accepted: list[str], answers: list[str]) -> dict[str, Any]:
    """``{"verdicts": [[value, reason], ...]}``, or ``{"unreadable": reference}``."""
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    golds: list[Any] = []
    for text in accepted:
        gold = parse(_as_latex(text), parsing_timeout=STEP_SECONDS)
        if not gold:
            return {"unreadable": text}
        golds.append(gold)
    return {"verdicts": [_verdict(golds, answer) for answer in answers]}


def _verdict(golds: list[Any], answer: str) -> tuple[float, str]:
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    try:
        said = parse(answer, parsing_timeout=STEP_SECONDS)
        if not said:
            return 0.0, "no mathematical expression found"
        if any(verify(gold, said, timeout_seconds=STEP_SECONDS) for gold in golds):
            return 1.0, ""
    except Exception as exc:  # sympy raises anything at all on what models write; such an answer is not verified
        return 0.0, f"cannot be compared: {type(exc).__name__}"
    return 0.0, f"says {str(said[-1])[:80]}"


def _as_latex(text: str) -> str:
    # math-verify reads LaTeX only between its marks
    return f"${text}$" if "\\" in text and "$" not in text and "\\boxed" not in text else text


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
