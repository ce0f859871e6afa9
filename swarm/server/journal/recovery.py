"""What a restarted server needs, read from the journal; and endings that its memory does not hold.

Invariant: the journal is only read, and nothing is decided here.
"""

from __future__ import annotations

import json
import sqlite3

from swarm.server.journal.rows import (
    BatchRow,
    EndedHow,
    Ending,
    EpisodeRow,
    EvaluationRow,
    GroupRow,
    PairRow,
    RatingRow,
    Recovered,
    RecoveredEpisode,
    StageRow,
)
from swarm.server.journal.schema import LIVE
from swarm.server.journal.sqlite import clean, unpack_call, unpack_counts, unpack_step, unpack_trajectory
from swarm.states import EpisodeState
from swarm.tokens import ModelCall, TrainBatch, TrainGroup, Trajectory

#: endings that memory holds, claims and steps that it starts with; older endings are looked up one by one
MAX_ENDINGS = 20_000
MAX_STEPS = 1_000
#: comparisons with one incumbent of a route, by the latest pair, that are followed, whose pairs memory starts with, and
#: in all: of a long run only the newest challengers matter
MAX_COMPARISONS, MAX_OF_ALL = 64, 1_000


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
        steps=[unpack_step(*row) for row in reversed(steps)],
        evaluations=[
            EvaluationRow(run_id, step, json.loads(sums))
            for step, sums in query("SELECT step, sums FROM evaluations WHERE run_id = ? ORDER BY step", (run_id,))
        ],
        pairs=[
            PairRow(run_id, *row)
            for row in query(
                # by row numbers, so that no pair is sorted
                "SELECT group_id, terms, pair FROM pairs WHERE rowid IN (SELECT rowid FROM pairs WHERE run_id = ? AND"
                " terms IN (SELECT terms FROM (SELECT of.terms, last, row_number() OVER (PARTITION BY"
                " json_extract(pair, '$.terms.route', '$.terms.incumbent') ORDER BY last DESC) AS latest FROM"
                " (SELECT terms, max(rowid) AS last FROM pairs WHERE run_id = ? GROUP BY terms) AS of"
                " JOIN pairs ON pairs.rowid = last) WHERE latest <= ? ORDER BY last DESC LIMIT ?)) ORDER BY rowid",
                (run_id, run_id, MAX_COMPARISONS, MAX_OF_ALL),
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
        # the latest, and not the largest: an engine may have gone back since
        resumed=query(
            "SELECT coalesce((SELECT step FROM resumptions WHERE run_id = ? ORDER BY rowid DESC LIMIT 1), 0)", (run_id,)
        ).fetchone()[0],
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
