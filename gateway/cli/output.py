"""What the commands share: JSON lines, files that the user named, progress bars, and the user's own modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.types import OnProgress

#: In front of a server's address, on its own line of output, once its port is bound.
LISTENING = "listening on"


def print_json(value: Any) -> None:
    """One line of JSON on stdout, at once; an infinity, for which JSON has no form, as its text."""
    plain = json.loads(json.dumps(value), parse_constant=str)
    # a terminal or log of another encoding gets escapes
    text = json.dumps(plain, ensure_ascii=(sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8"))
    # half a character, as a cut answer may end with, becomes its escape in JSON
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    sys.stdout.flush()


def tell(as_json: bool, value: Any, *lines: str) -> None:
    """The outcome of a command: ``value`` as a line of JSON, or for people ``lines``, which may be a server's words."""
    from gateway.views.format import printable

    if as_json:
        print_json(value)
    else:
        for line in lines:
            typer.echo(printable(line))


def prints_to_stderr() -> redirect_stdout[TextIO]:
    """In the block, what hooks print goes to stderr: it is no part of a report."""
    return redirect_stdout(sys.stderr)


@contextmanager
def told_as_json(as_json: bool) -> Generator[None]:
    """Tell what is wrong with a file, with ``as_json`` as a line of JSON and leave with 2; what hooks print as they
    load goes to stderr."""
    try:
        with prints_to_stderr():
            yield
    except ConfigError as exc:
        if not as_json:
            raise
        print_json({"ok": False, "error": exc.message})
        raise typer.Exit(2) from exc


def confirm_deletion(shown: Callable[[], list[str]]) -> None:
    """Show what is about to be deleted, and ask; ends the command unless it is confirmed.

    Raises:
        ConfigError: nobody can be asked.
    """
    from gateway.views.format import printable

    if not sys.stdin.isatty():
        raise ConfigError("nothing is deleted: add --yes to remove it unasked, or answer in a terminal")
    typer.echo("\n".join(map(printable, shown())), err=True)
    if not typer.confirm("Delete it for good?", err=True):
        raise typer.Exit(1)


def announce(what: str) -> Callable[[str], None]:
    """A callback that says where ``what`` listens, in the words that ``up`` waits for."""

    def tell_address(address: str) -> None:
        # a log on a full disk ends no server: one that is started again has the address that it had
        with suppress(OSError):
            print(f"{what} {LISTENING} {address}", flush=True)

    return tell_address


def import_from(folder: Path) -> None:
    """Let modules in ``folder`` be imported, as ``python -m`` lets those of the working directory."""
    path = str(folder.resolve())
    # "" stands for the working directory
    if path not in (str(Path(entry).resolve()) for entry in sys.path):
        sys.path.insert(0, path)


@contextmanager
def stage_bars(visible: bool = True) -> Generator[OnProgress]:
    """A callback that draws one bar per stage on stderr; nothing at all unless ``visible``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    live = visible and console.file.isatty()
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not live) as progress:

        def finish() -> None:
            for task in tasks.values():
                if not progress.tasks[task].finished:
                    progress.update(task, total=1, completed=1)

        def on_progress(stage: str, done: int, total: int | None, unit: str) -> None:
            if not visible:
                return
            if stage not in tasks:
                finish()
                tasks[stage] = progress.add_task(stage, total=total, amount="")
                if not live:
                    console.print(f"{stage} ...")
            progress.update(tasks[stage], completed=done, total=total, amount=amount(done, total, unit))

        yield on_progress
        finish()


def amount(done: int, total: int | None, unit: str) -> str:
    """``"12/93 MB"`` for bytes, ``"12/272 tensors"`` for counts, empty where the total is unknown."""
    if total is None:
        return ""
    if unit == "B":
        return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
    return f"{done}/{total} {unit}"
