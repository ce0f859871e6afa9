"""AgentJet's task readers, and their settings: datasets of Hugging Face, Parquet, JSON Lines, and dummies.

Invariant: a row is the same task, with the same id, in each epoch. Other kinds of readers are refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from swarm.agentjet.schema import Task
from swarm.data import read_dataset, read_rows, shuffled
from swarm.errors import ConfigError

_DUMMIES = 1000


@dataclass
class HuggingfaceDatRepo:
    """A ``.parquet`` file, or a folder or the name of a dataset of Hugging Face (``dataset_name``: a configuration)."""

    dataset_path: str = "gsm8k"
    dataset_name: str | None = None
    training_split: str = "train"
    validation_split: str = "validation"


@dataclass
class JsonlTrainingFp:
    """A ``.jsonl`` file."""

    file_path: str = ""


@dataclass
class JsonlDatasetFile:
    """Two ``.jsonl`` files."""

    training: JsonlTrainingFp = field(default_factory=JsonlTrainingFp)
    validation: JsonlTrainingFp = field(default_factory=JsonlTrainingFp)


@dataclass
class AjetTaskReader:
    """The settings of every reader; each uses its own."""

    type: str = "huggingface_dat_repo"
    huggingface_dat_repo: HuggingfaceDatRepo = field(default_factory=HuggingfaceDatRepo)
    jsonl_dataset_file: JsonlDatasetFile = field(default_factory=JsonlDatasetFile)


class _TaskReader:
    """A reader's methods; the order of each pass is drawn anew."""

    def __init__(self, reader_config: AjetTaskReader) -> None:
        self.reader_config = reader_config

    def read(self, *, training: bool) -> Iterator[Task]:
        """The tasks in the order of their source."""
        raise NotImplementedError

    def generate_training_tasks(self) -> Iterator[Task]:
        """The training tasks, one by one."""
        return shuffled(self.read(training=True), random.random())

    def generate_validation_tasks(self) -> Iterator[Task]:
        """The validation tasks, one by one."""
        return shuffled(self.read(training=False), random.random())

    def get_training_tasks(self) -> list[Task]:
        """All training tasks."""
        return list(self.generate_training_tasks())

    def get_validation_tasks(self) -> list[Task]:
        """All validation tasks."""
        return list(self.generate_validation_tasks())


class HuggingFaceTaskReader(_TaskReader):
    """Tasks of a dataset: ``main_query`` is the column ``question``, ``metadata`` the whole row."""

    def read(self, *, training: bool) -> Iterator[Task]:
        settings = self.reader_config.huggingface_dat_repo
        split = settings.training_split if training else settings.validation_split
        if settings.dataset_path.endswith(".parquet"):
            rows = read_rows(Path(settings.dataset_path))
        else:
            rows = read_dataset(settings.dataset_path, settings.dataset_name, split)
        for number, (where, row) in enumerate(rows):
            columns = {**_mapping(row, where), "original_idx": number}
            yield Task(
                main_query=str(columns.get("question", "Empty")),
                task_id=str(number),
                env_type="no_env",
                metadata=columns,
            )


class JsonlTaskReader(_TaskReader):
    """Tasks of JSON Lines with the fields of :class:`Task`; without ``metadata`` the whole line is that."""

    def read(self, *, training: bool) -> Iterator[Task]:
        settings = self.reader_config.jsonl_dataset_file
        path = Path((settings.training if training else settings.validation).file_path)
        for number, (where, row) in enumerate(read_rows(path)):
            line = _mapping(row, where)
            # other tools write a null where there is nothing
            columns = {name: value for name, value in line.items() if value is not None}
            yield Task(
                main_query=columns.get("main_query", "[not defined]"),
                init_messages=columns.get("init_messages", []),
                task_id=str(columns.get("task_id", f"task_{number}")),
                env_type=columns.get("env_type", "no_env"),
                metadata=columns.get("metadata", line),
            )


class RandomDummyTaskReader(_TaskReader):
    """Numbered tasks without content."""

    def read(self, *, training: bool) -> Iterator[Task]:
        for number in range(_DUMMIES):
            yield Task(
                main_query=f"[dummy task @ {number}]",
                task_id=str(number),
                env_type="no_env",
                metadata={"random_number": number},
            )


_READERS: dict[str, type[_TaskReader]] = {
    "huggingface_dat_repo": HuggingFaceTaskReader,
    "jsonl_dataset_file": JsonlTaskReader,
    "random_dummy": RandomDummyTaskReader,
}


class RouterTaskReader(_TaskReader):
    """The reader of a kind.

    Raises:
        ConfigError: the kind is not here.
    """

    def __init__(self, reader_type: str, reader_config: AjetTaskReader) -> None:
        super().__init__(reader_config)
        if reader_type not in _READERS:
            kinds = ", ".join(_READERS)
            raise ConfigError(f"there is no task reader {reader_type!r}: there are {kinds}, or write one of your own")
        self.task_reader = _READERS[reader_type](reader_config)

    def read(self, *, training: bool) -> Iterator[Task]:
        return self.task_reader.read(training=training)


def _mapping(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
    return cast("dict[str, Any]", row)
