"""Prints and writes the reports of replays and trainings."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from rich.cells import cell_len

from gateway.reports.plot import draw
from gateway.reports.report import (
    CONFIDENCE,
    PLOT_FILE,
    REPORT_FILE,
    Curves,
    Report,
    TrainingReport,
    by_prompt,
    mean_of,
    read_report,
    versions,
)
from gateway.views.format import Row, Table, bar, printable, text_lines
from swarm.errors import ConfigError
from swarm.files import replace_file
from swarm.intervals import mean_interval
from swarm.progress import reward, share

#: What rewards by step cannot say: each step has other prompts, and the model has seen them.
_TEST = "held-out prompts prove more: `swarm-gateway replay --no-train --hooks ... --compare ...`"
#: The same of `train`, which has no gateway and no hook.
_EVALUATION = (
    "no evaluation has a reward, and held-out tasks prove more: give the file `eval` and `tasks.validation`, or see "
    "why their episodes failed"
)
#: Rows of the table of steps, beside the last; cells of its bars, and of those that a narrow terminal leaves; and of
#: its lines where there is no terminal.
_MAX_ROWS, _BAR, _LEAST_BAR, _PIPE_WIDTH = 30, 24, 4, 120


def print_report(report: Curves, others: Sequence[Curves] = ()) -> None:
    """Print the steps as a table, with the rewards of the evaluations and of ``others`` beside them, and what became of
    the run."""
    for line in (*_steps_lines(report, others), *summary(report, others)):
        print(printable(line))


def _steps_lines(report: Curves, others: Sequence[Curves]) -> list[str]:
    """The table of steps; where its lines are wider than the terminal, which would break them, its bars give way."""
    if not report.steps:
        return []
    lines = text_lines(_steps_table(report, others, _BAR), _MAX_ROWS + 1)
    beyond = max(map(cell_len, lines)) - shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns
    if beyond <= 0:
        return lines
    return text_lines(_steps_table(report, others, max(_BAR - beyond, _LEAST_BAR)), _MAX_ROWS + 1)


def _steps_table(report: Curves, others: Sequence[Curves], width: int) -> Table:
    """The steps, every k-th of many, and the last one, with bars of ``width`` cells."""
    stride = max(1, -(-len(report.steps) // _MAX_ROWS))
    shown = [p for i, p in enumerate(report.steps) if i % stride == 0 or i == len(report.steps) - 1]
    low, high = min(0.0, *(p.reward_mean for p in shown)), max(1.0, *(p.reward_mean for p in shown))
    columns = [
        (">step", [str(p.step) for p in shown]),
        (">reward", [reward(p.reward_mean) for p in shown]),
        ("", [bar(p.reward_mean - low, high - low, width) for p in shown]),
        (">groups differ", ["" if p.with_signal is None else f"{p.with_signal} of {p.groups}" for p in shown]),
        (">success", [_shown(p.success_rate, share) for p in shown]),
        (">tokens/answer", [_shown(p.response_tokens, "{:.0f}".format) for p in shown]),
        (">s/step", [_shown(p.seconds, "{:.1f}".format) for p in shown]),
    ]
    beside = [("evaluation", report.evaluations), *((other.label, other.steps) for other in others)]
    for label, points in beside:
        rewards = {point.step: point.reward_mean for point in points}
        columns.append((f">{label}", [_shown(rewards.get(p.step), reward) for p in shown]))
    titles, cells = zip(*((title, cells) for title, cells in columns if any(cells)), strict=True)
    return Table(titles, [Row(row) for row in zip(*cells, strict=True)])


def _shown(value: float | None, as_text: Callable[[float], str]) -> str:
    return "" if value is None else as_text(value)


def summary(report: Curves, others: Sequence[Curves] = ()) -> list[str]:
    """What became of the requests or episodes, and whether the run learns, a line each."""
    lines: list[str] = []
    if isinstance(report, Report):
        lines.append(
            f"{report.requests} requests in {report.seconds:.0f} s: {report.answered} answered, "
            f"{report.failed} failed, {report.cancelled} cancelled ({report.stopped_because})"
        )
        if report.latency:
            lines.append(f"latency: p50 {report.latency.p50:.2f} s, p95 {report.latency.p95:.2f} s")
        lines += [f"  {failure.count} x {kind}: {failure.example}" for kind, failure in report.failures.items()]
        if report.untrained and not report.scores:
            why = ", ".join(f"{count} x {reason}" for reason, count in report.untrained.items())
            lines.append(f"answered and not trained: {why}")
    if isinstance(report, TrainingReport):
        episodes = f"{report.finished} episodes, {report.failed} failed"
        lines.append(f"{episodes}, in {report.seconds:.0f} s ({report.stopped_because})")
    if report.evaluations:
        begin, end = report.evaluations[0], report.evaluations[-1]
        first = _shown(begin.success_rate, share) or "not known"
        rate = "" if end.success_rate is None else f", success {first} -> {share(end.success_rate)}"
        lines.append(
            f"evaluation: step {begin.step} {reward(begin.reward_mean)} ({begin.episodes} episodes), "
            f"step {end.step} {reward(end.reward_mean)} ({end.episodes} episodes){rate}"
        )
    if isinstance(report, Report) and report.scores:
        return [*lines, *_held_out(report)]
    if report.steps:
        lines.append(report.learning(others))
        lines += [] if report.evaluations else [_TEST if isinstance(report, Report) else _EVALUATION]
    return lines


def _held_out(report: Report) -> list[str]:
    """Of an untrained replay: the mean reward, and how it compares."""
    which = f" ({policy})" if (policy := versions(report)) else ""
    if (comparison := report.comparison) is not None:
        left_out = f", {comparison.left_out} left out without a reward of both" if comparison.left_out else ""
        means = (
            ""
            if comparison.after is None
            else f" {reward(comparison.after)}{which}, {comparison.earlier}: {_shown(comparison.before, reward)}"
        )
        return [f"mean reward on {comparison.prompts} prompts of both{left_out}:{means}", comparison.verdict]
    means = [mean for scores in by_prompt(report.scores).values() if (mean := mean_of(scores)) is not None]
    if not means:
        return [f"no reward: the hook failed on all {len(report.scores)} answers"]
    mean, low, high = mean_interval(means, CONFIDENCE)
    interval = f" [{reward(low)}, {reward(high)}]" if len(means) > 1 else ""
    return [f"mean reward: {reward(mean)}{interval} on {len(means)} prompts{which}; nothing was trained"]


def make_folder(folder: Path) -> None:
    """Make the folder of a report, before what is to be reported is done.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as exc:
        raise ConfigError(f"cannot write the report to {folder}: {exc.strerror or exc}") from exc


def write_report(
    report: Curves, folder: Path, others: Sequence[Curves] = (), *, keeps_earlier: bool = False
) -> Path | None:
    """Write ``report.json`` and, if there are steps, ``report.png`` to ``folder``, with ``others`` for comparison.

    Returns:
        Where the report that was there is now, if ``keeps_earlier`` and this one lacks some of its steps.

    Raises:
        ConfigError: the folder cannot be written; a report that was there is as it was.
    """
    make_folder(folder)
    try:
        kept = _set_aside(folder, report) if keeps_earlier else None
        # an answer that was cut may end with half a character, which pydantic's own JSON refuses
        text = json.dumps(report.model_dump(mode="json"), ensure_ascii=False, indent=1)
        replace_file(folder / REPORT_FILE, f"{text}\n".encode(errors="replace"))
        if report.steps:
            draw([report, *others], folder / PLOT_FILE)
    except OSError as exc:
        raise ConfigError(f"cannot write the report to {folder}: {exc.strerror or exc}") from exc
    return kept


def _set_aside(folder: Path, report: Curves) -> Path | None:
    """Rename the report in ``folder`` to the first free ``report-1``, ``report-2``, ..., unless ``report`` has all of
    it; its new path."""
    file = folder / REPORT_FILE
    if not file.exists():
        return None
    with suppress(ConfigError):
        if _tells(report).issuperset(_tells(read_report(file))):
            return None
    numbered = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(1))
    kept = next(path for path in numbered if not path.exists())
    file.rename(kept)
    with suppress(FileNotFoundError):
        (folder / PLOT_FILE).rename(kept.with_suffix(Path(PLOT_FILE).suffix))
    return kept


def _tells(report: Curves) -> set[tuple[int, float | None]]:
    """Its steps with their rewards, and the steps that were evaluated, of which there may be more episodes later."""
    steps: set[tuple[int, float | None]] = {(point.step, point.reward_mean) for point in report.steps}
    return steps | {(point.step, None) for point in report.evaluations}
