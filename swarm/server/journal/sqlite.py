"""Rows as SQL, and SQL as what a restarted server needs.

Invariant: rows are stored as they are, in an order that keeps the meaning of their sequence; nothing is decided here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from swarm.server.journal.codec import (
    clean,
    pack_call,
    pack_counts,
    pack_json,
    pack_trajectory,
    unpack_call,
    unpack_counts,
    unpack_trajectory,
)
from swarm.server.journal.rows import (
    AgreementRow,
    BatchRow,
    CallRow,
    CountsRow,
    EndedHow,
    Ending,
    EndRow,
    EpisodeRow,
    EvaluationRow,
    ForgottenPairsRow,
    GroupRow,
    KeyRow,
    NoAgreementsRow,
    PairRow,
    QuarantineRow,
    RatingRow,
    Recovered,
    RecoveredEpisode,
    ResumptionRow,
    Row,
    RunRow,
    StageRow,
    StateRow,
    StepRow,
)
from swarm.server.journal.schema import LIVE
from swarm.states import EpisodeState
from swarm.tokens import ModelCall, TrainBatch, TrainGroup, Trajectory
from swarm.types import StepResult

#: endings, claims and steps that memory starts with; older endings are looked up one by one
MAX_ENDINGS = 20_000
MAX_STEPS = 1_000
#: comparisons, by the latest pair, whose pairs memory starts with
MAX_COMPARISONS = 64

Values = Sequence[Any]
#: SQL, and the parameters that it is executed with for some rows of one type
Statement = tuple[str, Callable[[Sequence[Any]], Iterable[Values]]]


def _episodes(rows: Sequence[EpisodeRow]) -> Iterable[Values]:
    return [
        (
            clean(row.episode_uuid),
            clean(row.client_uuid),
            row.episode_type,
            row.key_digest,
            row.idle_timeout,
            row.max_seconds,
            row.claimed_at,
            clean(row.claim_key),
            clean(row.task_hint),
            clean(row.group_uuid),
            row.group_size,
            row.run_id,
        )
        for row in rows
    ]


def _ends(rows: Sequence[EndRow]) -> Iterable[Values]:
    for row in rows:
        uuid, output = clean(row.episode_uuid), _output(row)
        notes = row.notes if row.output is None else row.output.notes
        yield (
            row.state,
            row.how,
            row.ended_at,
            clean(row.task_id),
            row.output.reward if row.output is not None else None,
            output,
            clean(row.drop_reason),
            clean(row.end_key),
            pack_counts(row.tokens),
            clean(notes.route) if notes is not None else "",
            len(output or ""),
            uuid,
            uuid,
            uuid,
        )


def _output(row: EndRow) -> str | None:
    """The result as JSON; for an episode without one, what its client said about it, in the same form."""
    try:
        if row.output is not None:
            return pack_json(row.output.model_dump())
        return pack_json({"reward": None, "notes": row.notes.model_dump()}) if row.notes else None
    except (RecursionError, ValueError):
        # the writer must not stop at it: the reward is in a column of its own
        reward = None if row.output is None else row.output.reward
        return pack_json({"reward": reward, "metadata": {"left_out": "it was nested too deeply"}})


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


#: The statements of each type of row. Types come in this order within a transaction, because busy servers mix the first
#: four; the rows after them, of any type, keep the order in which they came.
_BULK: dict[type[Any], tuple[Statement, ...]] = {
    EpisodeRow: (
        (
            "INSERT OR IGNORE INTO episodes (uuid, client_uuid, type, key_digest, idle_timeout, max_seconds,"
            " claimed_at, claim_key, task_hint, group_uuid, group_size, run_id)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            _episodes,
        ),
    ),
    KeyRow: (
        (
            "INSERT OR IGNORE INTO keys (episode, digest) VALUES (?, ?)",
            lambda rows: [(clean(row.episode_uuid), row.key_digest) for row in rows],
        ),
    ),
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
        (
            "DELETE FROM keys WHERE episode IN (SELECT value FROM json_each(?))",
            lambda rows: [(_names(rows),)],
        ),
        (
            "UPDATE episodes SET state = ?, how = ?, ended_at = ?, task_id = ?, reward = ?, output = ?,"
            " drop_reason = ?, end_key = ?, tokens = ?, route = ?,"
            " size = ? + coalesce((SELECT length(data) FROM trajectories WHERE episode = ?), 0)"
            " + coalesce((SELECT sum(length(data)) FROM calls WHERE episode = ?), 0),"
            " ended = 1 + coalesce((SELECT max(ended) FROM episodes WHERE ended IS NOT NULL), 0) WHERE uuid = ?",
            _ends,
        ),
    ),
}
_SPARSE: dict[type[Any], tuple[Statement, ...]] = {
    RunRow: (
        (
            "INSERT INTO runs (run_id, job_yaml, stopped) VALUES (?, ?, ?)"
            " ON CONFLICT (run_id) DO UPDATE SET job_yaml = excluded.job_yaml, stopped = excluded.stopped",
            lambda rows: [(row.run_id, row.job_yaml, row.stopped) for row in rows],
        ),
    ),
    CountsRow: (
        (
            "UPDATE runs SET trained = ?, dropped = ?, quarantined = ? WHERE run_id = ?",
            lambda rows: [(row.trained, row.dropped, row.quarantined, row.run_id) for row in rows],
        ),
    ),
    QuarantineRow: (
        (
            "UPDATE episodes SET quarantine_reason = ? WHERE uuid = ?",
            lambda rows: [(clean(row.reason), clean(row.episode_uuid)) for row in rows],
        ),
    ),
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
        (
            "INSERT OR REPLACE INTO losses (task_id, lost, version) VALUES (?, ?, ?)",
            lambda rows: [(clean(row.task_id), row.lost, row.version) for row in rows],
        ),
        ("DELETE FROM losses WHERE lost = 0", lambda rows: [()]),
    ),
    AgreementRow: (
        (
            "INSERT OR IGNORE INTO agreements (client_uuid) VALUES (?)",
            lambda rows: [(clean(row.client_uuid),) for row in rows],
        ),
    ),
    NoAgreementsRow: (("DELETE FROM agreements", lambda rows: [()]),),
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
            "INSERT OR REPLACE INTO evaluations (run_id, step, sums) VALUES (?, ?, ?)",
            lambda rows: [(row.run_id, row.step, pack_json(dict(row.sums))) for row in rows],
        ),
    ),
    PairRow: (
        (
            "INSERT OR IGNORE INTO pairs (run_id, group_id, terms, pair) VALUES (?, ?, ?, ?)",
            lambda rows: [(row.run_id, clean(row.group_id), row.terms, clean(row.pair)) for row in rows],
        ),
    ),
    RatingRow: (
        (
            # the answer keeps its place in the order
            "INSERT INTO ratings (run_id, answer, terms, rating) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (run_id, answer) DO UPDATE SET rating = excluded.rating",
            lambda rows: [(row.run_id, row.answer, row.terms, clean(row.rating)) for row in rows],
        ),
    ),
    ForgottenPairsRow: tuple(
        (
            f"DELETE FROM {table}s WHERE run_id = ? AND json_extract({table}, '$.terms.challenger') > ?",
            lambda rows: [(row.run_id, row.version) for row in rows],
        )
        for table in ("pair", "rating")
    ),
    StageRow: (
        (
            "INSERT OR IGNORE INTO stages (run_id, route, incumbent, version, stage) VALUES (?, ?, ?, ?, ?)",
            lambda rows: [
                (row.run_id, clean(row.route), clean(row.incumbent), row.version, clean(row.stage)) for row in rows
            ],
        ),
        (
            # before the latest only moves and pins stay: who promoted what, and why
            "DELETE FROM stages AS before WHERE run_id = ?1 AND route = ?2 AND incumbent = ?3 AND version = (SELECT"
            " max(version) FROM stages WHERE run_id = ?1 AND route = ?2 AND incumbent = ?3 AND version < ?4) AND EXISTS"
            " (SELECT 1 FROM stages AS first WHERE first.run_id = ?1 AND first.route = ?2 AND first.incumbent = ?3 AND"
            " first.version < before.version AND json_extract(first.stage, '$.at', '$.pinned') ="
            " json_extract(before.stage, '$.at', '$.pinned'))",
            lambda rows: [(row.run_id, clean(row.route), clean(row.incumbent), row.version) for row in rows],
        ),
    ),
    ResumptionRow: (
        (
            "INSERT OR IGNORE INTO resumptions (run_id, step) VALUES (?, ?)",
            lambda rows: [(row.run_id, row.step) for row in rows],
        ),
    ),
}
_STATEMENTS = {**_BULK, **_SPARSE}
_RANK = {kind: rank for rank, kind in enumerate(_BULK)}


def write(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Store ``rows`` inside the open transaction, one ``executemany`` per statement of each run of one type."""
    for kind, run in groupby(sorted(rows, key=lambda row: _RANK.get(type(row), len(_RANK))), type):
        of_kind = list(run)
        for sql, values in _STATEMENTS[kind]:
            connection.executemany(sql, values(of_kind))


def past_ending(connection: sqlite3.Connection, episode_uuid: str) -> Ending | None:
    """How an episode ended; ``None`` if it is unknown or not over."""
    row = connection.execute(
        "SELECT client_uuid, how, drop_reason, end_key, tokens, key_digest FROM episodes"
        " WHERE uuid = ? AND ended IS NOT NULL",
        (clean(episode_uuid),),
    ).fetchone()
    return None if row is None else _ending(*row)


def _ending(
    client_uuid: str, how: EndedHow, drop_reason: str, end_key: str, tokens: bytes | None, key_digest: bytes
) -> Ending:
    return Ending(client_uuid, how, drop_reason, end_key, unpack_counts(tokens), (key_digest,))


def recover(connection: sqlite3.Connection) -> Recovered:
    """What the rows on disk amount to."""
    query = connection.execute
    run = query(
        "SELECT run_id, job_yaml, stopped, quarantined, dropped, trained FROM runs ORDER BY rowid DESC LIMIT 1"
    ).fetchone()
    run_id, job_yaml, stopped, quarantined, dropped, trained = run or ("", "", 0, 0, 0, 0)
    steps = query(
        "SELECT step, batch_id, metrics, seconds FROM steps WHERE run_id = ? ORDER BY rowid DESC LIMIT ?",
        (run_id, MAX_STEPS),
    ).fetchall()
    endings = query(
        "SELECT uuid, client_uuid, how, drop_reason, end_key, tokens, key_digest FROM episodes WHERE ended IS NOT NULL"
        " ORDER BY ended DESC LIMIT ?",
        (MAX_ENDINGS,),
    ).fetchall()
    finished = _trajectories_in(connection, EpisodeState.FINISHED)
    return Recovered(
        run_id=run_id,
        job_yaml=job_yaml,
        stopped=bool(stopped),
        claimed=_claimed(connection),
        finished=list(finished.values()),
        outstanding=_outstanding(connection),
        losses=[GroupRow(*row) for row in query("SELECT task_id, lost, version FROM losses ORDER BY task_id")],
        agreed=[name for (name,) in query("SELECT client_uuid FROM agreements ORDER BY client_uuid")],
        endings={uuid: _ending(*ending) for uuid, *ending in reversed(endings)},
        claims=_claims(connection),
        steps=[
            StepResult(step=step, batch_id=batch_id, metrics=json.loads(metrics), seconds=seconds)
            for step, batch_id, metrics, seconds in reversed(steps)
        ],
        evaluations=[
            EvaluationRow(run_id, step, {name: (count, total) for name, (count, total) in json.loads(sums).items()})
            for step, sums in query("SELECT step, sums FROM evaluations WHERE run_id = ? ORDER BY step", (run_id,))
        ],
        pairs=[
            PairRow(run_id, *row)
            for row in query(
                "SELECT group_id, terms, pair FROM pairs WHERE run_id = ? AND terms IN (SELECT terms FROM pairs"
                " WHERE run_id = ? GROUP BY terms ORDER BY max(rowid) DESC LIMIT ?) ORDER BY rowid",
                (run_id, run_id, MAX_COMPARISONS),
            )
        ],
        ratings=[
            RatingRow(run_id, *row)
            for row in query("SELECT answer, terms, rating FROM ratings WHERE run_id = ? ORDER BY rowid", (run_id,))
        ],
        stages=[
            StageRow(run_id, *row)
            for row in query(
                "SELECT route, incumbent, max(version), stage FROM stages WHERE run_id = ? GROUP BY route, incumbent",
                (run_id,),
            )
        ],
        resumed=query("SELECT coalesce(max(step), 0) FROM resumptions WHERE run_id = ?", (run_id,)).fetchone()[0],
        quarantined=quarantined,
        dropped=dropped,
        trained=trained,
    )


def _trajectories_in(connection: sqlite3.Connection, state: EpisodeState) -> dict[str, tuple[str, Trajectory]]:
    """Client and trajectory of each episode in a live ``state``, by episode, oldest end first."""
    return {
        uuid: (client_uuid, unpack_trajectory(uuid, data, call))
        for uuid, client_uuid, data, call in connection.execute(
            "SELECT e.uuid, e.client_uuid, t.data, c.data FROM episodes e JOIN trajectories t ON t.episode = e.uuid"
            f" LEFT JOIN calls c ON c.episode = e.uuid WHERE e.state = ? AND e.{LIVE} ORDER BY e.ended",
            (state,),
        )
    }


def _outstanding(connection: sqlite3.Connection) -> BatchRow | None:
    row = connection.execute("SELECT batch_id, members, attempts FROM batch").fetchone()
    batched = _trajectories_in(connection, EpisodeState.BATCHED)
    if row is None or not batched:
        return None
    batch_id, members, attempts = row
    try:
        groups = [
            TrainGroup(task_id=task_id, trajectories=[batched[uuid][1] for uuid in uuids])
            for task_id, uuids in json.loads(members)
        ]
    except (KeyError, TypeError) as exc:
        raise ValueError(f"the batch that is out is not whole ({type(exc).__name__}: {exc})") from exc
    return BatchRow(TrainBatch(batch_id=batch_id, groups=groups), attempts)


def _claimed(connection: sqlite3.Connection) -> list[RecoveredEpisode]:
    names = f"SELECT uuid FROM episodes WHERE state = '{EpisodeState.CLAIMED}' AND {LIVE}"
    calls: dict[str, list[ModelCall]] = {}
    for uuid, call_id, data in connection.execute(
        f"SELECT episode, call_id, data FROM calls WHERE episode IN ({names}) ORDER BY rowid"
    ):
        calls.setdefault(uuid, []).append(unpack_call(call_id, data))
    digests: dict[str, list[bytes]] = {}
    for uuid, digest in connection.execute("SELECT episode, digest FROM keys ORDER BY rowid"):
        digests.setdefault(uuid, []).append(digest)
    episodes: list[RecoveredEpisode] = []
    for reason, *columns in connection.execute(
        "SELECT quarantine_reason, uuid, client_uuid, type, key_digest, idle_timeout, max_seconds, claimed_at,"
        f" claim_key, task_hint, group_uuid, group_size, run_id FROM episodes WHERE uuid IN ({names}) ORDER BY rowid"
    ):
        claim = EpisodeRow(*columns)
        keys = (claim.key_digest, *digests.get(claim.episode_uuid, ()))
        episodes.append(RecoveredEpisode(claim, keys, tuple(calls.get(claim.episode_uuid, ())), reason))
    return episodes


def _claims(connection: sqlite3.Connection) -> dict[tuple[str, str], list[str]]:
    """The episodes of each claim with a key, among the latest episodes and the live ones.

    A key is used anew after a claim that failed, so it stands for the latest claim: one episode, or one group.
    """
    claims: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for client_uuid, claim_key, uuid, group_uuid in connection.execute(
        "SELECT client_uuid, claim_key, uuid, group_uuid FROM episodes WHERE claim_key != ''"
        f" AND (rowid > (SELECT max(rowid) FROM episodes) - ? OR {LIVE}) ORDER BY rowid",
        (MAX_ENDINGS,),
    ):
        claim = claims.get((client_uuid, claim_key))
        if claim is not None and group_uuid and claim[0] == group_uuid:
            claim[1].append(uuid)
        else:
            claims[client_uuid, claim_key] = (group_uuid, [uuid])
    return {name: uuids for name, (_, uuids) in claims.items()}
