"""The episodes of a journal as a file of rows, read beside the server that writes it.

Invariant: the file appears under its name when it is whole, and only its owner reads it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from swarm.errors import ConfigError
from swarm.server.journal.codec import TIMELINE_FIELDS, clean
from swarm.server.journal.episode_rows import ROW_FIELDS, Row, episode_rows, finite
from swarm.server.journal.erasure import note_export
from swarm.server.journal.group_lines import Decode, GroupLines, check_run
from swarm.server.journal.schema import reading
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


class ExportReport(Model):
    """What was written: ``rows`` episodes with ``timelines`` and ``tokens`` sampled or in between, ``bytes`` in all.

    Of an export of groups (:mod:`swarm.server.journal.group_lines`), ``groups`` are in the file and ``left_out`` are
    not.
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


_SINKS: dict[str, Callable[[Path], _Parquet | _JsonLines | GroupLines]] = {".parquet": _Parquet, ".jsonl": _JsonLines}
