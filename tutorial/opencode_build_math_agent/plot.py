"""Draws the curves of several runs: held-out accuracy by training step, with intervals.

python plot.py out/trained out/control --out curve.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gateway.replay.plot import COLOURS, picture


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curves of several runs of agent_roll.py.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders with curve.json")
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    arguments = parser.parse_args()
    with picture(arguments.out, (7, 4)) as figure:
        axes = figure.subplots()
        for folder, colour in zip(arguments.runs, COLOURS, strict=False):
            curve = json.loads((folder / "curve.json").read_text())["curve"]
            steps = [one["step"] for one in curve]
            axes.plot(steps, [one["mean"] for one in curve], color=colour, marker="o", label=folder.name)
            axes.fill_between(
                steps, [one["low"] for one in curve], [one["high"] for one in curve], color=colour, alpha=0.2
            )
        axes.set_title("Held-out accuracy, 95 % interval")
        axes.set_xlabel("training step")
        axes.set_ylim(0, 1)
        axes.legend()
    print(arguments.out)


if __name__ == "__main__":
    main()
