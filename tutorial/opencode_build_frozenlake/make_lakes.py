"""Writes ``train.jsonl`` and ``held_out.jsonl``: lakes of 3 by 3 with one or two holes, and a way around them.

Starts are from one to four moves away from the goal, as many of each. The two files share no lake. The same seed writes
the same bytes.
"""

from __future__ import annotations

import json
import random
from itertools import combinations, permutations
from pathlib import Path

from frozen_lake import MOVES, neighbour

HERE = Path(__file__).resolve().parent
SEED, SIDE = 0, 3
FARTHEST = 4
EACH = {"held_out": 8, "train": 24}  # lakes of each distance


def distance(lake: list[str]) -> int | None:
    """The number of moves of the shortest way; ``None`` if there is none."""
    cells = "".join(lake)
    reached, frontier, moves = {cells.index("S")}, {cells.index("S")}, 0
    while frontier:
        if cells.index("G") in frontier:
            return moves
        near = {neighbour(lake, cell, action) for cell in frontier for action in range(len(MOVES))}
        frontier = {cell for cell in near if cell is not None and cells[cell] != "H"} - reached
        reached |= frontier
        moves += 1
    return None


def lakes() -> list[list[str]]:
    """All lakes that can be crossed."""
    found: list[list[str]] = []
    for start, goal in permutations(range(SIDE * SIDE), 2):
        rest = [cell for cell in range(SIDE * SIDE) if cell not in (start, goal)]
        for holes in (*combinations(rest, 1), *combinations(rest, 2)):
            letters = {start: "S", goal: "G", **dict.fromkeys(holes, "H")}
            cells = "".join(letters.get(cell, "F") for cell in range(SIDE * SIDE))
            found.append([cells[row : row + SIDE] for row in range(0, SIDE * SIDE, SIDE)])
    return [lake for lake in found if distance(lake) is not None]


def rows(part: str) -> list[dict[str, str]]:
    """The lines of one file."""
    draw = random.Random(SEED)
    by_distance: dict[int | None, list[str]] = {}
    for lake in draw.sample(known := lakes(), len(known)):
        by_distance.setdefault(distance(lake), []).append("/".join(lake))
    first, last = (0, EACH["held_out"]) if part == "held_out" else (EACH["held_out"], sum(EACH.values()))
    return [{"question": one} for far in range(1, FARTHEST + 1) for one in by_distance[far][first:last]]


def main() -> None:
    for part in EACH:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows(part))
        (HERE / f"{part}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
