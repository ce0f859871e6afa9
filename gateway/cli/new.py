"""``swarm-gateway new``: a folder to start a reward of one's own from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    name: Annotated[str, typer.Argument(help="what the agent is to become, e.g. polite_agent")],
    into: Annotated[Path, typer.Option(help="folder in which opencode_build_NAME is made")] = Path("tutorial"),
) -> None:
    """Make a folder with the two hook files, mock users, data and a configuration; all of it runs as it is."""
    from gateway.scaffold import scaffold

    made = scaffold(name, into)
    typer.echo(f"{made}: edit on_compute_relative_reward.py, then")
    typer.echo(f"  swarm-gateway hooks test {made} --data {made / 'groups.jsonl'}")
    typer.echo(f"  swarm-gateway up {made / 'config.yaml'}")
