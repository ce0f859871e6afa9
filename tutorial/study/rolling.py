"""What scripts that train as active clients have in common: options, an engine to begin with, and how they end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from swarm.client import SwarmClient
from swarm.errors import SwarmGatewayError
from swarm.job import TrainJob


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


@contextmanager
def started(url: str, job: TrainJob) -> Generator[SwarmClient]:
    """A client of the swarm server at ``url``, whose engine was started with ``job``, in place of one that ran."""
    began = time.monotonic()
    print(f"starting the engine with {job.model}", flush=True)
    with SwarmClient(url) as client:
        client.auto_sync_train_config_and_start_engine(job, force_restart=True)
        print(f"  ready after {time.monotonic() - began:.0f} s", flush=True)
        yield client


def exit_code(work: Callable[[], None]) -> int:
    """Run ``work``, and say how long it took; 1 with a message if a swarm server refuses or fails, 130 after Ctrl-C."""
    began = time.monotonic()
    try:
        work()
    except SwarmGatewayError as exc:
        print(f"{Path(sys.argv[0]).stem}: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{time.monotonic() - began:.0f} s")
    return 0
