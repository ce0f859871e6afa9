"""``swarm-gateway new`` and ``skill``: a folder with an agent to start from, and how a coding agent makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    name: Annotated[str, typer.Argument(help="name of the agent, e.g. polite_agent")],
    into: Annotated[Path, typer.Option(help="folder in which opencode_build_NAME is made")] = Path(),
) -> None:
    """Make a folder with the two hook files, mock users, data and a configuration; all of it runs as it is."""
    from shlex import quote

    from gateway.scaffold import scaffold

    made = scaffold(name, into)
    typer.echo(f"{made}: edit on_compute_relative_reward.py, then")
    folder, data, config = (quote(str(path)) for path in (made, made / "groups.jsonl", made / "config.yaml"))
    typer.echo(f"  swarm-gateway hooks test {folder} --data {data}")
    typer.echo(f"  swarm-gateway up {config}")


def skill() -> None:
    """Print the skill with which a coding agent makes such a folder from a user's wish."""
    from gateway.scaffold import skill as text

    typer.echo(text(), nl=False)
