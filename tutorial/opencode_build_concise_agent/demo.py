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
from pathlib import Path
from types import FrameType

from gateway.replay.output import print_report, write_report
from gateway.replay.report import Report

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.experiment import ExperimentError, ask_until, change, pull, run_config, running  # noqa: E402

MODEL = "smollm2-135m"


def train(label: str, out: Path, steps: int, control: bool) -> Report:
    """One run of ``up`` and the users of ``mock_user_request.py`` until ``steps`` training steps are done."""
    print(
        f"\n== {label}: {steps} steps, rewards {'shuffled within each group' if control else 'as they are'}", flush=True
    )
    folder = out / label
    path, config = run_config(HERE / "config.yaml", folder, control=control)
    with running(path, folder / "up.log"):
        return ask_until([sys.executable, str(HERE / "mock_user_request.py")], config, steps, folder)


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def sentence(run: Report, control: Report | None) -> str:
    """The result in one sentence."""
    text = f"Mean reward went {change(run)} with the real rewards"
    return f"{text}, and {change(control)} in the control." if control else f"{text}; no control was run."


def main() -> int:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M through an unmodified app, with a control run.")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each run")
    parser.add_argument("--no-control", action="store_true", help="skip the run with shuffled rewards")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for logs, reports and the plot")
    parser.add_argument("--quick", action="store_true", help="2 steps, no control")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.no_control = 2, True
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    out = arguments.out.resolve()
    began = time.monotonic()
    # SIGTERM ends the with blocks like Ctrl-C does
    signal.signal(signal.SIGTERM, leave)
    try:
        pull(MODEL)
        run = train("trained", out, arguments.steps, control=False)
        control = None if arguments.no_control else train("control", out, arguments.steps, control=True)
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
    print(sentence(run, control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
