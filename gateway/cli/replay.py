"""``swarm-gateway replay``: placeholder until the package is there."""

import typer


def replay(data: str = typer.Option(...)) -> None:
    """Replay."""
