"""``swarm-gateway serve``: the gateway alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; flags win over it")] = None,
    hooks: Annotated[str | None, typer.Option(help="folder with the hook files, or module:attribute")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on, 0: any free one")] = None,
    swarm_url: Annotated[str | None, typer.Option(help="address of the swarm server")] = None,
    num_repeat: Annotated[int | None, typer.Option(help="episodes per request; default: the job's")] = None,
    control: Annotated[
        Literal["none", "shuffle"] | None, typer.Option(help="shuffle: a control run that must not learn")
    ] = None,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Serve applications: /v1/chat/completions, answered by the swarm, every request an occasion to learn."""
    import yaml

    from gateway.cli.imports import import_from
    from gateway.cli.logs import log_to_stderr
    from gateway.cli.output import announce, read_mapping
    from gateway.cli.parent import stop_with_parent
    from gateway.config import parse_config
    from swarm.importer import load_attribute

    settings = read_mapping(config, "gateway config") if config else {}
    flags = {
        "hooks": str(Path(hooks).resolve()) if hooks and Path(hooks).is_dir() else hooks,
        "host": host,
        "port": port,
        "swarm_url": swarm_url,
        "num_repeat": num_repeat,
        "control": control,
    }
    settings |= {name: value for name, value in flags.items() if value is not None}
    parsed = parse_config(
        yaml.safe_dump(settings), where=str(config or "flags"), folder=config.parent if config else None
    )
    if config:
        import_from(config.parent)
    if stop_on_eof:
        stop_with_parent()
    log_to_stderr()
    load_attribute("gateway.serve:serve")(parsed, on_bound=announce("gateway"))
