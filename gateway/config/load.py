"""Read a gateway's configuration from YAML.

Invariant: every mistake is one line that names the key; a route inherits the settings of the top level that it does not
set itself.
"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from gateway.config.gateway import GatewayConfig
from gateway.config.route import RouteSettings
from swarm.errors import ConfigError
from swarm.job import describe_validation, parse_mapping


def parse_config(text: str, where: str = "gateway config", folder: Path | None = None) -> GatewayConfig:
    """:func:`read_config` of YAML text."""
    return read_config(parse_mapping(text, where), where, folder)


def read_config(settings: dict[str, Any], where: str = "gateway config", folder: Path | None = None) -> GatewayConfig:
    """Validate the settings of a gateway.

    Args:
        settings: fields of ``GatewayConfig``; ``swarm_token`` defaults to the environment's ``SWARM_TOKEN``.
        where: name of the settings in errors.
        folder: relative paths (hooks, keys, certificates) start here; default: the working directory.

    Raises:
        ConfigError: a misspelt key or a value out of range; names each.
    """
    data = deepcopy(settings)
    if "SWARM_TOKEN" in os.environ:
        data.setdefault("swarm_token", os.environ["SWARM_TOKEN"])
    _inherit(data)
    if folder is not None:
        for route in (data, *_routes(data)):
            _resolve_hooks(route, folder)
        _resolve_files(data, folder)
    try:
        return GatewayConfig.model_validate(data)
    except ValidationError as exc:
        raise describe_validation(exc, where, GatewayConfig) from exc


def load_config(path: Path) -> GatewayConfig:
    """Read a ``GatewayConfig`` from the YAML file at ``path``; relative paths in it start from its folder.

    Raises:
        ConfigError: the file is missing or unreadable, no mapping, or see :func:`read_config`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the gateway config {path}: {exc}") from exc
    return parse_config(text, where=str(path), folder=path.parent)


def _routes(data: dict[str, Any]) -> list[dict[str, Any]]:
    routes = data.get("routes")
    return [route for route in cast("list[Any]", routes) if isinstance(route, dict)] if isinstance(routes, list) else []


def _inherit(data: dict[str, Any]) -> None:
    """Give each route the settings of the top level that it does not set itself."""
    common = {name: data[name] for name in RouteSettings.model_fields if name in data}
    for route in _routes(data):
        for name, value in common.items():
            route.setdefault(name, value)


def _resolve_files(data: dict[str, Any], folder: Path) -> None:
    if isinstance(data.get("keys_file"), str):
        data["keys_file"] = str((folder / data["keys_file"]).resolve())
    for section, names in (("tls", ("certificate", "key")), ("request_log", ("path",))):
        if isinstance(data.get(section), dict):
            files = cast("dict[str, Any]", data[section])
            files |= {name: str((folder / files[name]).resolve()) for name in names if isinstance(files.get(name), str)}


def _resolve_hooks(settings: dict[str, Any], folder: Path) -> None:
    hooks = settings.get("hooks")
    if isinstance(hooks, str) and (folder / hooks).exists():
        settings["hooks"] = str((folder / hooks).resolve())
