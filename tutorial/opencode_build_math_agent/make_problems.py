"""Writes ``train.jsonl`` and ``held_out.jsonl``: word problems of one step, in the style of GSM8K, with their answers.

The two share no sum, nor one with its numbers swapped, so a model cannot pass the second by learning the answers of the
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
SHOWN = [("+", 3, 4), ("-", 9, 3)]  # the agent's examples
SUMS = [("+", a, b) for a, b in product(range(2, 10), repeat=2)] + [
    ("-", a, b) for a, b in product(range(4, 13), range(2, 10)) if 2 <= a - b <= 9
]
HELD_OUT, STORIES_PER_SUM = 32, 2


def rows(part: str) -> list[dict[str, Any]]:
    """The lines of one file: the question, and the number that is right."""
    draw = random.Random(SEED)
    same: dict[Any, list[tuple[str, int, int]]] = {}
    for sign, a, b in draw.sample(SUMS, len(SUMS)):
        same.setdefault((sign, *(sorted((a, b)) if sign == "+" else (a, b))), []).append((sign, a, b))
    held_out: list[tuple[str, int, int]] = []
    train: list[tuple[str, int, int]] = []
    for sums in same.values():
        if any(one in SHOWN for one in sums):
            continue
        if len(held_out) < HELD_OUT:
            held_out.append(sums[0])
        else:
            train.extend(sums)
    chosen = held_out if part == "held_out" else [one for one in train for _ in range(STORIES_PER_SUM)]
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
