"""The episodes of a journal as a file of rows, or their groups as lines that ``swarm-gateway hooks test --data`` reads:
what was asked, and the N answers.

Invariant: the file appears under its name when it is whole, and only its owner reads it. An answer of a group is the
very tokens that were sampled, decoded; a group with an episode that is no single answer, or whose tokens are gone, is
left out and counted.

Decoding cannot bring back what vLLM took out of an answer: stop strings of the caller's own are in its text, and so are
tool calls and reasoning, where a parser made them into fields.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from swarm.errors import ConfigError
from swarm.server.journal.episode_rows import ROW_FIELDS, Row, episode_rows, finite
from swarm.server.journal.erasure import note_export
from swarm.server.journal.schema import reading
from swarm.server.journal.sqlite import TIMELINE_FIELDS, clean, notes_of
from swarm.states import EpisodeState
from swarm.tokens import TokenCounts
from swarm.types import Model, OnProgress

ExportState = Literal["trained", "waiting", "dropped", "all"]

#: The condition of each choice: an episode in the batch that is out waits too, and one that its client gave up for a
#: reason counts as dropped.
_STATES: dict[ExportState, str] = {
    "trained": f"e.state = '{EpisodeState.TRAINED}'",
    "waiting": f"e.state IN ('{EpisodeState.FINISHED}', '{EpisodeState.BATCHED}')",
    "dropped": f"(e.state = '{EpisodeState.DROPPED}' OR e.how = 'aborted' AND e.drop_reason != '')",
    "all": f"e.state != '{EpisodeState.CLAIMED}'",
}
#: of their token data, that make one piece of the file
_PIECE_BYTES = 4 * 1024 * 1024


class Decode(Protocol):
    """A tokenizer's way back to text; ``special`` tokens are kept or left out."""

    def __call__(self, ids: list[int], *, special: bool) -> str: ...


class ExportReport(Model):
    """What was written: ``rows`` episodes with ``timelines`` and ``tokens`` sampled or in between, ``bytes`` in all.

    Of an export of groups, ``groups`` are in the file and ``left_out`` are not.
    """

    path: Path
    rows: int
    timelines: int
    tokens: int
    bytes: int
    groups: int | None = None
    left_out: int | None = None


def export(
    journal: Path,
    out: Path,
    state: ExportState = "trained",
    run_id: str | None = None,
    progress: OnProgress | None = None,
    decode: Decode | None = None,
) -> ExportReport:
    """Write one row per episode in ``state``, with its timelines nested, oldest claim first.

    Why it was rewarded so is in ``components``, ``reason``, ``rank`` (1 for the best of its group) and ``hook``, as far
    as its client said (see :mod:`gateway.rollout.submission`); its request, in ``request_id`` and ``trace_id``
    (its ``step`` is then that trace's); why it was not trained, in ``drop_reason``; what became of its tokens, in
    ``tokens`` (:class:`swarm.tokens.TokenCounts`).

    Args:
        journal: the ``journal.db`` of a run folder, whether its server runs or not.
        out: ends in ``.parquet`` or ``.jsonl``; replaced if it exists.
        run_id: only episodes that this run claimed; default: of all runs.
        decode: write not episodes but their groups, in words, as JSON lines for ``swarm-gateway hooks test``.

    Raises:
        ConfigError: no journal, an unknown run, another ending, or a folder that cannot be written.
        UnavailableError: the run folder, which notes what is exported, cannot be written.
    """
    opener = _SINKS.get(out.suffix)
    if decode is not None:
        if out.suffix != ".jsonl":
            raise ConfigError(f"cannot export groups to {out}: the name must end in .jsonl")
        opener = partial(GroupLines, decode=decode)
    if opener is None:
        raise ConfigError(f"cannot export to {out}: the name must end in {' or '.join(_SINKS)}")
    beside = out.with_name(f".{out.name}.{uuid.uuid4().hex}.partial")
    try:
        with reading(journal) as connection:
            check_run(connection, run_id)
            condition = _STATES[state] if run_id is None else f"{_STATES[state]} AND e.run_id = '{run_id}'"
            note_export(journal, str(out.absolute()))
            # it has what people wrote: only its owner reads it
            os.close(os.open(beside, os.O_CREAT | os.O_EXCL, 0o600))
            sink = opener(beside)
            try:
                rows, timelines, tokens = _copy(connection, condition, sink.write, progress)
            finally:
                sink.close()
        os.replace(beside, out)
    except OSError as exc:
        raise ConfigError(f"cannot write {out}: {exc.strerror or exc}") from exc
    finally:
        beside.unlink(missing_ok=True)
    report = ExportReport(path=out, rows=rows, timelines=timelines, tokens=tokens, bytes=out.stat().st_size)
    if isinstance(sink, GroupLines):
        return report.model_copy(update={"groups": sink.written, "left_out": sink.left_out})
    return report


def _copy(
    connection: sqlite3.Connection, condition: str, write: Callable[[list[Row]], None], progress: OnProgress | None
) -> tuple[int, int, int]:
    total, last = connection.execute(f"SELECT count(*), max(e.rowid) FROM episodes e WHERE {condition}").fetchone()
    done = timelines = tokens = 0
    for piece in _pieces(episode_rows(connection, f"{condition} AND e.rowid <= {last or 0}")):
        write(piece)
        done += len(piece)
        timelines += sum(len(row["timelines"]) for row in piece)
        tokens += sum(len(timeline["response_ids"]) for row in piece for timeline in row["timelines"])
        if progress is not None:
            progress("export", done, max(total, done), "episodes")
    return done, timelines, tokens


def _pieces(rows: Iterable[tuple[int, Row]]) -> Generator[list[Row]]:
    piece: list[Row] = []
    size = 0
    for bytes_, row in rows:
        piece.append(row)
        size += bytes_ + 1024
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


class _JsonLines:
    """One JSON object a line; what JSON has no number for (NaN, infinities) is null."""

    def __init__(self, path: Path) -> None:
        # half a surrogate pair, which a client's JSON can carry, is written the way JSON escapes it
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            try:
                line = json.dumps(row, ensure_ascii=False, allow_nan=False)
            except ValueError:
                line = json.dumps(finite(row), ensure_ascii=False, allow_nan=False)
            self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """One row group a piece; ``output`` is JSON text, because every client's metadata has its own form."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as exc:
            raise ConfigError("parquet files need pyarrow: pip install '.[parquet]' in a clone") from exc

        ids, number, text = pa.list_(pa.int64()), pa.float64(), pa.string()
        kinds = {
            **dict.fromkeys(("rank", "step", "min_policy_version", "max_policy_version", "num_calls"), pa.int64()),
            **dict.fromkeys(("prompt_ids", "response_ids", "response_mask"), ids),
            **dict.fromkeys(("reward", "claimed_at", "ended_at"), number),
            "logprobs": pa.list_(number),
            "versions": pa.list_(ids),
            "components": pa.map_(text, number),
            "tokens": pa.struct([(name, pa.int64()) for name in TokenCounts.__struct_fields__]),
        }
        kinds["timelines"] = pa.list_(pa.struct([(name, kinds[name]) for name in TIMELINE_FIELDS]))
        self._schema = pa.schema([(name, kinds.get(name, text)) for name in ROW_FIELDS])
        self._table = pa.Table
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, rows: list[Row]) -> None:
        flat = [
            {
                **row,
                "output": None if row["output"] is None else json.dumps(row["output"]),
                "components": [(clean(name), value) for name, value in row["components"].items()],
            }
            for row in rows
        ]
        self._writer.write_table(self._table.from_pylist(flat, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


@dataclass
class _Group:
    task_id: str
    prompt: str
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: candidate, rank and reward of each answer
    answers: list[tuple[dict[str, Any], int | None, float | None]] = field(default_factory=lambda: [])
    broken: bool = False


class GroupLines:
    """A sink of export rows. A group is what one call of a reward hook judged (``group_id``), for clients that do not
    say so the episodes of one task in one batch.

    Groups keep their texts in memory until :meth:`close`: their episodes end in any order.

    Attributes:
        written: groups in the file, once it is closed.
        left_out: groups that are not.
    """

    def __init__(self, path: Path, decode: Decode) -> None:
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
        self._decode = decode
        self._groups: dict[tuple[str, ...], _Group] = {}
        self.written = self.left_out = 0

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            if row["episode_type"] == "train":
                self._add(row)

    def close(self) -> None:
        with self._file:
            for group in self._groups.values():
                if group.broken:
                    self.left_out += 1
                    continue
                self.written += 1
                self._file.write(json.dumps(_line(group), ensure_ascii=False) + "\n")

    def _add(self, row: Row) -> None:
        key = (row["group_id"],) if row["group_id"] else (row["run_id"], row["batch_id"], row["task_id"])
        timelines: list[dict[str, Any]] = row["timelines"]
        if key not in self._groups:
            prompt = self._decode(timelines[0]["prompt_ids"], special=True) if timelines else ""
            self._groups[key] = _Group(row["task_id"], prompt)
        group = self._groups[key]
        if len(timelines) != 1 or row["num_calls"] != 1 or not row["finish_reason"]:
            group.broken = True
            return
        # what the gateway told of the task, see :mod:`gateway.rollout.submission`
        group.task = group.task or notes_of(row["output"] or {}).task or {}
        [timeline] = timelines
        candidate = {
            "text": self._decode(timeline["response_ids"], special=False),
            "finish_reason": row["finish_reason"],
            "prompt_tokens": len(timeline["prompt_ids"]),
            "completion_tokens": len(timeline["response_ids"]),
            "policy_version": timeline["max_policy_version"],
        }
        group.answers.append((candidate, row["rank"], row["reward"]))


def _line(group: _Group) -> dict[str, Any]:
    query, metadata = group.task.get("main_query"), group.task.get("metadata")
    ranks = [rank for _, rank, _ in group.answers]
    rewards = [reward for _, _, reward in group.answers if reward is not None]
    line: dict[str, Any] = {
        "task": {
            "task_id": group.task_id,
            "main_query": query if isinstance(query, str) else group.prompt,
            "init_messages": [{"role": "user", "content": group.prompt}],
            "metadata": metadata if isinstance(metadata, dict) else {},
        },
        "candidates": [candidate for candidate, _, _ in group.answers],
    }
    if None not in ranks:
        line["rank"] = ranks
    elif len(rewards) == len(ranks):
        line["rank"] = [1 + sum(other > reward for other in rewards) for reward in rewards]
    return line


_SINKS: dict[str, Callable[[Path], _Parquet | _JsonLines | GroupLines]] = {".parquet": _Parquet, ".jsonl": _JsonLines}


def check_run(connection: sqlite3.Connection, run_id: str | None) -> None:
    """Raise :class:`ConfigError` if a run is named that the journal does not know."""
    if run_id is None:
        return
    runs = [name for (name,) in connection.execute("SELECT run_id FROM runs ORDER BY rowid")]
    if run_id not in runs:
        raise ConfigError(f"the journal has no run {run_id}; the latest runs are: {', '.join(runs[-5:]) or 'none'}")


def model_of(journal: Path, run_id: str | None = None) -> str:
    """The model whose tokens a journal holds, as its runs' jobs name it.

    Raises:
        ConfigError: there is no journal or no such run, it is empty or cannot be read, or its runs trained several
            models.
    """
    with reading(journal) as connection:
        check_run(connection, run_id)
        runs = connection.execute("SELECT run_id, job_yaml FROM runs ORDER BY rowid").fetchall()
    jobs: list[Any] = [yaml.safe_load(text) for name, text in runs if text and run_id in (None, name)]
    models = sorted({str(job["model"]) for job in jobs if isinstance(job, dict) and "model" in job})
    if len(models) != 1:
        named = f"are of {', '.join(models)}" if models else "name none"
        raise ConfigError(f"whose tokenizer? The runs of {journal} {named}: name the model with --tokenizer")
    return models[0]
