"""Rows of Hugging Face datasets, streamed: nothing is downloaded as a whole.

Invariant: nothing heavy is imported before the first dataset is read, and whatever goes wrong is one error that says
what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from swarm.errors import ConfigError


@dataclass(frozen=True)
class HubName:
    """``hf:NAME[@CONFIG][:SPLIT]`` in its parts."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, source: str) -> HubName:
        """
        Raises:
            ConfigError: the name is missing.
        """
        path, _, split = source.removeprefix("hf:").partition(":")
        name, _, config = path.partition("@")
        if not name:
            raise ConfigError(f"{source!r} names no dataset; write it like hf:openai/gsm8k@main:train")
        return cls(name, config or None, split or "train")


def hub_rows(source: str) -> Iterator[tuple[str, Any]]:
    """The rows of ``hf:NAME[@CONFIG][:SPLIT]`` as (where, columns); a folder of data files is a name as well.

    Raises:
        ConfigError: the name is none, `datasets` is not installed, or (while reading) the dataset cannot be read.
    """
    return _rows(HubName.parse(source), _load_dataset(source))


def _load_dataset(source: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as exc:
        raise ConfigError(f"{source} needs the package `datasets`: pip install datasets ({exc})") from exc
    return load_dataset


def _rows(name: HubName, load_dataset: Any) -> Iterator[tuple[str, Any]]:
    where = f"dataset {name.name}"
    number = 0
    try:
        for row in load_dataset(name.name, name.config, split=name.split, streaming=True):
            number += 1
            yield f"{where}, row {number}", dict(cast("dict[str, Any]", row))
    except Exception as exc:
        # the library raises what its transports and parsers do: no common class tells its errors from others
        raise ConfigError(
            f"{where} (split {name.split}) cannot be read after row {number}: {type(exc).__name__}: "
            f"{' '.join(str(exc).split())[:300]}; check its name and that the hub can be reached, or download it and "
            "give the .jsonl or .parquet file"
        ) from exc
