"""Read tasks from JSON Lines, Parquet, Hugging Face datasets and Python functions, one at a time.

Invariant: every row becomes a task with a non-empty id, or an error that names file and line; equal rows get equal ids,
on every machine and in every format. No source is ever held in memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from swarm.errors import ConfigError
from swarm.importer import load_attribute
from swarm.types import Task
from swarm.validation import describe_validation, path_in

#: Columns that may hold the prompt, in order of preference: a string, or a list of chat messages.
QUERY_COLUMNS = ("messages", "init_messages", "prompt", "main_query", "question", "query")
ID_COLUMNS = ("task_id", "id")

#: Begins the name of a Hugging Face dataset.
HUB_PREFIX = "hf:"
_BATCH_ROWS = 256
#: ``module:attribute`` of something that gives tasks.
_ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
#: Tasks among which :func:`shuffled` draws.
SHUFFLE_TASKS = 1000

T = TypeVar("T")


def read_tasks(source: str | Path) -> Iterator[Task]:
    """The tasks in a ``.jsonl`` or ``.parquet`` file, in a dataset ``hf:NAME[:split]`` of Hugging Face (its first
    configuration, ``NAME@CONFIG`` for another; the default split is ``train``), or of ``module:attribute``, lazily.

    The prompt is in one of :data:`QUERY_COLUMNS`, the id in ``task_id`` or ``id`` (default: a hash of the row), and
    ``env_type`` and ``metadata`` are optional; every other column goes into the task's metadata. An attribute is a
    function without arguments, such as a generator, or an iterable; it gives such rows, or tasks.

    Raises:
        ConfigError: the file does not exist, its kind is unknown, or (while reading) `datasets` or pyarrow is not
            installed, the source cannot be read or a row is wrong.
    """
    of_attribute = isinstance(source, str) and _is_attribute(source) and not Path(source).exists()
    rows = _attribute_rows(str(source)) if of_attribute else read_rows(source)
    return (row if isinstance(row, Task) else task_of(row, where) for where, row in rows)


def read_rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file or of a dataset of Hugging Face, as :func:`read_tasks` takes them, each with where it is.

    Raises:
        ConfigError: like :func:`read_tasks`.
    """
    if isinstance(source, str) and source.startswith(HUB_PREFIX):
        dataset, _, split = source.removeprefix(HUB_PREFIX).partition(":")
        name, _, config = dataset.partition("@")
        if not name:
            raise ConfigError(f"{source!r} names no dataset; write it like hf:openai/gsm8k@main:train")
        return read_dataset(name, config or None, split or "train")
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    rows = {".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".parquet": _parquet_rows}.get(path.suffix.lower())
    if rows is None:
        raise ConfigError(
            f"{path}: tasks are read from .jsonl or .parquet files, hf:NAME or module:function, not "
            f"{path.suffix or 'this'}"
        )
    return rows(path)


def located(source: str, folder: Path) -> str | Path:
    """``source`` as :func:`read_tasks` takes it; a relative path to a file starts from ``folder``."""
    if source.startswith(HUB_PREFIX) or _is_attribute(source):
        return source
    return path_in(folder, source).resolve()


def _is_attribute(source: str) -> bool:
    return not source.startswith(HUB_PREFIX) and _ATTRIBUTE.fullmatch(source) is not None


def shuffled(items: Iterable[T], seed: object, among: int = SHUFFLE_TASKS) -> Iterator[T]:
    """``items`` in an order that ``seed`` decides: each is drawn from the next ``among`` that are left, so no more are
    held at a time; a shorter stream is shuffled whole."""
    draw = random.Random(str(seed))
    held: list[T] = []
    for item in items:
        if len(held) < among:
            held.append(item)
            continue
        slot = draw.randrange(among)
        held[slot], item = item, held[slot]
        yield item
    draw.shuffle(held)
    yield from held


def epochs_of(source: str | Path, seed: int, epochs: int | None = None) -> Iterator[Task]:
    """The tasks of ``source``, each epoch :func:`shuffled` anew; without end where ``epochs`` is ``None``.

    Raises:
        ConfigError: like :func:`read_tasks`, or there is no task, or none left after the first epoch.
    """
    epoch = 0
    while epochs is None or epoch < epochs:
        empty = True
        for task in shuffled(read_tasks(source), f"{seed}/{epoch}"):
            empty = False
            yield task
        if empty:
            more = ": it can be read only once; give a function" if epoch else ""
            raise ConfigError(f"{source} holds no task{more}")
        epoch += 1


def _attribute_rows(source: str) -> Iterator[tuple[str, Any]]:
    target = load_attribute(source)
    value = target() if callable(target) else target
    if not isinstance(value, Iterable):
        raise ConfigError(f"{source} gives a {type(value).__name__}: it must be, or return, tasks or rows one by one")
    return ((f"{source}, row {number}", row) for number, row in enumerate(cast("Iterable[Any]", value), 1))


def task_of(row: object, where: str) -> Task:
    """The task that one row describes; ``where`` names the row in errors.

    Raises:
        ConfigError: the row is no mapping, has no prompt, or a column has the wrong type.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
    columns: dict[str, Any] = _plain(cast("dict[Any, Any]", row))
    digest = task_digest(columns, where)
    messages: list[Any] = []
    query = ""
    used: set[str] = set()
    for column in QUERY_COLUMNS:
        value = columns.get(column)
        if isinstance(value, str) and value.strip() and not query:
            query = value
            used.add(column)
        elif isinstance(value, list) and value and not messages:
            messages = cast("list[Any]", value)
            used.add(column)
    if not query and not messages:
        raise ConfigError(f"{where}: there is no prompt; fill one of the columns {', '.join(QUERY_COLUMNS)}")
    id_column = next((column for column in ID_COLUMNS if str(columns.get(column, "")).strip()), None)
    used_columns = {*used, "env_type", "metadata", *([id_column] if id_column else [])}
    metadata = columns.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ConfigError(f"{where}: metadata must be an object, got {type(metadata).__name__}")
    rest = {column: value for column, value in columns.items() if column not in used_columns}
    try:
        return Task(
            task_id=str(columns[id_column]).strip() if id_column else digest,
            main_query=query or _last_user_text(messages),
            init_messages=messages,
            env_type=columns.get("env_type", ""),
            metadata={**rest, **cast("dict[str, Any]", metadata)},
        )
    except ValidationError as exc:
        raise describe_validation(exc, where) from exc


def _plain(value: Any) -> Any:
    """``value`` in JSON's types, without nulls: Parquet has every column, and every field, in every row."""
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {str(key): _plain(member) for key, member in fields.items() if member is not None}
    if isinstance(value, list):
        return [_plain(member) for member in cast("list[Any]", value)]
    if isinstance(value, date | time):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value


def task_digest(columns: Mapping[str, Any], where: str) -> str:
    """The id of a task without one: equal ``columns`` give equal ids on every machine; ``where`` names them in errors.

    Raises:
        ConfigError: a value cannot be JSON.
    """
    try:
        canonical = json.dumps(columns, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{where}: a value cannot be JSON: {exc}") from exc
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _last_user_text(messages: list[Any]) -> str:
    for message in reversed(messages):
        if isinstance(message, dict):
            fields = cast("dict[str, Any]", message)
            if fields.get("role") == "user" and isinstance(fields.get("content"), str):
                return fields["content"]
    return ""


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as exc:
                raise ConfigError(f"{where} is not valid JSON: {exc}") from exc
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise ConfigError("parquet files need pyarrow: pip install '.[parquet]' in a clone") from exc

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowException as exc:
        raise ConfigError(f"{path} is not a readable Parquet file (after row {number}): {exc}") from exc


def read_dataset(name: str, config: str | None, split: str) -> Iterator[tuple[str, Any]]:
    """The rows of a dataset of Hugging Face, or of a folder with its files, like :func:`read_rows`.

    Raises:
        ConfigError: while reading: `datasets` is not installed, or the dataset cannot be read.
    """
    try:
        load: Callable[..., Any] = import_module("datasets").load_dataset
    except ImportError as exc:
        raise ConfigError(
            f"the dataset {name} needs the package `datasets`: pip install '.[train]' in a clone ({exc})"
        ) from exc
    number = 0
    try:
        for row in load(name, config, split=split, streaming=True):
            number += 1
            yield f"dataset {name}, row {number}", dict(row)
    except Exception as exc:
        # the library raises the errors of its transports and parsers, which have no common class
        raise ConfigError(
            f"dataset {name} (split {split}) cannot be read after row {number}: {type(exc).__name__}: "
            f"{' '.join(str(exc).split())[:300]}; check its name and that the hub can be reached, or download it and "
            "give the .jsonl or .parquet file"
        ) from exc
