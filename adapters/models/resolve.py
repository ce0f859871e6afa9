"""From the ``model`` of a job to what transformers and vLLM can load; a mistake is named before anything boots."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from adapters.models.cache import cached_path
from adapters.models.catalog import CATALOG
from swarm.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str, relative_to: Path | None = None) -> str:
    """The absolute path of a local or cached model, or ``name`` unchanged where it is the name of a hub's model.

    Args:
        name: a name that ``models pull`` knows, a folder, or ``organisation/model`` of a hub.
        relative_to: the folder that a relative path starts from; default the working directory.

    Raises:
        ConfigError: a known model that is not in the cache, a name that nothing has, a folder that holds no model.
    """
    if name in CATALOG:
        cached = cached_path(name)
        if cached is None:
            raise ConfigError(
                f"model {name!r} is not in the cache yet; run: swarm-gateway models pull {name}", param="model"
            )
        return str(cached)
    base = relative_to or Path()
    path = base / Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model folder {path} has no config.json; give a folder in Hugging Face layout")
        return str(path.resolve())
    if path.exists():
        raise ConfigError(f"model {path} is a file; give a folder in Hugging Face layout", param="model")
    # with a folder of its first part, models/tiny is a path with a slip and no organisation's model
    if _HUB_NAME.fullmatch(name) and not (base / name.partition("/")[0]).is_dir():
        return name
    meant = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    advice = f"did you mean {meant[0]!r}? Else give" if meant else "give"
    raise ConfigError(
        f"there is no model folder {path}; {advice} an existing folder, a hub name (organisation/model) "
        f"or a name that `swarm-gateway models pull` knows ({', '.join(CATALOG)})",
        param="model",
    )
