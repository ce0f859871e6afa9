"""Writes ``train.jsonl`` and ``held_out.jsonl``: one sentence about a made-up person per line, and who it is.

The two share no name, no city and no profession, so a model cannot pass the second by learning the answers of the
first. The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 0
SYSTEM = "You are a helpful assistant."
SENTENCE = (
    "{name} is {age} years old, lives in {city} and works as a {job}. "
    "Write this as JSON with the keys name, age, city and job."
)
WORDS = {
    "train": {
        "name": "Anna Tom Maria Peter Lena Omar Nina Paul Ruth Karl Sofia David Emma Louis Clara Hugo",
        "city": "Oslo Paris Lima Rome Cairo Berlin Tokyo Madrid Boston Dublin Vienna Seoul",
        "job": "nurse baker pilot teacher farmer lawyer driver singer painter doctor",
    },
    "held_out": {
        "name": "Laura Mark Julia Simon Alice Felix Helen Victor Rosa Daniel",
        "city": "London Athens Prague Milan Sydney Lisbon Chicago Geneva",
        "job": "plumber dentist cook judge gardener writer sailor tailor",
    },
}
COUNTS = {"train": 128, "held_out": 48}


def rows(part: str) -> list[dict[str, Any]]:
    """The lines of one file: chat messages as an app would send them, and the person they are about."""
    draw = random.Random(f"{SEED}/{part}")
    found: dict[str, dict[str, Any]] = {}
    while len(found) < COUNTS[part]:
        words = {key: draw.choice(text.split()) for key, text in WORDS[part].items()}
        person = {"name": words["name"], "age": draw.randint(20, 79), "city": words["city"], "job": words["job"]}
        asked = SENTENCE.format(**person)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        found[asked] = {"messages": messages, "person": person}
    return list(found.values())


def main() -> None:
    for part in COUNTS:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows(part))
        (HERE / f"{part}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
