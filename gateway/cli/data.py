"""``swarm-gateway data``: what is kept of a person, a copy of it, and its deletion."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import confirm_deletion, tell
from gateway.cli.target import AsJson, ServerTarget, targeted
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.subjects import DataReport, Subject

app = typer.Typer(
    help="What is kept of one key, session, user or request: report it, export it, delete it.", no_args_is_help=True
)

#: versions that are printed
_ROWS = 20


@dataclass(frozen=True)
class SubjectTarget(ServerTarget):
    """The server, and whose data is meant."""

    key: Annotated[str | None, typer.Option("--key", help="id of a gateway's key, see `swarm-gateway keys list`")]
    session: Annotated[str | None, typer.Option("--session", help="name of a conversation")]
    user: Annotated[
        str | None, typer.Option("--user", help="the end user, as the application names it in its requests")
    ]
    request: Annotated[str | None, typer.Option("--request", help="the `x-request-id` of a request")]

    @property
    def subject(self) -> Subject:
        """Whose data is meant; raises :class:`RequestError` if nobody is named."""
        from swarm.subjects import Subject, user_digest

        return Subject(
            key=self.key or "",
            session=self.session or "",
            user=user_digest(self.user or ""),
            request_id=self.request or "",
        )


@app.command()
@targeted
def report(
    target: SubjectTarget,
    as_json: AsJson = False,
) -> None:
    """How much is kept, and which policy versions learned from it; what several options name must fit all of them."""
    with target.connect() as client:
        current = client.data_report(target.subject)
    tell(as_json, current.model_dump(mode="json"), *_lines(current))


@app.command()
@targeted
def export(
    target: SubjectTarget,
    out: Annotated[Path, typer.Option("--out", "-o", help="file of JSON lines to write; replaced if it exists")],
    as_json: AsJson = False,
) -> None:
    """Write all episodes of it that are over, as `swarm-gateway swarm export` does; only you may read the file."""
    with target.connect() as client:
        rows = client.data_export(target.subject)
    try:
        # in place: it may be a link, or /dev/stdout
        with open(out, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            # an existing file may be readable by others
            out.chmod(0o600)
            file.write(rows)
    except OSError as exc:
        raise ConfigError(f"cannot write {out}: {exc.strerror or exc}") from exc
    count = rows.count(b"\n")
    tell(as_json, {"path": str(out), "rows": count}, f"{out}: {count} episodes")


@app.command()
@targeted
def delete(
    target: SubjectTarget,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all that was begun for it until now; through --gateway-url also what the gateway has of it."""
    with target.connect() as client:
        if not yes:
            confirm_deletion(lambda: _lines(client.data_report(target.subject)))
        done = client.data_delete(target.subject)
    tell(as_json, done.model_dump(mode="json"), *_lines(done))


def _lines(report: DataReport) -> list[str]:
    verb = "deleted" if report.deleted else "kept"
    counts = ", ".join(f"{count} {state}" for state, count in sorted(report.episodes.items()))
    lines = [f"{verb}: {counts or 'no episodes'}, of {len(report.requests)} requests"]
    lines += [f"deleted at the gateway: {count} {name.replace('_', ' ')}" for name, count in report.gateway.items()]
    lines += [f"may hold it, and is yours to delete: {name}" for name in report.exports]
    lines += [f"deleted before: {stone.episodes} episodes" for stone in report.earlier]
    lines.append(
        "episodes that keep_episodes, keep_bytes, keep_seconds or keep_routes removed are not counted, nor what "
        "learned of them"
    )
    if not report.versions:
        return [*lines, "no policy version was trained on the rest"]
    lines += [
        f"trained on it: step {version.step} of run {version.run_id}" + ("" if version.current else " (not current)")
        for version in report.versions[-_ROWS:]
    ]
    if (more := len(report.versions) - _ROWS) > 0:
        lines.append(f"and {more} before these (--json names all)")
    newest = "newest version without it, in the line of the current one:"
    if not report.clean_step:
        return [*lines, f"{newest} the model that the run began with"]
    fork = f"swarm-gateway policies fork {report.clean_step} --out FOLDER"
    return [*lines, f"{newest} step {report.clean_step}", f"to train on from it, or from one before it: {fork}"]
