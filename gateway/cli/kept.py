"""``swarm-gateway policies show``, ``export``, ``fork`` and ``delete``: the versions whose checkpoints a run folder
keeps, in the folder or by the address of its server.

Invariant: a run may go on meanwhile; what is deleted is in the audit log with a reason.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.here import run_folder
from gateway.cli.output import confirm_deletion, tell
from gateway.cli.target import AsJson, RunDir, ServerTarget, targeted
from swarm.errors import ConfigError
from swarm.importer import load_attribute

if TYPE_CHECKING:
    from swarm.client import SwarmClient
    from swarm.status import KeptVersion, PolicyRecord

Version = Annotated[int, typer.Argument(min=1, help="a step that is kept; `show` lists them")]


@targeted
def show(
    target: ServerTarget,
    version: Annotated[int | None, typer.Argument(min=1, help="of which step; default: list those kept")] = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """What made a version, what was proven of it, who promoted it and why; without one, the versions that are kept."""
    with _source(target, run_dir) as source:
        if version is None:
            kept = source.kept_policies()
            lines = [_line(each) for each in kept] or ["no step is kept"]
            tell(as_json, [each.model_dump() for each in kept], *lines)
            return
        record = source.kept_policy(version)
    tell(as_json, record.model_dump(mode="json", exclude={"job"}) | {"job": _job(record)}, *_lines(record))


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
    from swarm.checkpoints import LATEST, check_kept, checkpoint_folder, copy

    run_dir = run_folder(run_dir)
    folder = _kept_in(run_dir).folder
    check_kept(folder, version)
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not")
    journal, aside = run_dir / "journal.db", out.absolute().with_name(f".{out.name}.{os.getpid()}")
    try:
        # a deletion of data has to name it
        load_attribute("swarm.server.journal.erasure:note_export")(journal, f"the run folder {out.absolute()}")
        aside.mkdir(parents=True)
        load_attribute("swarm.server.journal.forks:fork_journal")(journal, version, aside / "journal.db")
        checkpoints = checkpoint_folder(None, aside)
        copy(folder, version, checkpoints)
        (checkpoints / LATEST).write_text(str(version))
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
        # a relative one in a file starts from the file
        f"start it with a file that has the same job, `swarm: {{run_dir: {out.absolute()}}}` and no job.checkpoint_dir",
    )


@targeted
def delete(
    target: ServerTarget,
    version: Version,
    reason: Annotated[str, typer.Option("--reason", "-r", help="why, for the audit log")],
    run_dir: RunDir = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the checkpoint of a version; its rows in the journal stay, and so do exports and forks."""
    with _source(target, run_dir) as source:
        if not yes:
            confirm_deletion(lambda: _lines(source.kept_policy(version)))
        gone = source.delete_policy(version, reason)
    tell(as_json, gone.model_dump(), f"removed {gone.path}, {gone.bytes / 1e6:.0f} MB")


@dataclass(frozen=True)
class _RunFolder:
    """Answers from the files of ``run_dir`` as :class:`SwarmClient` does from a server."""

    run_dir: Path

    def kept_policies(self) -> list[KeptVersion]:
        return _kept_in(self.run_dir).all()

    def kept_policy(self, step: int) -> PolicyRecord:
        return _kept_in(self.run_dir).record(step)

    def delete_policy(self, step: int, reason: str) -> KeptVersion:
        from swarm.credentials import append_audit

        gone: KeptVersion = _kept_in(self.run_dir).delete(step)
        details = {"reason": reason, **gone.model_dump()}
        entry = {"who": f"uid {os.getuid()}", "sender": "", "what": "policies delete", "details": details}
        asyncio.run(append_audit(self.run_dir / "audit.jsonl", {**entry, "result": "done"}))
        return gone


def _source(target: ServerTarget, run_dir: Path | None) -> AbstractContextManager[_RunFolder | SwarmClient]:
    """The server that is named, else the run folder."""
    if target.is_open:
        return nullcontext(_RunFolder(run_folder(run_dir)))
    if run_dir is not None:
        raise ConfigError("name a run folder or the address of a server, not both")
    return target.connect()


def _kept_in(run_dir: Path) -> Any:
    return load_attribute("swarm.server.kept:KeptVersions")(run_dir)


def _line(kept: KeptVersion) -> str:
    from swarm.progress import reward

    mean = "" if kept.reward is None else f", reward {reward(kept.reward)}"
    why = f": {', '.join(kept.why)}" if kept.why else ""
    return f"step {kept.step}{mean}, {kept.bytes / 1e6:.0f} MB{why}"


def _job(record: PolicyRecord) -> dict[str, Any]:
    return record.job.model_dump(mode="json", exclude_defaults=True)


def _lines(record: PolicyRecord) -> list[str]:
    before = [step.step for step in record.steps if step.step < record.step]
    parent = f"step {before[-1]} of this run" if before else record.parent or f"the model {record.job.model}"
    lines = [
        f"{record.job.model_name}, step {record.step} of run {record.run_id}",
        f"kept: {kept.path}, {_line(kept)}" if (kept := record.kept) else "not kept: its checkpoint is removed",
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
    lines += [f"held out: {sentence}" for sentence in record.held_out]
    lines += [f"verdict: {verdict}" for verdict in record.verdicts] or ["verdict: nothing was compared"]
    lines += [f"stage: {move}" for move in record.moves]
    return lines
