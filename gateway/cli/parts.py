"""The part of a file that a command reads: one section of a file for ``up`` or ``train``, all of any other file.

Invariant: an error message names the file and the section.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from swarm.errors import ConfigError
from swarm.importer import load_attribute
from swarm.validation import path_in, read_mapping

Section = Literal["job", "swarm", "gateway"]
#: Sections of a file for ``up`` or ``train``; no other file has a key of these names.
_SECTIONS = ("job", "jobs", "swarm", "gateway")


@dataclass(frozen=True)
class FilePart:
    """What a command reads of a file.

    Attributes:
        settings: of the section, or of the file; a gateway before several jobs has a route for each.
        where: names it in errors.
        section: empty where all of the file is meant.
        file: everything in it.
    """

    settings: dict[str, Any]
    where: str
    section: str
    file: dict[str, Any]


def is_sectioned(data: dict[str, Any]) -> bool:
    """Whether ``data`` is of a file for ``up`` or ``train``."""
    return any(isinstance(data.get(name), dict) for name in _SECTIONS)


def part_of(path: Path, section: Section) -> FilePart:
    """The ``section`` of a file for ``up`` or ``train``, or all of another file.

    Raises:
        ConfigError: the file cannot be read, the section is no mapping, or the file is for ``up`` or ``train`` and has
            no such section, or several.
    """
    data = read_mapping(path, {"job": "job", "swarm": "swarm config", "gateway": "gateway config"}[section])
    if not is_sectioned(data):
        return FilePart(data, str(path), "", data)
    if section != "gateway" and "jobs" in data:
        names = ", ".join(map(str, mapping_in(path, data, "jobs")))
        raise ConfigError(
            f"{path} has the jobs {names}, and one is wanted here: write its {section} in a file of its own"
        )
    command = "train" if "workflow" in data else "up"
    if section not in data and section != "swarm":
        raise ConfigError(f"{path} is a file for `{command}` and has no section {section}, which is wanted here")
    settings = mapping_in(path, data, section)
    if section == "gateway" and "jobs" in data:
        jobs, routes = map(str, mapping_in(path, data, "jobs")), settings.get("routes") or []
        # the gateway's own check refuses routes that are none
        with suppress(TypeError, KeyError):
            named = {route["name"] for route in routes}
            settings["routes"] = [*routes, *({"name": name} for name in jobs if name not in named)]
    return FilePart(settings, f"{path}, {section}", section, data)


def mapping_in(path: Path, data: dict[str, Any], name: str) -> dict[str, Any]:
    """The section ``name`` of ``data``; empty where there is none.

    Raises:
        ConfigError: it is no mapping.
    """
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} must be a mapping, got {type(section).__name__}")
    return dict(cast("dict[str, Any]", section))


def jobs_in(path: Path, data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections ``job`` and ``swarm`` of each job, by its name; one that is alone has none. Of several jobs, ports
    count from the usual one, and run folders are ``runs/NAME``.

    Raises:
        ConfigError: a part is no mapping.
    """
    if "jobs" not in data:
        return {"": {name: mapping_in(path, data, name) for name in ("job", "swarm")}}
    first: int = load_attribute("swarm.server.config:DEFAULT_PORT")
    jobs: dict[str, dict[str, Any]] = {}
    for index, (name, part) in enumerate(mapping_in(path, data, "jobs").items()):
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: jobs has names, each with job and swarm: {name!r}")
        sections = cast("dict[str, Any]", part)
        swarm = {"port": first + index, "run_dir": f"runs/{name}"} | mapping_in(path, sections, "swarm")
        jobs[str(name)] = {**sections, "job": mapping_in(path, sections, "job"), "swarm": swarm}
    return jobs


def run_dirs(path: Path) -> list[Path]:
    """The run folders of a file for ``up`` or ``train``; none of another file.

    Raises:
        ConfigError: it cannot be read, or a section is no mapping.
    """
    data = read_mapping(path, "config")
    if not is_sectioned(data):
        return []
    sections = (sections["swarm"] for sections in jobs_in(path, data).values())
    return [path_in(path.parent, str(swarm.get("run_dir") or "runs/default")).resolve() for swarm in sections]
