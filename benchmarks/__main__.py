"""``python -m benchmarks``: measurements, each a subcommand that prints JSON; its module says what it measures."""

from __future__ import annotations

import argparse
from importlib import import_module

BENCHMARKS = (
    *("overhead", "hooks", "lifecycle", "soak", "serving", "code", "credit", "judging", "study", "loop", "turns"),
    *("lora", "boot", "gate", "policies", "training", "watch", "redaction", "deletion"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements; each prints JSON.")
    commands = parser.add_subparsers(required=True)
    for name in BENCHMARKS:
        module = import_module(f"benchmarks.{name}")
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


# servers are spawned: their processes import this module again
if __name__ == "__main__":
    main()
