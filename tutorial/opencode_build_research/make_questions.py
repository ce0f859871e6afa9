"""Divide the questions of the concise agent: ``train.jsonl`` and ``held_out.jsonl``, which share none.

python make_questions.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "opencode_build_concise_agent" / "questions.jsonl"
#: Questions that are never trained on.
HELD_OUT = 32


def parts() -> dict[str, list[dict[str, str]]]:
    """The rows of each file, by its name without ``.jsonl``."""
    rows = [json.loads(line) for line in SOURCE.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    return {"train": rows[HELD_OUT:], "held_out": rows[:HELD_OUT]}


if __name__ == "__main__":
    for name, rows in parts().items():
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
