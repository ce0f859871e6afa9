"""What a training measured by step, with intervals, in a file ``curve.json``; and the picture of several such runs.

python ../study/curves.py runs/trained runs/control --out runs/curve.png
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from gateway.reports.plot import COLOURS, picture
from swarm.types import Model, WorkflowOutput

_RESAMPLES = 10_000


class Score(Model):
    """A mean over tasks, with its bootstrap 95 % interval."""

    mean: float
    low: float
    high: float


class Point(Model):
    """The scores, by name, of the weights of training step ``step``."""

    step: int
    scores: dict[str, Score]


class Curve(Model):
    """One run; ``shuffled``: a control, whose rewards said nothing."""

    shuffled: bool
    model: str
    points: list[Point]


def interval(values: Sequence[float], resamples: int, seed: int) -> tuple[float, float]:
    """The bootstrap 95 % interval of the mean of ``values`` (Efron's percentile method).

    The values are means of one prompt each: answers to one prompt are alike, so the bootstrap draws prompts.
    """
    draw = random.Random(seed)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(resamples))
    return means[round(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]


def measured(step: int, tasks: Sequence[Mapping[str, float] | None]) -> Point:
    """The point of held-out ``tasks``, each with its mean scores by name; it is printed.

    Raises:
        SystemExit: a task got no answer.
    """
    known = [task for task in tasks if task is not None]
    if len(known) < len(tasks):
        raise SystemExit(f"{len(tasks) - len(known)} held-out tasks got no answer")
    scores: dict[str, Score] = {}
    for name in known[0]:
        values = [task[name] for task in known]
        low, high = interval(values, _RESAMPLES, 0)
        scores[name] = Score(mean=fmean(values), low=low, high=high)
    print(f"  step {step}: {_told(scores)}", flush=True)
    return Point(step=step, scores=scores)


def permuted(outputs: Sequence[WorkflowOutput], draw: random.Random) -> list[WorkflowOutput]:
    """The ``outputs`` of a group with their rewards permuted among them: those of a control."""
    rewards = [output.reward for output in outputs]
    draw.shuffle(rewards)
    return [
        output.model_copy(update={"reward": reward, "is_success": None})
        for output, reward in zip(outputs, rewards, strict=True)
    ]


def keep(curve: Curve, folder: Path) -> None:
    """Write ``curve.json`` to ``folder``, and print how the scores went."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curve.json").write_text(curve.model_dump_json(indent=1) + "\n")
    first, last = curve.points[0], curve.points[-1]
    what = "control: " if curve.shuffled else ""
    was = ", ".join(f"{name} {score.mean:.3f}" for name, score in first.scores.items())
    print(f"{what}from {was}\n{what}to {_told(last.scores)} in {last.step} steps; {folder / 'curve.json'}")


def _told(scores: Mapping[str, Score]) -> str:
    return ", ".join(f"{name} {one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" for name, one in scores.items())


def draw(runs: Sequence[Path], path: Path) -> None:
    """Write the PNG of ``runs``, folders with ``curve.json``: a panel for each score."""
    curves = {str(folder): Curve.model_validate_json((folder / "curve.json").read_text()) for folder in runs}
    names = list(next(iter(curves.values())).points[0].scores)
    with picture(path, (5 * len(names), 4)) as figure:
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for (label, curve), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
                steps = [point.step for point in curve.points]
                scores = [point.scores[name] for point in curve.points]
                axes.plot(steps, [one.mean for one in scores], color=colour, marker="o", label=label)
                axes.fill_between(
                    steps, [one.low for one in scores], [one.high for one in scores], color=colour, alpha=0.2
                )
            axes.set_title(f"{name}, 95 % interval")
            axes.set_xlabel("training step")
            axes.set_ylim(0, 1)
            axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curves of several runs of agent_roll.py.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders with curve.json")
    parser.add_argument("--out", type=Path, default=Path("runs/curve.png"))
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
