"""The experiment: held-out score of the base model, after training, and after a control with shuffled rewards.

    python experiment.py --steps 16 --out runs/experiment
    python experiment.py --quick

The control differs in one thing: the rewards of each group are permuted among its answers, so that they say nothing.
Everything runs under a deadline, and whatever fails leaves no process behind and names the log to read.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.reports.report import Report
from reward_hooks import HookRunner, load_hooks
from swarm.client import AsyncSwarmClient
from swarm.data import read_tasks
from swarm.errors import SwarmGatewayError
from swarm.types import Model

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study import experiment  # noqa: E402
from study.held_out import HeldOutConfig, HeldOutScore, evaluate  # noqa: E402
from study.plot import draw_experiment  # noqa: E402

REPORT_FILE, PLOT_FILE = "experiment.json", "experiment.png"


class Result(Model):
    """Everything that is reported: rewards by step of each run, and the held-out scores with their answers."""

    runs: list[Report]
    scores: list[HeldOutScore]


def run(label: str, arguments: argparse.Namespace, *, control: bool, base: bool) -> tuple[Report, list[HeldOutScore]]:
    """Train once; ``base`` also scores the weights before."""
    print(f"\n== {label}: rewards {'shuffled within each group' if control else 'as they are'}", flush=True)
    folder = arguments.out / label
    path, config = experiment.run_config(HERE / "config.yaml", folder, control=control)
    replay = [*experiment.CLI, "replay", "--data", str(HERE / "train.jsonl"), "--seed", str(arguments.seed)]
    with experiment.running(path, folder / "up.log"):
        scores = [held_out("base", config, arguments)] if base else []
        report = experiment.ask_until(replay, config, arguments.steps, folder)
        scores.append(held_out(label, config, arguments))
    return report, scores


def held_out(label: str, config: dict[str, Any], arguments: argparse.Namespace) -> HeldOutScore:
    """Score the weights that serve now."""

    async def work() -> HeldOutScore:
        job = config["job"]
        asked = HeldOutConfig(
            samples=arguments.samples, temperature=job["temperature"], max_tokens=job["max_response_length"]
        )
        hooks = HookRunner(load_hooks(config["gateway"]["hooks"]))
        async with AsyncSwarmClient(experiment.swarm_url(config)) as swarm:
            return await evaluate(label, swarm, hooks, list(read_tasks(HERE / "held_out.jsonl")), asked)

    began = time.monotonic()
    score = asyncio.run(work())
    print(f"  held-out score, {line(score)}   {time.monotonic() - began:.0f} s", flush=True)
    return score


def line(score: HeldOutScore) -> str:
    """The score in a few words."""
    return f"{score.label}: {score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train SmolLM2-135M to write JSON, with a control and held-out scores."
    )
    parser.add_argument("--steps", type=int, default=16, help="training steps of each run")
    parser.add_argument("--samples", type=int, default=4, help="answers to each held-out prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-control", action="store_true", help="skip the run with shuffled rewards")
    only.add_argument("--only-control", action="store_true", help="add that run to what --out holds already")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/experiment"), help="folder for logs, reports and the plot"
    )
    parser.add_argument("--quick", action="store_true", help="2 steps, 1 answer to each held-out prompt, no control")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.samples, arguments.no_control = 2, 1, True
    if arguments.steps < 1 or arguments.samples < 1:
        parser.error("--steps and --samples must be at least 1")
    arguments.out = arguments.out.resolve()
    # SIGTERM ends the with blocks like Ctrl-C does
    signal.signal(signal.SIGTERM, leave)
    began = time.monotonic()
    try:
        experiment.pull("smollm2-135m")
        if arguments.only_control:
            result = trained(arguments.out)
        else:
            report, scores = run("trained", arguments, control=False, base=True)
            result = save(Result(runs=[report], scores=scores), arguments.out)
        if not arguments.no_control:
            report, scores = run("control", arguments, control=True, base=False)
            result = save(Result(runs=[*result.runs, report], scores=[*result.scores, *scores]), arguments.out)
    except (experiment.ExperimentError, SwarmGatewayError) as exc:
        print(f"experiment: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\nplot: {arguments.out / PLOT_FILE}   {time.monotonic() - began:.0f} s in all\n")
    for report in result.runs:
        print(f"{report.label}: {report.learning(result.runs)}")
    for score in result.scores:
        print(f"held-out score, {line(score)}")
    return 0


def trained(out: Path) -> Result:
    """What ``out`` holds of an experiment, without any control.

    Raises:
        ExperimentError: it holds none.
    """
    try:
        result = Result.model_validate_json((out / REPORT_FILE).read_bytes())
    except (OSError, ValueError) as exc:
        raise experiment.ExperimentError(
            f"{out / REPORT_FILE} cannot be read ({exc}); run without --only-control first"
        ) from exc
    return Result(
        runs=[one for one in result.runs if one.label != "control"],
        scores=[one for one in result.scores if one.label != "control"],
    )


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def save(result: Result, out: Path) -> Result:
    """Write what there is so far."""
    (out / REPORT_FILE).write_text(result.model_dump_json(indent=1) + "\n")
    draw_experiment(result.runs, result.scores, out / PLOT_FILE)
    return result


if __name__ == "__main__":
    sys.exit(main())
