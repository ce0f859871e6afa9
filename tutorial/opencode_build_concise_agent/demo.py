"""The demo: pull a real model, train it through the app, run the control, and say in one sentence what happened.

    python demo.py --steps 10 --out demo-out
    python demo.py --quick

Everything runs under a deadline, and whatever fails leaves no process behind and names the log to read.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.reports.printing import print_report, write_report
from gateway.reports.report import Report

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.experiment import ExperimentError, answers_of, ask_until, pull, run_config, running  # noqa: E402

MODEL = "smollm2-135m"


def train(label: str, out: Path, steps: int, control: bool, settings: dict[str, Any]) -> tuple[Report, str]:
    """One run of ``up`` and the users of ``mock_user_request.py`` until ``steps`` training steps are done.

    Args:
        settings: of the gateway, other than in ``config.yaml``.

    Returns:
        The report, and what :func:`share_chosen` says.
    """
    print(
        f"\n== {label}: {steps} steps, rewards {'shuffled within each group' if control else 'as they are'}", flush=True
    )
    folder = out / label
    path, config = run_config(HERE / "config.yaml", folder, control=control, **settings)
    with running(path, folder / "up.log"):
        report = ask_until([sys.executable, str(HERE / "mock_user_request.py")], config, steps, folder)
        text = share_chosen(answers_of(config), config["gateway"]["when_batch_waits"])
    print(text)
    return report, text


def share_chosen(answers: Counter[str], mode: str) -> str:
    """Of how many answers the hook chose the best, in one sentence."""
    total, training, untrained = answers.total(), answers["judged"], answers["judged_untrained"]
    chosen = training + untrained
    return (
        f"when_batch_waits is {mode}: of {total} answers the hook chose {chosen} ({chosen / max(1, total):.0%}) as the "
        f"best of their group, {training} in groups to train, {untrained} in groups beside training; "
        f"{total - chosen} were not chosen by it."
    )


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M through an unmodified app, with a control run.")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each run")
    parser.add_argument("--no-control", action="store_true", help="skip the run with shuffled rewards")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for logs, reports and the plot")
    parser.add_argument(
        "--when-batch-waits",
        choices=("best", "single"),
        help="what a question gets while the batch is full; default: as in config.yaml",
    )
    parser.add_argument("--untrained-repeat", type=int, help="answers of a group that is not trained")
    parser.add_argument("--quick", action="store_true", help="2 steps, no control")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.no_control = 2, True
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    out = arguments.out.resolve()
    given = {"when_batch_waits": arguments.when_batch_waits, "untrained_repeat": arguments.untrained_repeat}
    settings = {name: value for name, value in given.items() if value is not None}
    began = time.monotonic()
    # SIGTERM ends the with blocks like Ctrl-C does
    signal.signal(signal.SIGTERM, leave)
    try:
        pull(MODEL)
        run, chosen = train("trained", out, arguments.steps, control=False, settings=settings)
        control = None
        if not arguments.no_control:
            control, _ = train("control", out, arguments.steps, control=True, settings=settings)
        write_report(run, out, [control] if control else [])
    except ExperimentError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if control:  # the users have printed each report by itself
        print()
        print_report(run, [control])
    print(f"\nplot: {out / 'report.png'}   reports: {out}   {time.monotonic() - began:.0f} s in all\n")
    print(chosen)
    print(run.learning([control] if control else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
