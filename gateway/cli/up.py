"""``swarm-gateway up`` and ``train``: servers on one machine from one file; their events as lines for people or as JSON
lines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gateway.cli.output import print_json, tell, told_as_json
from gateway.cli.serve import LogFormat

if TYPE_CHECKING:
    from gateway.launch.plan import EarlierRun, UpPlan
    from gateway.launch.up import Work
    from gateway.launch.watch import OnEvent
from swarm.errors import ConfigError, SwarmGatewayError

Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in the folder although the job has changed")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="begin anew from the job's model; the run in the folder is kept beside it")
]
#: Lines shown of a dead engine's output.
_TAIL_LINES = 5
_INDENT = "\n           "
#: Event -> its line. Beside the event's values there are ``doing``, ``tail``, ``use``, ``results``, ``waiting``,
#: ``memory``, ``origin`` and ``loss``; where there is a gateway, also something in ``stays`` and ``answered``.
_LINES = {
    "listening": "{name}: {url}   (log: {log})",
    "starting": "engine: booting with {model}   (log: {log})",
    "waiting": "waiting for the end of {processes} processes of an earlier start in {run_dir}",
    "set_aside": "the earlier run is kept in {kept}",
    "going_on": "goes on with the run in {run_dir}: {done}",
    "rolled_back": "goes back to step {saved} of the run in {run_dir}, which had done {step}{later}",
    "unsaved": "WARNING: {lost}",
    "starting_incumbent": "{name}: booting; {memory}   (log: {log})",
    "beside": "{name} is the incumbent of the route {route}: the engine of the job answers as it, with no vLLM of its "
    "own; while that engine is away, nobody does",
    "incumbent_restarting": "{name}: DIED: {reason}{tail}" + _INDENT + "starting it again in {in_seconds:.0f} s "
    "({attempt} of {of}); until then its users get errors in the shadow",
    "incumbent_recovered": "{name}: answers after {seconds:.0f} s",
    "succeeding": "{name} is proven live on the route {route} and becomes the next incumbent",
    "recalled": "version {version} is taken back from the route {route} ({why}); {name} is to answer",
    "succeeded": "{name} is the incumbent of the route {route} from now on; the newest weights challenge it",
    "gateway_restarting": "gateway: DIED: {reason}{tail}" + _INDENT + "starting it again in {in_seconds:.0f} s "
    "({attempt} of {of})",
    "gateway_recovered": "gateway: serves again after {seconds:.0f} s",
    "disk_full": "WARNING: the disk of {path} is full ({holds}): free some space there, and all goes on by itself; "
    "meanwhile {answered}nothing is trained whose record would be lost",
    "disk_free": "the disk of {path} has room again",
    "warning": "WARNING: {message}",
    "hook_failed": "WARNING: the hook fails ({code}): {sentence}" + _INDENT + "{loss}",
    "boot": "engine: {doing}",
    "ready": "ready after {seconds:.0f} s: {use} (model {model}); Ctrl-C stops everything",
    "evaluation": "evaluation of step {step}: {results}",
    "learning": "{sentence}",
    "restarting": "engine: DIED: {reason}{tail}" + _INDENT + "starting it again in {in_seconds:.0f} s "
    "({attempt} of {of}){stays}",
    "trainer_restarting": "engine: the trainer DIED: {reason}" + _INDENT + "another one starts ({attempt} of {of}); "
    "meanwhile vLLM answers, untrained, with the weights that it has",
    "recovered": "engine: serves again after {seconds:.0f} s; training continues from {origin}",
    "engine_stopped": "engine: {reason}; this is no crash, so `up` does not start it again",
    "engine_given_up": "engine: {message}{tail}"
    + _INDENT
    + "users of routes with an upstream or a model of their own are "
    "answered on, and nothing is trained: mend it and run `swarm-gateway swarm engine start`, or start `up` again   "
    "(log: {log})",
    "stage": "route {route}: {stage}, by {by}: {why}{waiting}",
    "finished": "the job is done after step {step}",
    "stopping": "stopping the {name}",
    "stopped": "all stopped",
    "failed": "FAILED: {message}{tail}" + _INDENT + "full log: {log}",
}
#: What a failure of a hook costs: that of a session, and another.
_SESSION_LOSS = "such sessions earn nothing as a whole; their answers train by their own rewards"
_GROUP_LOSS = (
    "such groups are not trained, and while all are such, training waits; `swarm-gateway groups list --reason "
    "hook_failed` shows them"
)
#: Of ``train``, which has no gateway.
_NO_USERS = {"stays": "", "answered": ""}
#: Event -> the text of the spinner from then on.
_DOING = {
    "boot": "booting: {doing}",
    "state": "{doing}",
    "batch": "collecting a batch: {words}",
    "evaluating": "evaluating the weights of step {step}",
    "evaluation": "{doing}",
    "stopping": "stopping the {name}",
}


def up(
    config: Annotated[
        Path, typer.Argument(help="YAML file with the mappings job, swarm and gateway, or jobs and gateway")
    ],
    log_format: LogFormat = "text",
    check: Annotated[
        bool,
        typer.Option("--check", help="only say whether it would run: file, hooks, model, machine, ports, run folder"),
    ] = False,
    resume: Resume = False,
    fresh: Fresh = False,
    step: Annotated[
        int | None, typer.Option(min=1, help="go back to this saved step of the run in the folder, and on from there")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print events as lines of JSON")] = False,
) -> None:
    """Run swarm server, engine and gateway on this machine, or those of several jobs; one Ctrl-C stops them all."""
    from gateway.cli.checks import check_plan
    from gateway.cli.sections import read_plan
    from swarm.concurrency import hangups, on_signals

    # a reload right behind a start ends nothing: the gateway reads the file when it starts
    with on_signals(lambda: None, *hangups()):
        with told_as_json(as_json and check):
            if fresh and step is not None:
                raise ConfigError("--step goes back in the run and --fresh begins anew: give one of them")
            plan = read_plan(config)
            plan = replace(plan, log_format=log_format, earlier_run=_earlier_run(resume, fresh), from_step=step)
            if step is not None and len(plan.servers) > 1:
                raise ConfigError("--step is for a file with one job: steps of several jobs are not the same")
            warnings = check_plan(plan, only=check)
        if check:
            models = [server.job.model for server in plan.servers]
            lines = [f"WARNING: {warning}" for warning in warnings]
            lines.append(f"{config}: right; it trains {', '.join(models)}")
            tell(as_json, {"ok": True, "models": models, "warnings": warnings}, *lines)
            return
        with event_printer(as_json) as on_event:
            if code := _ran(plan, warnings, on_event):
                raise typer.Exit(code)


def _ran(plan: UpPlan, warnings: list[str], on_event: OnEvent, work: Work | None = None) -> int:
    """Run ``plan`` until it ends; the exit code."""
    from gateway.launch.up import run_up
    from gateway.launch.watch import UpFailedError

    for warning in warnings:
        on_event("warning", {"message": warning})
    try:
        run_up(plan, on_event, work)
    except UpFailedError as exc:
        on_event("failed", {"message": exc.message, "last_lines": exc.last_lines, "log": str(exc.log)})
        return exc.exit_code
    return 0


def _earlier_run(resume: bool, fresh: bool) -> EarlierRun:
    if resume and fresh:
        raise ConfigError("--resume goes on and --fresh begins anew: give one of them")
    return "resume" if resume else "fresh" if fresh else "go_on"


def train(
    config: Annotated[
        Path, typer.Argument(help="YAML file: job, workflow, tasks and, if needed, eval, control, swarm")
    ],
    resume: Resume = False,
    fresh: Fresh = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="a rehearsal in RUN_DIR/quick: two steps, 4 tasks at each evaluation")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="folder for report.json and report.png; default: the run folder")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="earlier report (folder or file) to draw beside this one")
    ] = None,
    label: Annotated[str, typer.Option(help="name of this run in the table and the plot")] = "run",
    as_json: Annotated[
        bool, typer.Option("--json", help="print events as lines of JSON, the last is the report")
    ] = False,
) -> None:
    """Train a workflow on tasks: start server and engine, run, evaluate, report; one Ctrl-C stops everything."""
    from gateway.cli.checks import check_plan
    from gateway.cli.sections import read_train
    from gateway.launch.train import TrainCommand, rehearsal
    from gateway.reports.printing import print_report, write_report
    from gateway.reports.report import read_report

    if quick and (resume or fresh):
        raise ConfigError("--quick is a run of its own, which begins anew each time")
    others = [read_report(path) for path in compare or []]
    plan = read_train(config)
    plan = replace(plan, up=replace(plan.up, earlier_run=_earlier_run(resume, fresh)))
    if quick:
        plan = rehearsal(plan)
    warnings = check_plan(plan.up)
    with event_printer(as_json) as on_event:
        work = TrainCommand(plan, on_event, label)
        try:
            code = _ran(plan.up, warnings, on_event, work)
        except SwarmGatewayError as exc:
            # what was trained is reported in any case, also where whoever reads is gone
            with suppress(OSError):
                typer.echo(f"swarm-gateway: {exc.message}", err=True)
            code = 2
        if work.report is not None:
            on_event("report", work.report.model_dump(mode="json"))
    if work.report is not None:
        folder, kept = report or plan.server.run_dir, None
        try:
            # of a rehearsal, nobody wants the one before
            kept = write_report(work.report, folder, others, keeps_earlier=report is not None or not quick)
        except ConfigError as exc:
            # the numbers are printed below in any case
            typer.echo(f"swarm-gateway: {exc.message}", err=True)
        if not as_json:
            print_report(work.report, others)
            typer.echo(f"report: {folder}" + (f" (an earlier one is kept in {kept})" if kept else ""))
    if code or work.report is None or work.report.interrupted:
        _leave(code or 130)


def _leave(code: int) -> NoReturn:
    """End the process with ``code``, even while a workflow that was given up runs on: nothing ends a thread."""
    others = [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.current_thread()
    ]
    if others:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


@contextmanager
def event_printer(as_json: bool) -> Generator[OnEvent]:
    """A callback that prints an event: as a line of JSON, or for people, on a terminal with a spinner below."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from gateway.views.format import printable

    began = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    spinner = Progress(*columns, console=console, transient=True)
    task = spinner.add_task("starting", total=None)
    gateway = ""

    def on_event(kind: str, values: dict[str, Any]) -> None:
        # whoever reads is gone, at which rich leaves, or the disk of a log is full: that ends no servers
        with suppress(OSError, SystemExit):
            show(kind, values)

    def show(kind: str, values: dict[str, Any]) -> None:
        nonlocal gateway
        at = time.monotonic() - began
        if as_json:
            print_json({"event": kind, "at": round(at, 1), **values})
            return
        if kind == "listening" and values["name"] == "gateway":
            gateway = values["url"]
        fields = values | _words(kind, values)
        if kind in ("stage", "hook_failed"):
            # whoever may claim may name a route, and a hook quotes answers
            fields |= {name: printable(text) for name, text in values.items() if isinstance(text, str)}
        fields["use"] = f"point your app at {gateway}/v1" if gateway else "training begins"
        fields |= {"stays": "; the gateway stays", "answered": "users are answered, and "} if gateway else _NO_USERS
        line = _step(values) if kind == "step" else _LINES.get(kind, "").format_map(fields)
        if line:
            line = f"{values['job']}: {line}" if "job" in values else line
            # markup off: a log line with [brackets] is text
            console.print(f"{at:7.1f} s  {line}", markup=False)
        if kind in _DOING:
            # a new state counts its own time; the stages of a boot share one count
            update = spinner.reset if kind == "state" else spinner.update
            update(task, description=_DOING[kind].format_map(fields))

    # is_terminal is what FORCE_COLOR says
    with spinner if console.file.isatty() and not as_json else nullcontext():
        yield on_event


def _words(kind: str, values: dict[str, Any]) -> dict[str, str]:
    """Parts of a line that depend on an event's values."""
    from reward_hooks.contract import SESSION_END
    from swarm.progress import DOING
    from swarm.states import EngineState

    lines = values.get("last_lines", [])
    step = values.get("step")
    without = "the job's model: there is no checkpoint yet"
    saved = values.get("saved")
    first = (saved or 0) + 1
    unsaved = f"step {step} is" if first == step else f"steps {first} to {step} are"
    return {
        "done": f"{step} steps are done, training continues from "
        + (f"the checkpoint of step {saved}" if saved else without),
        "later": f"; what it saved later is kept in {values['kept']}" if values.get("kept") else "",
        "lost": f"{unsaved} not saved; the next start goes on from " + (f"step {saved}" if saved else without),
        "doing": values.get("detail") or values.get("stage") or DOING[values.get("state", EngineState.ROLLING)],
        "tail": "".join(f"{_INDENT}| {line}" for line in (lines if kind == "failed" else lines[-_TAIL_LINES:])),
        "results": _results(values) if kind == "evaluation" else "",
        "waiting": "; training waits for a person (`swarm-gateway policies list`)" if values.get("waits") else "",
        "memory": f"its weights take {gigabytes} GB of memory beside the job's"
        if (gigabytes := values.get("gigabytes"))
        else "its model is downloaded first",
        "origin": f"the checkpoint of step {step}" if step else without,
        "loss": _SESSION_LOSS if values.get("sentence", "").startswith(SESSION_END) else _GROUP_LOSS,
    }


def _results(values: dict[str, Any]) -> str:
    from swarm.progress import reward, share

    if values["mean_reward"] is None:
        return f"all {values['failed']} episodes failed"
    success = "" if values["success_rate"] is None else f", success {share(values['success_rate'])}"
    failed = f", {values['failed']} failed" if values["failed"] else ""
    return f"reward {reward(values['mean_reward'])}{success} ({values['finished']} episodes{failed})"


def _step(values: dict[str, Any]) -> str:
    from swarm.progress import step_line
    from swarm.types import StepResult

    return step_line(StepResult.model_validate({name: values[name] for name in StepResult.model_fields}))
