"""Rows as SQL, and token data as bytes and back.

Invariant: rows are stored as they are, in an order that keeps the meaning of their sequence; nothing is decided here.
Token data is exact: each array is stored as its raw bytes, after one byte that names their type.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import msgpack
import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from swarm.server.journal.rows import (
    AgreementRow,
    BatchRow,
    CallRow,
    CountsRow,
    EndRow,
    EpisodeRow,
    EvaluationRow,
    ForgottenEvidenceRow,
    GroupRow,
    JournalRow,
    KeyRow,
    NoAgreementsRow,
    PairRow,
    QuarantineRow,
    RatingRow,
    ResumptionRow,
    RunRow,
    StageRow,
    StateRow,
    StepRow,
)
from swarm.states import EpisodeState
from swarm.tokens import ModelCall, Timeline, TokenCounts, TrainBatch, Trajectory
from swarm.types import Notes, StepResult

_JSON = json.JSONEncoder(default=str)
_STATE_NAMES = {
    EpisodeState.FINISHED: "waiting",
    EpisodeState.BATCHED: "out",
    EpisodeState.REGISTERED: "over",
    EpisodeState.DELETED: "over",
}
#: The fields of a packed call, of a packed timeline, and the first ones of a packed trajectory, in their order.
_CALL = (
    *("prompt_ids", "response_ids", "logprobs", "min_policy_version", "max_policy_version"),
    *("history", "versions", "finish_reason"),
)
TIMELINE_FIELDS = (
    *("prompt_ids", "response_ids", "response_mask", "logprobs", "min_policy_version", "max_policy_version"),
    *("versions", "num_calls"),
)
_TRAJECTORY = ("task_id", "reward", "credit", "is_success", "num_calls", "log_metrics")

Values = Sequence[Any] | Mapping[str, Any]
#: SQL that names fields of a row; or SQL, and the parameters that it is executed with for some rows of one type
Statement = str | tuple[str, Callable[[Sequence[Any]], Iterable[Values]]]


def pack_call(call: ModelCall) -> bytes:
    """The call without its ``call_id``."""
    return _dump(_values(call, _CALL))


def unpack_call(call_id: str, data: bytes) -> ModelCall:
    """The call that :func:`pack_call` was given."""
    return ModelCall(call_id=call_id, **_fields(_CALL, _load(data)))


def finish_reason_of(data: bytes | None) -> str:
    """Why the call that :func:`pack_call` was given ended; empty without one."""
    return "" if data is None else str(_load(data)[-1])


def state_name(state: EpisodeState) -> str:
    """The name under which readers see a state that is stored."""
    return _STATE_NAMES.get(state, str(state))


def pack_trajectory(trajectory: Trajectory, *, without_tokens: bool = False) -> bytes:
    """The trajectory without its ``episode_uuid``, and ``without_tokens`` that are those of its one call."""
    timelines = None if without_tokens else [_values(timeline, TIMELINE_FIELDS) for timeline in trajectory.timelines]
    fields = [getattr(trajectory, name) for name in _TRAJECTORY]
    return _dump([*fields, structs.astuple(trajectory.tokens), timelines])


def pack_counts(counts: TokenCounts) -> bytes:
    """The numbers in the order of their fields."""
    return _dump(structs.astuple(counts))


def unpack_counts(data: bytes | None) -> TokenCounts:
    """The counts that :func:`pack_counts` was given; zeros where there are none."""
    return TokenCounts() if data is None else _counts(_load(data))


def unpack_trajectory(episode_uuid: str, data: bytes, call: bytes | None) -> Trajectory:
    """The trajectory that :func:`pack_trajectory` was given; ``call`` (packed) has the tokens if ``data`` has none."""
    *values, counts, packed = _load(data)
    if packed is not None:
        timelines = [_fields(TIMELINE_FIELDS, values) for values in packed]
    elif call is not None:
        fields = _fields(_CALL, _load(call))
        fields |= {"response_mask": np.ones(len(fields["response_ids"]), np.bool_), "num_calls": 1}
        timelines = [{name: fields[name] for name in TIMELINE_FIELDS}]
    else:
        raise ValueError(f"the call of episode {episode_uuid} is missing")
    return Trajectory(
        episode_uuid=episode_uuid,
        **dict(zip(_TRAJECTORY, values, strict=True)),
        tokens=_counts(counts),
        timelines=[Timeline(**fields) for fields in timelines],
    )


def _counts(numbers: Sequence[int]) -> TokenCounts:
    return TokenCounts(**dict(zip(TokenCounts.__struct_fields__, numbers, strict=True)))


def unpack_step(step: int, batch_id: str, metrics: str, seconds: float) -> StepResult:
    """A step by its columns."""
    return StepResult(step=step, batch_id=batch_id, metrics=json.loads(metrics), seconds=seconds)


def pack_json(value: Any) -> str:
    """ASCII JSON; infinities and NaN as Python writes them, what JSON has no form for as its text.

    Raises:
        RecursionError: it is nested some thousand levels deep.
    """
    return _JSON.encode(value)


def notes_of(output: Mapping[str, Any]) -> Notes:
    """What was noted beside a result, as it was stored."""
    return Notes.model_validate(output.get("notes") or {})


def clean(text: str) -> str:
    """Text that SQLite takes: a lone surrogate, which JSON bodies can carry, becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _values(data: ModelCall | Timeline, names: Sequence[str]) -> list[Any]:
    """The fields of these names, with bytes for arrays."""
    values: list[Any] = [getattr(data, name) for name in names]
    return [_bytes(value) if isinstance(value, np.ndarray) else value for value in values]


def _fields(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """What :func:`_values` was given."""
    fields = dict(zip(names, values, strict=True))
    arrays = {name: _array(value) for name, value in fields.items() if isinstance(value, bytes)}
    return {**fields, **arrays, "versions": [(begin, version) for begin, version in fields["versions"]]}


def _bytes(array: NDArray[Any]) -> bytes:
    """One byte that names the type, then the numbers, little-endian."""
    return array.dtype.char.encode() + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(data: bytes) -> NDArray[Any]:
    # the copy is aligned, which numbers after the first byte are not
    return np.frombuffer(data, f"<{chr(data[0])}", offset=1).copy()


def _dump(value: Any) -> bytes:
    return cast("bytes", msgpack.packb(value, unicode_errors="surrogatepass"))


def _load(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass")


# ---------------------------------------------------------------------- rows


def _columns(rows: Sequence[Struct]) -> Iterable[dict[str, Any]]:
    for row in rows:
        yield {name: clean(value) if isinstance(value, str) else value for name, value in structs.asdict(row).items()}


def _ends(rows: Sequence[EndRow]) -> Iterable[Values]:
    for row, fields in zip(rows, _columns(rows), strict=True):
        notes = row.notes if row.output is None else row.output.notes
        output = _output(row, notes)
        yield {
            **fields,
            "reward": None if row.output is None else row.output.reward,
            "output": output,
            "tokens": pack_counts(row.tokens),
            "route": "" if notes is None else clean(notes.route),
            "size": len(output or ""),
        }


def _output(row: EndRow, notes: Notes | None) -> str | None:
    """The result as JSON; for an episode without one, what its client said about it, in the same form."""
    try:
        if row.output is not None:
            return pack_json(row.output.model_dump())
        return pack_json({"reward": None, "notes": notes.model_dump()}) if notes else None
    except (RecursionError, ValueError):
        # the writer must not stop at it: the reward is in a column of its own; whose it is must be found
        left = {"left_out": "it was nested too deeply"}
        whose = None if notes is None else notes.model_copy(update={"task": None}).model_dump()
        reward = None if row.output is None else row.output.reward
        return pack_json({"reward": reward, "metadata": left, "notes": whose})


def _trajectories(rows: Sequence[EndRow]) -> Iterable[Values]:
    return [
        (clean(row.episode_uuid), pack_trajectory(row.trajectory, without_tokens=bool(row.kept_call)))
        for row in rows
        if row.trajectory is not None
    ]


def _names(rows: Sequence[EndRow]) -> str:
    return json.dumps([clean(row.episode_uuid) for row in rows])


def _members(batch: TrainBatch) -> str:
    return pack_json(
        [[group.task_id, [trajectory.episode_uuid for trajectory in group.trajectories]] for group in batch.groups]
    )


#: Busy servers mix these: within a transaction they come in this order, and then all others in that in which they came.
_RANK: dict[type[JournalRow], int] = {kind: rank for rank, kind in enumerate((EpisodeRow, KeyRow, CallRow, EndRow))}
#: The statements of each type of row.
_STATEMENTS: dict[type[JournalRow], tuple[Statement, ...]] = {
    EpisodeRow: (
        "INSERT OR IGNORE INTO episodes (uuid, client_uuid, type, key_digest, idle_timeout, max_seconds,"
        " claimed_at, claim_key, task_hint, group_uuid, group_size, run_id)"
        " VALUES (:episode_uuid, :client_uuid, :episode_type, :key_digest, :idle_timeout, :max_seconds,"
        " :claimed_at, :claim_key, :task_hint, :group_uuid, :group_size, :run_id)",
    ),
    KeyRow: ("INSERT OR IGNORE INTO keys (episode, digest) VALUES (:episode_uuid, :key_digest)",),
    CallRow: (
        (
            "INSERT OR IGNORE INTO calls (episode, call_id, data) VALUES (?, ?, ?)",
            lambda rows: [(clean(row.episode_uuid), clean(row.call.call_id), pack_call(row.call)) for row in rows],
        ),
    ),
    EndRow: (
        ("INSERT OR REPLACE INTO trajectories (episode, data) VALUES (?, ?)", _trajectories),
        (
            "DELETE FROM calls WHERE episode IN (SELECT value FROM json_each(?))"
            " AND call_id NOT IN (SELECT value FROM json_each(?))",
            lambda rows: [(_names(rows), json.dumps([clean(row.kept_call) for row in rows if row.kept_call]))],
        ),
        ("DELETE FROM keys WHERE episode IN (SELECT value FROM json_each(?))", lambda rows: [(_names(rows),)]),
        (
            "UPDATE episodes SET state = :state, how = :how, ended_at = :ended_at, task_id = :task_id,"
            " reward = :reward, output = :output, drop_reason = :drop_reason, end_key = :end_key, tokens = :tokens,"
            " route = :route, size = :size"
            " + coalesce((SELECT length(data) FROM trajectories WHERE episode = :episode_uuid), 0)"
            " + coalesce((SELECT sum(length(data)) FROM calls WHERE episode = :episode_uuid), 0), ended = 1"
            " + coalesce((SELECT max(ended) FROM episodes WHERE ended IS NOT NULL), 0) WHERE uuid = :episode_uuid",
            _ends,
        ),
    ),
    RunRow: (
        "INSERT INTO runs (run_id, job_yaml, stopped) VALUES (:run_id, :job_yaml, :stopped)"
        " ON CONFLICT (run_id) DO UPDATE SET job_yaml = excluded.job_yaml, stopped = excluded.stopped",
    ),
    CountsRow: (
        "UPDATE runs SET trained = :trained, dropped = :dropped, quarantined = :quarantined WHERE run_id = :run_id",
    ),
    QuarantineRow: ("UPDATE episodes SET quarantine_reason = :reason WHERE uuid = :episode_uuid",),
    StateRow: (
        (
            "UPDATE episodes SET state = ?, batch_id = coalesce(?, batch_id), step = coalesce(?, step),"
            " lost_reason = coalesce(?, lost_reason) WHERE uuid IN (SELECT value FROM json_each(?))",
            lambda rows: [
                (
                    row.state,
                    row.batch_id,
                    row.step,
                    None if row.reason is None else clean(row.reason),
                    json.dumps([clean(uuid) for uuid in row.episode_uuids]),
                )
                for row in rows
            ],
        ),
    ),
    GroupRow: (
        "INSERT OR REPLACE INTO losses (task_id, lost, version) VALUES (:task_id, :lost, :version)",
        "DELETE FROM losses WHERE task_id = :task_id AND lost = 0",
    ),
    AgreementRow: ("INSERT OR IGNORE INTO agreements (client_uuid) VALUES (:client_uuid)",),
    NoAgreementsRow: ("DELETE FROM agreements",),
    BatchRow: (
        (
            "INSERT OR REPLACE INTO batch (id, batch_id, members, attempts) VALUES (1, ?, ?, ?)",
            lambda rows: [(row.batch.batch_id, _members(row.batch), row.attempts) for row in rows],
        ),
    ),
    StepRow: (
        (
            "INSERT OR IGNORE INTO steps (run_id, batch_id, step, seconds, metrics) VALUES (?, ?, ?, ?, ?)",
            lambda rows: [
                (
                    row.run_id,
                    clean(row.result.batch_id),
                    row.result.step,
                    row.result.seconds,
                    pack_json(row.result.metrics),
                )
                for row in rows
            ],
        ),
    ),
    EvaluationRow: (
        (
            # the row keeps its number, by which the oldest are removed: each episode of an evaluation writes it anew
            "INSERT INTO evaluations (run_id, step, sums) VALUES (?, ?, ?)"
            " ON CONFLICT (run_id, step) DO UPDATE SET sums = excluded.sums",
            lambda rows: [(row.run_id, row.step, pack_json(dict(row.sums))) for row in rows],
        ),
    ),
    PairRow: (
        "INSERT OR IGNORE INTO pairs (run_id, group_id, terms, pair) VALUES (:run_id, :group_id, :terms, :pair)",
    ),
    RatingRow: (
        # the answer keeps its place in the order
        "INSERT INTO ratings (run_id, answer, terms, rating) VALUES (:run_id, :answer, :terms, :rating)"
        " ON CONFLICT (run_id, answer) DO UPDATE SET rating = excluded.rating",
    ),
    ForgottenEvidenceRow: (
        "DELETE FROM pairs WHERE run_id = :run_id AND json_extract(pair, '$.terms.challenger') > :version",
        "DELETE FROM ratings WHERE run_id = :run_id AND json_extract(rating, '$.terms.challenger') > :version",
        "DELETE FROM evaluations WHERE run_id = :run_id AND step > :version",
    ),
    StageRow: (
        "INSERT OR IGNORE INTO stages (run_id, route, incumbent, version, stage)"
        " VALUES (:run_id, :route, :incumbent, :version, :stage)",
        # before the latest only moves and pins stay: who promoted what, and why
        "DELETE FROM stages AS before WHERE run_id = :run_id AND route = :route AND incumbent = :incumbent AND version"
        " = (SELECT max(version) FROM stages WHERE run_id = :run_id AND route = :route AND incumbent = :incumbent AND"
        " version < :version) AND EXISTS (SELECT 1 FROM stages AS first WHERE first.run_id = :run_id AND first.route ="
        " :route AND first.incumbent = :incumbent AND first.version < before.version AND"
        " json_extract(first.stage, '$.at', '$.pinned') = json_extract(before.stage, '$.at', '$.pinned'))",
    ),
    ResumptionRow: ("INSERT OR REPLACE INTO resumptions (run_id, step) VALUES (:run_id, :step)",),
}


def write(connection: sqlite3.Connection, rows: Sequence[JournalRow]) -> None:
    """Store ``rows`` inside the open transaction, one ``executemany`` per statement of each run of one type."""
    for kind, run in groupby(sorted(rows, key=lambda row: _RANK.get(type(row), len(_RANK))), type):
        of_kind = list(run)
        for statement in _STATEMENTS[kind]:
            sql, values = (statement, _columns) if isinstance(statement, str) else statement
            connection.executemany(sql, values(of_kind))
