"""``swarm-gateway research``: run, resume, watch and report a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.here import explicit_token
from gateway.cli.output import print_json, tell
from gateway.cli.target import AsJson
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.research.ledger import State
    from swarm.research.study import Study

app = typer.Typer(help="Run studies: experiments that are proposed, run, judged and reported.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="STUDY", help="folder with study.yaml, under version control")]
Token = Annotated[str | None, typer.Option("--token", envvar="SWARM_TOKEN", help="admin token of the swarm servers")]
Events = Annotated[bool, typer.Option("--json", help="print events as lines of JSON")]

_PLOT, _REPORT = "report.png", "report.md"


@app.command()
def run(
    study: Folder,
    quick: Annotated[
        bool, typer.Option("--quick", help="a rehearsal: the base and one experiment with two steps each; no verdict")
    ] = False,
    token: Token = None,
    as_json: Events = False,
) -> None:
    """Begin a study, and run it to its end; Ctrl-C leaves it to be resumed."""
    _go(study, token, as_json, begins=True, quick=quick)


@app.command()
def resume(study: Folder, token: Token = None, as_json: Events = False) -> None:
    """Go on with a study that was interrupted or killed: no run is done twice."""
    _go(study, token, as_json, begins=False)


@app.command()
def status(study: Folder, as_json: AsJson = False) -> None:
    """Say where a study is: its budget, what runs, and each experiment's verdict."""
    from swarm.research.report import summary

    report = summary(*_read(study))
    lines = [report["question"].strip(), f"{report['study'] or study}: {report['phase']}; {report['why']}".rstrip("; ")]
    for name in ("runs", "steps", "hours"):
        of = "" if report[name]["of"] is None else f" of {report[name]['of']}"
        lines.append(f"  {name:<6} {report[name]['used']}{of}")
    for name, entry in report["running"].items():
        lines.append(f"  {name} runs at {entry['server']}, measured at step {entry['step']}")
    for name, entry in report["experiments"].items():
        words = entry["verdict"] or entry["outcome"] or ("refused" if entry["refused"] else "waits")
        why = entry["why"] or entry["refused"]
        lines.append(f"  {name}: {words}: {entry['hypothesis']}" + (f" ({why})" if why else ""))
    tell(as_json, report, *lines)


@app.command()
def report(
    study: Folder,
    out: Annotated[Path | None, typer.Option(help="folder for report.md and report.png; default: the study's")] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.md and report.png: the result, all experiments, also those that failed, and all runs."""
    from swarm.research.report import markdown, summary

    declared, state = _read(study)
    if not state.study:
        raise ConfigError(f"the study {study} has not begun: `swarm-gateway research run {study}`")
    into = out or study
    into.mkdir(parents=True, exist_ok=True)
    picture = _draw(declared, state, into / _PLOT)
    (into / _REPORT).write_text(markdown(declared, state, picture), encoding="utf-8")
    tell(as_json, summary(declared, state), f"report: {into / _REPORT}")


def _read(folder: Path) -> tuple[Study, State]:
    from swarm.research import ledger
    from swarm.research.study import read_study

    return read_study(folder), ledger.read(folder)


def _go(folder: Path, token: str | None, as_json: bool, *, begins: bool, quick: bool = False) -> None:
    import contextlib
    import shutil
    import signal
    import threading
    import time

    from gateway.views.format import printable
    from swarm.concurrency import on_signals
    from swarm.research.lab import Lab
    from swarm.research.ledger import Ledger
    from swarm.research.proposing import ProposerError
    from swarm.research.report import phase
    from swarm.research.running import Runner, StudyStoppedError, begin
    from swarm.research.study import read_study, rehearsal
    from swarm.research.trees import RUNS

    began = time.monotonic()
    stopping = threading.Event()

    def on_event(kind: str, values: Any) -> None:
        at = time.monotonic() - began
        if quick and kind in ("chosen", "verdict", "finished"):
            return
        # whoever reads is gone, or the disk of a log is full: that ends no study
        with contextlib.suppress(OSError):
            if as_json:
                print_json({"event": kind, "at": round(at, 1), **values})
            elif words := _words(kind, values):
                typer.echo(printable(f"{at:7.1f} s  {words}"))

    declared = read_study(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_signals(stopping.set, signal.SIGINT, signal.SIGTERM))
        held = stack.enter_context(Ledger(folder))
        if quick:
            # beside the study itself, whose copies of the code it uses: none may run meanwhile
            declared, rehearsed = rehearsal(declared), folder / RUNS / "quick"
            shutil.rmtree(rehearsed, ignore_errors=True)
            rehearsed.mkdir(parents=True)
            held = stack.enter_context(Ledger(rehearsed))
        if begins:
            begin(declared, folder, held)
        lab = Lab(declared, folder, held.state, explicit_token(token), on_event)
        try:
            Runner(declared, folder, held, lab, on_event).run(stopping)
        except (StudyStoppedError, ProposerError) as exc:
            how = "" if quick else f"; `research resume {folder}` goes on"
            typer.echo(f"swarm-gateway: {exc.message}{how}", err=True)
            raise typer.Exit(1) from None
        finally:
            if quick:
                # nothing resumes a rehearsal
                for server in declared.servers:
                    lab.release(server)
        if quick and phase(held.state) == "finished":
            failed = [f"{name}: {run.why}" for name, run in held.state.runs.items() if run.outcome == "failed"]
            if not failed and len(held.state.runs) < 2:
                refused = [experiment.refused for experiment in held.state.experiments.values() if experiment.refused]
                failed = [f"no experiment was run: {refused[0] if refused else held.state.finished}"]
            typer.echo(
                "the rehearsal failed: " + "; ".join(failed) if failed else "the rehearsal worked; it judges nothing",
                err=as_json,
            )
            raise typer.Exit(1 if failed else 0)
        if phase(held.state) != "finished":
            how = "run the rehearsal again" if quick else f"`swarm-gateway research resume {folder}` goes on"
            typer.echo(f"interrupted; {how}", err=True)
            raise typer.Exit(130)


def _words(kind: str, values: Any) -> str:
    match kind:
        case "proposed":
            refused = f"; refused: {values['refused']}" if values["refused"] else ""
            return f"{values['experiment']} proposed: {values['hypothesis']}{refused}"
        case "claimed":
            return f"{values['run']} begins at {values['server']}"
        case "measured":
            scores = values["scores"]
            return f"{values['run']} scores {sum(scores) / len(scores):.4g} at step {values['step']}"
        case "ended":
            return f"{values['run']} {values['outcome']}" + (f": {values['why']}" if values["why"] else "")
        case "chosen":
            return f"to confirm: {', '.join(values['experiments']) or 'nothing'}"
        case "verdict":
            return f"{values['experiment']} {values['verdict']}: {values['why']}"
        case "exhausted" | "finished":
            return f"{kind}: {values['why']}"
        case _:
            return f"{values['run']}: {values['words']}"


def _draw(study: Study, state: State, path: Path) -> str:
    """The plot's name; empty if there is nothing to draw, or matplotlib is not installed."""
    from gateway.reports.plot import COLOURS, INK, check_plots, evaluated, picture
    from swarm.intervals import mean_interval
    from swarm.research.decisions import arm_scores
    from swarm.research.ledger import BASE

    first = {name: run for name, run in state.runs.items() if "." not in name and run.scores}
    if not first:
        return ""
    try:
        check_plots()
    except ConfigError as exc:
        typer.echo(f"swarm-gateway: {exc.message}", err=True)
        return ""
    with picture(path, (9, 4.2)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        marked = [BASE, *(state.chosen or [])]
        # what is marked lies above the others
        for name in sorted(first, key=lambda name: name in marked):
            run = first[name]
            rank = marked.index(name) if name in marked else None
            colour = "#dddddd" if rank is None else INK if rank == 0 else COLOURS[(rank - 1) % len(COLOURS)]
            evaluated(left, name if rank is not None else "_", list(run.means.items()), colour)
        left.set_title(f"{study.evaluator.metric}, first runs")
        left.set_xlabel("training step")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.legend()
        arms = [(BASE, "seed"), *((name, arm) for name in state.chosen or () for arm in ("seed", "control"))]
        shown = [
            (f"{name}\nshuffled" if arm == "control" else name, arm_scores(study, state, name, arm))
            for name, arm in arms
        ]
        for rank, (_, scores) in enumerate(shown):
            right.plot([rank] * len(scores), scores, "o", color=INK, alpha=0.5)
            if len(scores) > 1:
                interval = mean_interval(scores, study.decision.confidence)
                right.errorbar(
                    [rank + 0.15],
                    [interval.mean],
                    yerr=[[interval.mean - interval.low], [interval.high - interval.mean]],
                    fmt="s",
                    color=INK,
                    capsize=4,
                )
        right.set_title("confirmation, by seed")
        right.set_xticks(range(len(shown)), [name for name, _ in shown])
    return path.name
