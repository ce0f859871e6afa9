"""Who was in each batch: tasks and mean reward by client and step.

swarm-gateway swarm export --run-dir runs/cocktail --out runs/episodes.jsonl
python shares.py runs/episodes.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line per step."""
    clients = sorted({row["client_uuid"] for row in rows})
    steps: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        steps[row["step"]][row["client_uuid"]].append(row)
    lines = ["step  " + "  ".join(f"{client:>20}" for client in clients)]
    for step, parts in sorted(steps.items()):
        cells = [_cell(parts[client]) for client in clients]
        lines.append(f"{step:>4}  " + "  ".join(f"{cell:>20}" for cell in cells))
    return lines


def _cell(rows: list[dict[str, Any]]) -> str:
    tasks = len({row["task_id"] for row in rows})
    return f"{tasks} tasks, {fmean(row['reward'] for row in rows):.2f}" if rows else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description="Show who was in each batch.")
    parser.add_argument("episodes", type=Path, help="a .jsonl file of `swarm-gateway swarm export`")
    arguments = parser.parse_args()
    with arguments.episodes.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if not rows:
        print("shares: no episode has been trained yet", file=sys.stderr)
        return 1
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
