"""``swarm-gateway config``: what a job resolves to and why, what ran, and how to change it.

The swarm server resolves jobs, because verl is where the engine is; nothing is started for it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.here import runs_of
from gateway.cli.output import print_json, tell
from gateway.cli.target import (
    AsJson,
    ForceRestart,
    ServerTarget,
    Set,
    Wait,
    job_text,
    parse_set,
    targeted,
    wait_for_engine,
)
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.client import SwarmClient
    from swarm.control_protocol import ResolvedJob

app = typer.Typer(help="The engine's configuration: what a job means, what ran, and changes.", no_args_is_help=True)

Job = Annotated[Path, typer.Argument(help="YAML file with the job, ours or AgentJet's, or a file for `up`")]


@app.command()
@targeted
def show(
    target: ServerTarget,
    job: Job,
    set_: Set = None,
    everything: Annotated[bool, typer.Option("--all", help="verl's own defaults too")] = False,
    as_json: AsJson = False,
) -> None:
    """Each value and where it comes from: set, job, server defaults, swarm-gateway, or verl.

    Where no server is named and none runs here, the job's values alone: verl's are known where verl is.
    """
    from swarm.job import flat, plain_fields

    if target.is_open and not runs_of():
        _show_job(job, set_, as_json)
        return
    with target.connect() as client:
        resolved = _resolved(client, job, set_)
    fields = plain_fields(resolved.job)
    rows = [(name, fields[name], resolved.job_sources[name]) for name in resolved.job_sources]
    values = flat(resolved.config)
    rows += [
        (key, values[key], source)
        for key, source in resolved.sources.items()
        if key in values and (everything or source.partition(":")[0] != "verl")
    ]
    tell(as_json, resolved.model_dump(mode="json"), *_lines(rows))


def _show_job(path: Path, set_: list[str] | None, as_json: bool) -> None:
    """The fields of a job, with the defaults that its file gives the server, if it is one for ``up``."""
    from gateway.cli.parts import mapping_in, part_of
    from swarm.job import OURS, layered, read_fields
    from swarm.validation import path_in, read_mapping, read_text

    part = part_of(path, "job")
    fields = part.settings if part.section else read_fields(read_text(path, "job")).fields
    defaults = mapping_in(path, part.file, "swarm").get("job_defaults") if part.section else None
    server = read_mapping(path_in(path.parent, str(defaults)), "server's job_defaults") if defaults else {}
    layers = layered(fields, set_=parse_set(set_), server=server, where=part.where)
    values = layers.job.model_dump(mode="json", exclude={"overrides"})
    sources = {name: layers.fields.get(name, OURS) for name in values}
    rows = [(name, value, sources[name]) for name, value in values.items()]
    rows += [(name, value, layers.overrides[name]) for name, value in layers.job.flat_overrides.items()]
    job = layers.job.model_dump(mode="json")
    tell(as_json, {"job": job, "job_sources": sources, "config": None, "sources": {}}, *_lines(rows))
    if not as_json:
        where = "run this where `up` runs, or add --swarm-url"
        typer.echo(f"verl's own values are known where it is installed: {where}", err=True)


def _lines(rows: list[tuple[str, Any, str]]) -> list[str]:
    width = max(len(key) for key, _, _ in rows)
    return [f"{key:<{width}}  {_text(value)}  [{source}]" for key, value, source in rows]


@app.command()
@targeted
def dump(
    target: ServerTarget,
    job: Job,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="file to write; default: print it")] = None,
    as_json: AsJson = False,
) -> None:
    """verl's complete configuration for a job, as YAML."""
    import yaml

    with target.connect() as client:
        resolved = _resolved(client, job, set_)
    text, count = yaml.safe_dump(resolved.config, sort_keys=False), len(resolved.sources)
    if out is not None:
        out.write_text(text)
        tell(as_json, {"path": str(out), "values": count}, f"{out}: {count} values")
    elif as_json:
        print_json(resolved.config)
    else:
        typer.echo(text, nl=False)


@app.command()
@targeted
def diff(
    target: ServerTarget,
    old: Annotated[str, typer.Argument(help="a job's YAML file, or the number of a run (`config runs`)")],
    new: Annotated[str | None, typer.Argument(help="another one; default: the latest run")] = None,
    set_: Set = None,
    as_json: AsJson = False,
) -> None:
    """What differs in job, code and verl's configuration; --set changes the files. Exit code 1 if anything does."""
    with target.connect() as client:
        if new is None:
            runs = client.runs().runs
            if not runs:
                raise ConfigError("nothing has run on this server yet: name a second job to compare with")
            new = str(runs[-1].number)
        sides = [_side(client, run, set_) for run in (old, new)]
    # what only one side knows (a run that died before it was resolved, the code of a file) is not compared
    sections = {key.partition(" ")[0] for key in sides[0]} & {key.partition(" ")[0] for key in sides[1]}
    keys = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if key.partition(" ")[0] in sections]
    absent = object()
    changes = {
        key: [side.get(key) for side in sides] for key in keys if sides[0].get(key, absent) != sides[1].get(key, absent)
    }
    lines = [f"{key}: {_text(before)} -> {_text(after)}" for key, (before, after) in changes.items()]
    tell(as_json, {"from": old, "to": new, "changed": changes}, *lines)
    raise typer.Exit(1 if changes else 0)


@app.command()
@targeted
def sync(
    target: ServerTarget,
    job: Job,
    set_: Set = None,
    force_restart: ForceRestart = False,
    wait: Wait = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Check a job, and let the next engine run it; the engine must be OFFLINE, unless --force-restart restarts it."""
    from swarm.states import EngineState

    with target.connect() as client:
        text = job_text(job, client.server_url)
        done = client.sync_train_config(text, set=parse_set(set_), force_restart=force_restart)
        running = client.status().engine.engine_status is not EngineState.OFFLINE
        engine = wait_for_engine(client, wait if running else 0.0)
    run = "a new training run begins, without what the earlier one collected; " if done.new_run else ""
    outcome = {"engine": engine, "restarted": running, "new_run": done.new_run}
    tell(as_json, outcome, f"{job} is taken; {run}{engine}")


@app.command()
@targeted
def runs(target: ServerTarget, as_json: AsJson = False) -> None:
    """The starts of the engine, oldest first."""
    with target.connect() as client:
        answer = client.runs()
    lines: list[str] = []
    for run in answer.runs:
        began = f"{datetime.fromtimestamp(run.started, UTC):%Y-%m-%d %H:%M:%S} UTC"
        lasted = (
            f"{run.ended - run.started:.0f} s: {run.reason}" if run.ended is not None else "runs, or its server died"
        )
        lines.append(f"{run.number:>4}  {began}  {run.model}  code {run.code or 'of the server'}  {lasted}")
    tell(as_json, answer.model_dump(mode="json")["runs"], *lines)


def _resolved(client: SwarmClient, job: Path, set_: list[str] | None) -> ResolvedJob:
    return client.resolve_config(job_text(job, client.server_url), set=parse_set(set_))


def _side(client: SwarmClient, name: str, set_: list[str] | None) -> dict[str, Any]:
    """What a job's file or a run comes to, by section and key."""
    from swarm.job import flat

    config: dict[str, Any] | None
    code: dict[str, Any] = {}
    if name.isdigit() and not Path(name).exists():
        record = client.run_record(int(name))
        job, config, code = record.job, record.config, {"code": record.code}
    else:
        resolved = _resolved(client, Path(name), set_)
        job, config = resolved.job, resolved.config
    fields = {f"job {key}": value for key, value in flat(job.model_dump(mode="json")).items()}
    return code | fields | {f"verl {key}": value for key, value in flat(config or {}).items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
