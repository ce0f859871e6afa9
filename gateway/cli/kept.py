"""``swarm-gateway policies show``, ``export``, ``fork`` and ``delete``: the versions whose checkpoints a run folder
keeps.

Invariant: a run may go on meanwhile, and what it needs is refused before anything is touched.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.here import run_folder
from gateway.cli.output import tell
from gateway.cli.target import AsJson, RunDir
from swarm.errors import ConfigError
from swarm.importer import load_attribute

if TYPE_CHECKING:
    from swarm.status import PolicyRecord

Version = Annotated[int, typer.Argument(min=1, help="a step that is kept; `show` lists them")]


def show(
    version: Annotated[int | None, typer.Argument(min=1, help="of which step; default: list those kept")] = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """What made a version, what was proven of it, who promoted it and why; without one, the versions that are kept."""
    from swarm.checkpoints import check_kept, why_kept

    run_dir, folder = _folders(run_dir)
    kept = why_kept(folder)
    if version is None:
        rows = [_row(folder, step, why) for step, why in kept.items()]
        tell(as_json, rows, *([_line(row) for row in rows] or [f"no step is kept in {folder}"]))
        return
    record: PolicyRecord = load_attribute("swarm.server.journal.lineage:record_of")(run_dir / "journal.db", version)
    if version not in kept and version not in [step.step for step in record.steps]:
        check_kept(folder, version)
    row = _row(folder, version, kept[version]) if version in kept else {"step": version, "path": None, "why": []}
    value = row | record.model_dump(mode="json", exclude={"job"}) | {"job": _job(record)}
    tell(as_json, value, *_lines(record, row))


def export(
    version: Version,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder to write, which must not exist")],
    run_dir: RunDir = None,
    merged: Annotated[bool, typer.Option("--merged", help="of a LoRA run: the whole model")] = False,
    as_json: AsJson = False,
) -> None:
    """`models export --step VERSION`: a model folder that transformers, vLLM and `job.model` load."""
    from gateway.cli.models import export as export_model

    export_model(out, run_dir, version, merged=merged, as_json=as_json)


def fork(
    version: Version,
    out: Annotated[Path, typer.Option("--out", "-o", help="run folder to make, which must not exist")],
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a run folder that goes on from a kept version, with its optimizer; the run that it is of stays as it is.

    Files of weights are shared with it where both folders are on one disk.
    """
    from swarm.checkpoints import LATEST, check_kept, copy

    run_dir, folder = _folders(run_dir)
    check_kept(folder, version)
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not")
    aside = out.absolute().with_name(f".{out.name}.{os.getpid()}")
    try:
        # a deletion of data has to name it
        load_attribute("swarm.server.journal.erasure:note_export")(run_dir, f"the run folder {out.absolute()}")
        aside.mkdir(parents=True)
        load_attribute("swarm.server.journal.forks:fork_journal")(run_dir / "journal.db", version, aside / "journal.db")
        copy(folder, version, aside / "checkpoints")
        (aside / "checkpoints" / LATEST).write_text(str(version))
        aside.rename(out)
    except OSError as exc:
        raise ConfigError(f"cannot make the run folder {out}: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    value = {"run_dir": str(out), "step": version, "from": str(run_dir)}
    tell(
        as_json,
        value,
        f"{out}: goes on from step {version} of {run_dir}",
        f"start it with a file that has the same job, `swarm: {{run_dir: {out}}}` and no job.checkpoint_dir",
    )


def delete(
    version: Version,
    run_dir: RunDir = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the checkpoint of a version; its rows in the journal stay, and so do exports and forks."""
    from swarm.checkpoints import check_kept, held_steps, latest_step, remove
    from swarm.credentials import append_audit

    run_dir, folder = _folders(run_dir)
    check_kept(folder, version)
    if version == latest_step(folder):
        raise ConfigError(
            f"the run goes on from step {version}, and its weights are served: let it save a later step, or go back to "
            "an earlier one (`up --step`), then delete it"
        )
    if (why := held_steps(folder).get(version)) is not None:
        raise ConfigError(
            f"step {version} is {why}: `policies rollback` or `policies pin --off` lets it go, where it is still the "
            "challenger; the next promotion does where it is not"
        )
    row = _row(folder, version, [])
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"nothing is deleted: add --yes to remove {row['path']} ({row['bytes'] / 1e6:.0f} MB)")
        typer.echo(_line(row))
        if not typer.confirm("Delete it for good?"):
            raise typer.Exit(1)
    try:
        remove(folder, version)
    except OSError as exc:
        raise ConfigError(f"cannot remove {row['path']}: {exc.strerror or exc}") from exc
    entry = {"who": f"uid {os.getuid()}", "sender": "", "what": "policies delete", "details": row, "result": "done"}
    asyncio.run(append_audit(run_dir / "audit.jsonl", entry))
    tell(as_json, row, f"removed {row['path']}, {row['bytes'] / 1e6:.0f} MB")


def _folders(run_dir: Path | None) -> tuple[Path, Path]:
    """The run folder, and that of its checkpoints."""
    from swarm.checkpoints import checkpoint_folder

    run_dir = run_folder(run_dir)
    job, _ = load_attribute("swarm.server.journal.lineage:latest_job")(run_dir / "journal.db")
    return run_dir, checkpoint_folder(job, run_dir)


def _row(folder: Path, step: int, why: list[str]) -> dict[str, Any]:
    from swarm.checkpoints import checkpoint, score_of, size_of

    path = checkpoint(folder, step)
    reward = score_of(path).get("reward_mean")
    return {"step": step, "path": str(path), "bytes": size_of(path), "reward": reward, "why": why}


def _line(row: dict[str, Any]) -> str:
    from gateway.views.format import printable

    reward = "" if row["reward"] is None else f", reward {row['reward']:.3f}"
    why = f": {printable(', '.join(row['why']))}" if row["why"] else ""
    return f"step {row['step']}{reward}, {row['bytes'] / 1e6:.0f} MB{why}"


def _job(record: PolicyRecord) -> dict[str, Any]:
    return record.job.model_dump(mode="json", exclude_defaults=True)


def _lines(record: PolicyRecord, row: dict[str, Any]) -> list[str]:
    from gateway.views.format import printable

    before = [step.step for step in record.steps if step.step < record.step]
    parent = f"step {before[-1]} of this run" if before else record.parent or f"the model {record.job.model}"
    lines = [
        f"{record.job.model_name}, step {record.step} of run {record.run_id}",
        f"kept: {row['path']}, {_line(row)}" if row["path"] else "not kept: its checkpoint is removed",
        f"parent: {parent}" + (f"; the run goes on from {record.parent}" if before and record.parent else ""),
        f"job: {', '.join(f'{name}={value}' for name, value in _job(record).items())}",
        f"code: {', '.join(record.code) or 'not known'}",
        "episodes: " + (f"{record.episodes[0]} to {record.episodes[1]}" if record.episodes else "none are kept"),
    ]
    lines += [
        "evaluation: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(evaluation.metrics.items()))
        for evaluation in record.evaluations
        if evaluation.step == record.step
    ] or ["evaluation: none"]
    lines += [f"verdict: {verdict}" for verdict in record.verdicts] or ["verdict: nothing was compared"]
    lines += [f"stage: {move}" for move in record.moves]
    return [printable(line) for line in lines]
