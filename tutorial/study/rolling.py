"""The options that the loops of active clients (``agent_roll.py``) have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser, held_out: str, samples: str, steps: str = "training steps") -> None:
    """Add what every loop takes: how long, how its held-out tasks are measured, the control, where the curve goes.

    Args:
        parser: of the loop.
        held_out: what the held-out tasks are called, also as the option with their number.
        samples: what each of them gets several of, as in "walks over".
        steps: what ``--steps`` counts.
    """
    parser.add_argument("--steps", type=int, default=48, help=steps)
    parser.add_argument("--every", type=int, default=8, help=f"steps between two looks at the held-out {held_out}")
    parser.add_argument(f"--{held_out}", dest="held_out", type=int, default=32, help=f"held-out {held_out}")
    parser.add_argument("--samples", type=int, default=8, help=f"{samples} each")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control")
    parser.add_argument("--seed", type=int, default=0, help=f"of the order of the {held_out}")
    parser.add_argument("--out", type=Path, default=Path("runs/trained"), help="folder for curve.json")
    parser.add_argument("--quick", action="store_true", help=f"2 steps, 8 held-out {held_out}, 4 {samples} each")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, in their quick form if ``--quick`` is given; a number below 1 ends the program with a message."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.every, arguments.held_out, arguments.samples = 2, 2, 8, 4
    counts = (arguments.steps, arguments.every, arguments.held_out, arguments.samples, getattr(arguments, "clients", 1))
    if min(counts) < 1:
        parser.error("numbers must be at least 1")
    return arguments
