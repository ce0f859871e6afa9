"""Resolve the ``model`` of a job to a path or hub name that transformers and vLLM load, and decode its token ids."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.models.cache import cached_path
from adapters.models.pull import CATALOG
from swarm.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str, relative_to: Path | None = None) -> str:
    """Return the absolute path of a local or cached model; the name of a hub's model stays as it is.

    Args:
        name: a name that ``models pull`` knows, a folder, or ``organisation/model`` of a hub.
        relative_to: where a relative path starts; default: the working directory.

    Raises:
        ConfigError: the model is known but not in the cache, nothing has this name, or the folder holds no model.
    """
    if name in CATALOG:
        cached = cached_path(name)
        if cached is None:
            raise ConfigError(
                f"model {name!r} is not in the cache yet; run: swarm-gateway models pull {name}", param="model"
            )
        return str(cached)
    base = relative_to or Path()
    # not Path.expanduser, which fails for a user that there is not
    path = base / os.path.expanduser(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model folder {path} has no config.json; give a folder in Hugging Face layout")
        return str(path.resolve())
    if path.exists():
        raise ConfigError(f"model {path} is a file; give a folder in Hugging Face layout", param="model")
    # where the folder models/ exists, models/tiny is a misspelt path, not an organisation's model
    if _HUB_NAME.fullmatch(name) and not (base / name.partition("/")[0]).is_dir():
        return name
    meant = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    advice = f"did you mean {meant[0]!r}? Else give" if meant else "give"
    raise ConfigError(
        f"there is no model folder {path}; {advice} an existing folder, a hub name (organisation/model) "
        f"or a name that `swarm-gateway models pull` knows ({', '.join(CATALOG)})",
        param="model",
    )


def weight_bytes(model: str) -> int:
    """Bytes of the weights of a resolved ``model`` on this machine; 0: a hub's model that was not downloaded."""
    folder = Path(model)
    if not folder.is_dir() and _HUB_NAME.fullmatch(model):
        try:
            from huggingface_hub import try_to_load_from_cache
        except ImportError:
            return 0
        config = try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            return 0
        folder = Path(config).parent
    weights = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return sum(path.stat().st_size for path in weights)


def decoder(model: str, *, local: bool = False) -> Callable[..., str]:
    """Return ``decode(ids, special=...)`` of the model's own tokenizer; ``special`` keeps special tokens.

    Args:
        model: as in a job, see :func:`resolve_model`.
        local: only if it is on this machine; nothing is downloaded.

    Raises:
        ConfigError: there is no such model, it has no tokenizer, or transformers is not installed.
    """
    path = resolve_model(model)
    try:
        from transformers import AutoTokenizer
    except ImportError as exc:
        raise ConfigError(
            "reading tokens needs transformers: run this where the engine is installed, or pip install transformers"
        ) from exc
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=local)
    except (OSError, ValueError, ImportError) as exc:
        # an ImportError names the package that this tokenizer needs
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        raise ConfigError(f"model {path} has no usable tokenizer: {lines[0]}; name another with --tokenizer") from exc

    def decode(ids: list[int], *, special: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    return decode
