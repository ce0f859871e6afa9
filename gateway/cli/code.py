"""``swarm-gateway code``: send code from this checkout to the engine, compare it, and go back."""

from __future__ import annotations

import io
import stat
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.output import print_json, tell
from gateway.cli.target import AsJson, ForceRestart, ServerTarget, Wait, targeted, wait_for_engine
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.client import SwarmClient
    from swarm.code_snapshots import CodeArchive
    from swarm.control_protocol import CodeSnapshot, CodeStatus, SyncTrainCodeResponse

app = typer.Typer(
    help="The code that the engine runs: sync it from a checkout, compare, go back.", no_args_is_help=True
)

_BOOT_SECONDS = 1800.0
#: name by which the server's own code is selected
NONE, OWN = "none", "the server's own code"
#: name -> content, and whether it is executable
Files = dict[str, tuple[bytes, bool]]

Folder = Annotated[Path, typer.Argument(help="folder that holds the packages, in a git checkout")]
FolderOption = Annotated[Path, typer.Option("--dir", help="folder that holds the packages, in a git checkout")]
Packages = Annotated[str | None, typer.Option(help="packages and modules at its top, such as a,b; default: all")]


@app.command()
@targeted
def sync(
    target: ServerTarget,
    folder: Folder = Path(),
    packages: Packages = None,
    force_restart: ForceRestart = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be sent, and send nothing")] = False,
    message: Annotated[str, typer.Option("--message", "-m", help="what is new, for `code list`")] = "",
    wait: Wait = _BOOT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Send the files that git tracks, as they are in the work tree; the next engine imports them first.

    The engine must be OFFLINE, unless --force-restart stops it and starts it again with the same job. The same code
    again changes nothing. Dependencies are not sent.
    """
    code = _packed(folder, packages)
    if not as_json:
        _say_what(code)
    if dry_run:
        tell(as_json, {"dry_run": True, **_contents(code)}, *(f"  {name}" for name in sorted(code.manifest)))
        return
    with target.connect() as client:
        server_code = client.code()
        selected = _selected(server_code)
        if selected is not None and selected.digest == code.digest and server_code.enabled and not force_restart:
            # the server would say the same, for the price of the upload
            line = f"{selected.id} is this code already: nothing was changed"
            same = {**_contents(code), "snapshot": selected.model_dump(mode="json"), "message": line, "changed": False}
            tell(as_json, same | {"restarted": False, "not_installed": {}, "engine": None}, line)
            return
        done = client.sync_train_code(
            code.content, revision=code.revision, message=message, force_restart=force_restart
        )
        _tell(client, done, wait, as_json, _contents(code))


@app.command("list")
@targeted
def list_code(target: ServerTarget, as_json: AsJson = False) -> None:
    """The snapshots that the server has, oldest first."""
    with target.connect() as client:
        server_code = client.code()
    lines = [_line(snapshot, server_code) for snapshot in server_code.snapshots]
    tell(
        as_json,
        server_code.model_dump(mode="json"),
        *(lines or ["no code was synced to this server: engines run its own"]),
    )


@app.command()
@targeted
def status(
    target: ServerTarget,
    folder: Folder = Path(),
    packages: Packages = None,
    as_json: AsJson = False,
) -> None:
    """What the engine runs, what the next one will, and whether this checkout is that."""
    with target.connect() as client:
        server_code = client.code()
    selected = _selected(server_code)
    try:
        code = _packed(folder, packages)
        same = selected is not None and selected.digest == code.digest
        here = f"{folder.resolve()} {'is' if same else 'differs from'} what is selected ({code.digest[:16]})"
    except ConfigError as exc:
        same, here = None, exc.message
    tell(
        as_json,
        {**server_code.model_dump(mode="json", exclude={"snapshots"}), "same_as_folder": same},
        f"code sync  {'on' if server_code.enabled else 'off: the server takes no code (allow_code_sync)'}",
        f"selected   {_line(selected, server_code) if selected else OWN}",
        f"running    {server_code.running or 'no synced code'}",
        f"here       {here}",
    )


@app.command()
@targeted
def diff(
    target: ServerTarget,
    old: Annotated[str | None, typer.Argument(help="a snapshot; default: the selected one")] = None,
    new: Annotated[str | None, typer.Argument(help="another one; default: the folder")] = None,
    folder: FolderOption = Path(),
    packages: Packages = None,
    as_json: AsJson = False,
) -> None:
    """What changed from a snapshot to this folder, or to another snapshot; exit code 1 if anything did."""
    with target.connect() as client:
        server_code = client.code()
        first = old or server_code.selected
        if first is None:
            raise ConfigError("no synced code is selected: engines run the server's own")
        before = _files(client.code_archive(_named(server_code, first)))
        after = _files(client.code_archive(_named(server_code, new)) if new else _packed(folder, packages).content)
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    changes = {name: "added" if name not in before else "changed" if name in after else "removed" for name in names}
    lines = [line for name, change in changes.items() for line in _lines(before, after, name, change)]
    if as_json:
        print_json({"from": first, "to": new or str(folder.resolve()), "changed": changes})
    elif lines:
        # as they are, for a patch
        typer.echo("\n".join(lines))
    raise typer.Exit(1 if changes else 0)


@app.command()
@targeted
def rollback(
    target: ServerTarget,
    snapshot: Annotated[
        str | None, typer.Argument(metavar="[ID]", help=f"{NONE}: the server's own code; default: the one before")
    ] = None,
    force_restart: ForceRestart = False,
    wait: Wait = _BOOT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Select an earlier snapshot again; before the oldest one there is the server's own code."""
    with target.connect() as client:
        if snapshot not in (None, NONE):
            snapshot = _named(client.code(), str(snapshot))
        done = client.select_code(snapshot, force_restart=force_restart)
        _tell(client, done, wait, as_json, {})


def _packed(folder: Path, packages: str | None) -> CodeArchive:
    import logging

    from swarm.code_snapshots import build_archive

    # what is left out is printed here
    logging.getLogger("swarm.code_snapshots").setLevel(logging.ERROR)
    names = [name.strip() for name in (packages or "").split(",") if name.strip()]
    return build_archive(folder, packages=names)


def _contents(code: CodeArchive) -> dict[str, Any]:
    return {
        "digest": code.digest,
        "revision": code.revision,
        "files": sorted(code.manifest),
        "left_out": code.left_out,
        "archive_bytes": len(code.content),
    }


def _say_what(code: CodeArchive) -> None:
    from swarm.code_snapshots import left_out_lines

    at = f" at {_short(code.revision)}" if code.revision else ""
    typer.echo(f"{len(code.manifest)} files{at}, {len(code.content) / 1e6:.2f} MB packed, {code.digest[:16]}")
    for reason, names in left_out_lines(code.left_out).items():
        typer.echo(f"left out, because {reason}: {names}", err=True)


def _selected(server_code: CodeStatus) -> CodeSnapshot | None:
    return next((snapshot for snapshot in server_code.snapshots if snapshot.id == server_code.selected), None)


def _named(server_code: CodeStatus, name: str) -> str:
    """The snapshot whose id, or the beginning of whose digest, is ``name``."""
    ids = [snapshot.id for snapshot in server_code.snapshots if name == snapshot.id or snapshot.digest.startswith(name)]
    if not ids:
        raise ConfigError(f"the server has no snapshot {name!r}; `swarm-gateway code list` shows those that it has")
    return ids[-1]


def _tell(
    client: SwarmClient, done: SyncTrainCodeResponse, wait: float, as_json: bool, contents: dict[str, Any]
) -> None:
    """What was done, what is missing, and at last what became of an engine that was restarted."""
    if as_json:
        engine = wait_for_engine(client, wait) if done.restarted else None
        print_json({**contents, **done.model_dump(mode="json", exclude={"success", "error"}), "engine": engine})
        return
    typer.echo(f"{done.snapshot.id if done.snapshot else OWN}: {done.message}")
    for module, files in done.not_installed.items():
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        where = f"{', '.join(files[:3])}{more}"
        typer.echo(f"{module} is not installed on the server, and {where} imports it: install it there", err=True)
    if done.restarted:
        typer.echo(wait_for_engine(client, wait))


def _line(snapshot: CodeSnapshot, server_code: CodeStatus) -> str:
    marks = [
        mark for mark, id in (("selected", server_code.selected), ("running", server_code.running)) if id == snapshot.id
    ]
    parts = [
        snapshot.id,
        f"{datetime.fromtimestamp(snapshot.created, UTC):%Y-%m-%d %H:%M} UTC",
        f"{snapshot.files} files",
        _short(snapshot.revision) or "no revision",
        snapshot.sender,
        snapshot.message,
        ", ".join(marks),
    ]
    return "  ".join(part for part in parts if part)


def _short(revision: str) -> str:
    return revision[:12] + ("+changes" if revision.endswith("+changes") else "")


def _files(archive: bytes) -> Files:
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        return {
            entry.filename: (reader.read(entry), bool((entry.external_attr >> 16) & stat.S_IXUSR))
            for entry in reader.infolist()
            if not entry.is_dir()
        }


def _lines(before: Files, after: Files, name: str, change: str) -> list[str]:
    from difflib import unified_diff

    (old, _), (new, executable) = (files.get(name, (b"", False)) for files in (before, after))
    try:
        texts = [content.decode().splitlines() for content in (old, new)]
    except UnicodeDecodeError:
        return [f"{name}: binary files differ"]
    lines = list(unified_diff(texts[0], texts[1], f"a/{name}", f"b/{name}", lineterm=""))
    if change != "changed":
        return lines or [f"{name}: {change}, empty"]
    mode = "executable now" if executable else "not executable now"
    return lines or [f"{name}: {mode if old == new else 'the ends of its lines differ'}"]
