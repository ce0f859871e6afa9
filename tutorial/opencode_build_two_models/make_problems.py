"""Writes ``train.jsonl`` and ``held_out.jsonl``: word problems of two steps, with their answers.

The two share no sum, nor one with its numbers in another order, nor one with the examples in the prompts. The same seed
writes the same bytes.
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
    ("+", "-"): "{name} has {a} {things}, buys {b} more and gives away {c}.",
    ("-", "+"): "{name} has {a} {things}, gives away {b} and buys {c} more.",
}
SHOWN = [(("+", "-"), 3, 4, 2), (("-", "+"), 9, 3, 5)]  # the examples in the prompts
SUMS = [
    (signs, a, b, c)
    for signs, a, b, c in product(STORIES, range(2, 10), range(2, 10), range(2, 10))
    if 2 <= (a + b - c if signs == ("+", "-") else a - b + c) <= 12 and (signs == ("+", "-") or a > b)
]
TRAIN, HELD_OUT = 128, 32


def rows(part: str) -> list[dict[str, Any]]:
    """The lines of one file: the question, and the number that is right."""
    draw = random.Random(SEED)
    same: dict[Any, list[Any]] = {}
    for signs, a, b, c in draw.sample(SUMS, len(SUMS)):
        added, taken = ((a, b), c) if signs == ("+", "-") else ((a, c), b)
        same.setdefault((*sorted(added), taken), []).append((signs, a, b, c))
    sums = [ordered for ordered in same.values() if not any(one in SHOWN for one in ordered)]
    chosen = [ordered[0] for ordered in sums[:HELD_OUT]]
    if part == "train":
        chosen = draw.sample([one for ordered in sums[HELD_OUT:] for one in ordered], TRAIN)
    return [problem(*one, draw) for one in chosen]


def problem(signs: tuple[str, str], a: int, b: int, c: int, draw: random.Random) -> dict[str, Any]:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    story = STORIES[signs].format(name=name, things=things, a=a, b=b, c=c)
    answer = a + b - c if signs == ("+", "-") else a - b + c
    return {"question": f"{story} How many {things} does {name} have now?", "answer": answer}


def main() -> None:
    for part in ("train", "held_out"):
        lines = "".join(f"{json.dumps(row)}\n" for row in rows(part))
        (HERE / f"{part}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
