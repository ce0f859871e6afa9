"""Writes ``conversations.jsonl``: what a user says in each of some talks, three messages each, one talk per line.

The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED, COUNT = 0, 64
OPENINGS = (
    "I have been to {place} today.",
    "I am going to {place} tomorrow.",
    "I would like to see {place} again.",
    "My sister has moved close to {place}.",
)
PLACES = ("the sea", "the market", "a museum", "the mountains", "a concert", "the zoo", "the library", "an old castle")
MIDDLES = ("It was a bit cold.", "There were many people.", "I went by train.", "We had very good food there.")
ENDS = ("I am tired now.", "My friend did not come along.", "I took a lot of pictures.", "It did not cost much.")


def rows() -> list[dict[str, Any]]:
    """The lines of the file: the user's messages in order; the companion's replies come from the model."""
    draw = random.Random(SEED)
    talks = draw.sample(list(product(OPENINGS, PLACES, MIDDLES, ENDS)), COUNT)
    return [
        {"messages": [{"role": "user", "content": words} for words in (opening.format(place=place), *rest)]}
        for opening, place, *rest in talks
    ]


def main() -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows())
    (HERE / "conversations.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
