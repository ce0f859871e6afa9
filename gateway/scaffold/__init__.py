"""``swarm-gateway new NAME``: a folder with hooks, mock users, data and a configuration that run as they are; and
``swarm-gateway skill``, which tells a coding agent how to fill it.

Invariant: what exists is never touched, and a new folder appears complete.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from swarm.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
#: Stands for the name in the template; has no meaning in Python, Markdown, YAML and JSON.
_PLACEHOLDER = "NAME_OF_THE_AGENT"
#: Ends the names of template files, so that no tool takes them for sources.
_SUFFIX = ".tmpl"


def new(
    name: Annotated[str, typer.Argument(help="name of the agent, e.g. polite_agent")],
    into: Annotated[Path, typer.Option(help="folder in which opencode_build_NAME is made")] = Path(),
) -> None:
    """Make a folder with the two hook files, mock users, data and a configuration; all of it runs as it is."""
    made = scaffold(name, into)
    typer.echo(f"{made}: edit on_compute_relative_reward.py, then")
    folder, data, config = (quote(str(path)) for path in (made, made / "groups.jsonl", made / "config.yaml"))
    typer.echo(f"  swarm-gateway hooks test {folder} --data {data}")
    typer.echo(f"  swarm-gateway up {config}")


def skill() -> None:
    """Print the skill with which a coding agent makes such a folder from a user's wish."""
    typer.echo(files("gateway.scaffold").joinpath("SKILL.md").read_text(encoding="utf-8"), nl=False)


def scaffold(name: str, parent: Path) -> Path:
    """Write ``parent/opencode_build_NAME`` and return it.

    Args:
        name: lower-case letters, digits and underscores; dashes count as underscores.
        parent: created if it does not exist.

    Raises:
        ConfigError: the name is not valid, or the folder exists already or cannot be made.
    """
    name = name.replace("-", "_")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a name for a folder of hooks; use lower-case letters, digits and underscores"
        )
    target = parent / f"opencode_build_{name}"
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it or choose another name")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as work:
            made = Path(work) / target.name
            made.mkdir()
            for source in files("gateway.scaffold").joinpath("template").iterdir():
                if source.name.endswith(_SUFFIX):
                    text = source.read_text(encoding="utf-8").replace(_PLACEHOLDER, name)
                    (made / source.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
            shutil.move(made, target)
    except OSError as exc:
        raise ConfigError(f"cannot make {target}: {exc.strerror or exc}") from exc
    return target
