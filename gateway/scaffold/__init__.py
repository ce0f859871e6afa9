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

from swarm.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
#: Stands for the name in the template; has no meaning in Python, Markdown, YAML and JSON.
_PLACEHOLDER = "NAME_OF_THE_AGENT"
#: Ends the names of template files, so that no tool takes them for sources.
_SUFFIX = ".tmpl"


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


def skill() -> str:
    """The skill ``build-agent`` for coding agents, in Markdown."""
    return files("gateway.scaffold").joinpath("SKILL.md").read_text(encoding="utf-8")
