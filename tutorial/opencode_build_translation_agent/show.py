"""What was trained: the errors by name, early and late, and how the calls of an episode became one timeline.

swarm-gateway swarm export --run-dir runs/translation --out runs/episodes.jsonl
python show.py runs/episodes.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

WIDTH = 72


def errors(rows: list[dict[str, Any]]) -> list[str]:
    """A line per error: its share in the first and in the last third of the steps."""
    steps = sorted({row["step"] for row in rows})
    edge = max(1, len(steps) // 3)
    early, late = ([row for row in rows if row["step"] in part] for part in (steps[:edge], steps[-edge:]))
    lines = [f"{'share of episodes with':>24}   first {edge}   last {edge} of {len(steps)} steps"]
    for name in sorted(name for name in rows[0]["components"] if name.startswith("error/")):
        shares = [fmean(row["components"][name] for row in part) for part in (early, late)]
        lines.append(f"{name.removeprefix('error/'):>24}   {shares[0]:7.2f}  {shares[1]:7.2f}")
    return lines


def timelines(row: dict[str, Any]) -> list[str]:
    """An episode: its counts, and its timelines as bars of prompt (░), sampled (█) and masked (·) tokens."""
    tokens = row["tokens"]
    merged = tokens["prompts"] + tokens["masked"] + tokens["trained"]
    lines = [
        f"{row['output']['metadata']['final']!r}   reward {row['reward']:.2f}",
        f"  {tokens['calls']} calls -> {tokens['timelines']} timeline(s): {merged} tokens in the trainer"
        f" ({tokens['trained']} sampled), {tokens['unmerged']} if each call were a row",
    ]
    for one in row["timelines"]:
        marks = "░" * len(one["prompt_ids"]) + "".join("█" if sampled else "·" for sampled in one["response_mask"])
        step = max(1, -(-len(marks) // WIDTH))
        lines.append(f"  {marks[::step]}   one mark is {step} token(s)")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Show the errors and timelines of trained episodes.")
    parser.add_argument("episodes", type=Path, help="a .jsonl file of `swarm-gateway swarm export`")
    parser.add_argument("--count", type=int, default=2, help="episodes to show, the latest ones")
    arguments = parser.parse_args()
    with arguments.episodes.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if not rows:
        print("show: no episode has been trained yet", file=sys.stderr)
        return 1
    print("\n".join(errors(rows)))
    for row in rows[-arguments.count :]:
        print("\n" + "\n".join(timelines(row)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
