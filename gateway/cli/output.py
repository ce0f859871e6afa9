"""What the commands share: JSON lines for scripts, and YAML files with an error that names the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from swarm.errors import ConfigError

#: In front of a server's address, on its own line of output, once its port is bound.
LISTENING = "listening on"


def print_json(value: Any) -> None:
    """One line of JSON on stdout, at once."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def announce(what: str) -> Callable[[str], None]:
    """A callback that says where ``what`` listens, in the words that ``up`` waits for."""
    return lambda address: print(f"{what} {LISTENING} {address}", flush=True)


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named.

    Raises:
        ConfigError: it is missing or no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the {what} {path}: {getattr(exc, 'strerror', None) or exc}") from exc


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The top-level mapping of a YAML file.

    Raises:
        ConfigError: missing, no YAML (with the line), or no mapping.
    """
    import yaml

    try:
        data: Any = yaml.safe_load(read_text(path, what))
    except yaml.YAMLError as exc:
        raise ConfigError(f"the {what} {path} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"the {what} {path} must be a mapping, got {type(data).__name__}")
    return cast("dict[str, Any]", data)
