"""The versions of jobs that answer routes in the place of the incumbents in the user's file: ``incumbents.yaml`` of
``up``'s folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from gateway.config.gateway import ONLY_ROUTE
from gateway.launch.run_folder import write_section
from swarm.errors import ConfigError


class Successor(BaseModel):
    """A version of the job that answers a route's users: a model folder, served under ``name`` on ``port``; without a
    port the folder of an adapter, with which the job's own engine answers."""

    model_config = ConfigDict(frozen=True)

    version: int
    name: str
    folder: Path
    port: int | None


_FILE: TypeAdapter[dict[str, Successor]] = TypeAdapter(dict[str, Successor])


def read_successors(file: Path) -> dict[str, Successor]:
    """By route, those whose folders are there; none where there is no file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        successors = _FILE.validate_python(yaml.safe_load(file.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"{file} does not say who answers: move it away, and the incumbents of your file do") from exc
    return {route: successor for route, successor in successors.items() if successor.folder.is_dir()}


def write_successors(file: Path, successors: Mapping[str, Successor]) -> None:
    """Keep these, and no others.

    Raises:
        OSError: they cannot be written; those of before are.
    """
    write_section(file, _FILE.dump_python(dict(successors), mode="json"))


def with_successors(section: dict[str, Any], successors: Mapping[str, Successor]) -> dict[str, Any]:
    """The gateway's ``section`` with the successors as incumbents, on routes that follow promotions."""

    def before(settings: dict[str, Any], route: str) -> dict[str, Any]:
        successor = successors.get(route)
        # what a route does not say is said above
        match settings.get("serve", section.get("serve")):
            case {"incumbent": {"policy": "promoted"}, **serve} if successor is not None:
                incumbent: dict[str, Any] = {"policy": successor.version}
                if successor.port is not None:
                    incumbent |= {"model": successor.name, "port": successor.port}
                return settings | {"serve": serve | {"incumbent": incumbent}}
            case _:
                return settings

    # the gateway's own check says what is wrong
    match section.get("routes"):
        case [_, *_] as routes:
            named = [before(it, str(it.get("name"))) if isinstance(it, dict) else it for it in routes]
            return section | {"routes": named}
        case _:
            return before(section, ONLY_ROUTE)
