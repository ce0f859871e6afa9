"""Writes ``train.jsonl`` and ``held_out.jsonl``: word problems of one step, in the style of GSM8K, with their answers.

The two share no pair of numbers in the same operation, so a model cannot pass the second by learning the answers of the
first. The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 0
NAMES = ["Anna", "Tom", "Maria", "Peter", "Lena", "Omar", "Nina", "Paul", "Ruth", "Karl"]
THINGS = ["apples", "books", "coins", "pens", "eggs", "cards", "stamps", "shells"]
STORIES = {
    "+": "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "-": "{name} has {a} {things} and gives away {b}. How many {things} does {name} have left?",
}
SUMS = [("+", a, b) for a, b in product(range(2, 10), repeat=2)] + [
    ("-", a, b) for a, b in product(range(4, 19), range(2, 10)) if 2 <= a - b <= 9
]
HELD_OUT, STORIES_PER_SUM = 32, 2


def rows(part: str) -> list[dict[str, Any]]:
    """The lines of one file: the question, and the number that is right."""
    draw = random.Random(SEED)
    sums = draw.sample(SUMS, len(SUMS))
    chosen = sums[:HELD_OUT] if part == "held_out" else [one for one in sums[HELD_OUT:] for _ in range(STORIES_PER_SUM)]
    return [problem(sign, a, b, draw) for sign, a, b in chosen]


def problem(sign: str, a: int, b: int, draw: random.Random) -> dict[str, Any]:
    question = STORIES[sign].format(name=draw.choice(NAMES), things=draw.choice(THINGS), a=a, b=b)
    return {"question": question, "answer": a + b if sign == "+" else a - b}


def main() -> None:
    for part in ("train", "held_out"):
        lines = "".join(f"{json.dumps(row)}\n" for row in rows(part))
        (HERE / f"{part}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
