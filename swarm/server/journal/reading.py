"""What is read back: everything a restarted server needs, and single episodes that memory has forgotten.

Invariant: what is read was committed; nothing here writes.
"""

from __future__ import annotations

import json
import sqlite3
from operator import itemgetter
from typing import Any

from swarm.server.journal.codec import clean, unpack_call, unpack_trajectory
from swarm.server.journal.records import (
    ClaimedEpisode,
    EpisodeClaimed,
    GroupLosses,
    OutstandingBatch,
    PastEnding,
    Recovered,
)
from swarm.tokens import ModelCall, TrainBatch, TrainGroup, Trajectory
from swarm.types import StepResult

#: endings and claims that memory starts with; older ones are looked up one by one
MAX_ENDINGS = 20_000
MAX_STEPS = 1_000

_CLAIM = (
    "uuid, client_uuid, type, key_digest, idle_timeout, max_seconds, claimed_at, claim_key, task_hint, group_uuid,"
    " group_size"
)
#: trajectories, and the call that holds the tokens of one that has none itself
TRAJECTORIES = "episodes e JOIN trajectories t USING (ended) LEFT JOIN calls c ON c.episode = e.id"
_ENDING = "client_uuid, how, coalesce(drop_reason, ''), coalesce(end_key, ''), type, ended_at"


def recover(connection: sqlite3.Connection) -> Recovered:
    """What the records written so far amount to."""
    query = connection.execute
    run = query(
        "SELECT run_id, job_yaml, quarantined, dropped, trained, stopped, id FROM runs ORDER BY id DESC LIMIT 1"
    ).fetchone()
    run_id, job_yaml, quarantined, dropped, trained, stopped, number = run or ("", "", 0, 0, 0, 0, 0)
    steps = query(
        "SELECT step, batch_id, metrics, seconds FROM steps WHERE run = ? ORDER BY id DESC LIMIT ?", (number, MAX_STEPS)
    ).fetchall()
    columns = f"{_ENDING}, uuid, claim_key, id, ended"
    over = query(f"SELECT {columns} FROM episodes WHERE state >= 3 ORDER BY ended DESC LIMIT ?", (MAX_ENDINGS,))
    finished = query(f"SELECT {columns} FROM episodes WHERE state IN (1, 2)")
    endings = sorted([*over, *finished], key=itemgetter(9))[-MAX_ENDINGS:]
    return Recovered(
        run_id=run_id,
        job_yaml=job_yaml,
        stopped=bool(stopped),
        claimed=_claimed(connection),
        finished=[
            (client_uuid, unpack_trajectory(uuid, data, call))
            for client_uuid, uuid, data, call in query(
                f"SELECT client_uuid, uuid, t.data, c.data FROM {TRAJECTORIES} WHERE state = 1 ORDER BY t.ended"
            )
        ],
        outstanding=_outstanding(connection),
        losses=[GroupLosses(*row) for row in query("SELECT task_id, lost, version FROM losses ORDER BY task_id")],
        agreed=[name for (name,) in query("SELECT client_uuid FROM agreements ORDER BY client_uuid")],
        endings={row[6]: PastEnding(*row[:6]) for row in endings},
        claims=_claims(connection, min((row[8] for row in endings if row[7]), default=None)),
        steps=[_step(*row) for row in reversed(steps)],
        quarantined=quarantined,
        dropped=dropped,
        trained=trained,
    )


def past_ending(connection: sqlite3.Connection, episode_uuid: str) -> PastEnding | None:
    """How an episode ended; ``None``: it is not known, or not over."""
    row = connection.execute(
        f"SELECT {_ENDING} FROM episodes WHERE uuid = ? AND ended IS NOT NULL", (clean(episode_uuid),)
    ).fetchone()
    return None if row is None else PastEnding(*row)


def _latest(rows: list[tuple[str, str]]) -> list[str]:
    """Of all episodes claimed under one key those of its latest claim: a key is used anew after a claim that failed."""
    uuid, group_uuid = rows[-1]
    return [other for other, group in rows if group == group_uuid] if group_uuid else [uuid]


def _claims(connection: sqlite3.Connection, first: int | None) -> dict[tuple[str, str], list[str]]:
    """All claims with a key from episode number ``first`` on, and those of episodes that are live."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for client_uuid, claim_key, uuid, group_uuid in connection.execute(
        "SELECT client_uuid, claim_key, uuid, group_uuid FROM episodes"
        " WHERE claim_key != '' AND (id >= ? OR state < 3) ORDER BY id",
        (first if first is not None else 1 << 62,),
    ):
        found.setdefault((client_uuid, claim_key), []).append((uuid, group_uuid))
    return {key: _latest(rows) for key, rows in found.items()}


def _claimed(connection: sqlite3.Connection) -> list[ClaimedEpisode]:
    calls: dict[int, list[ModelCall]] = {}
    for number, call_id, data in connection.execute(
        "SELECT episode, call_id, data FROM calls WHERE episode IN (SELECT id FROM episodes WHERE state = 0)"
        " ORDER BY id"
    ):
        calls.setdefault(number, []).append(unpack_call(call_id, data))
    digests: dict[int, list[bytes]] = {}
    for number, digest in connection.execute("SELECT episode, digest FROM keys ORDER BY episode, number"):
        digests.setdefault(number, []).append(digest)
    found: list[ClaimedEpisode] = []
    for number, reason, *row in connection.execute(
        f"SELECT id, quarantine_reason, {_CLAIM} FROM episodes WHERE state = 0 ORDER BY id"
    ):
        claim = EpisodeClaimed(*row)
        keys = (claim.key_digest, *digests.get(number, ()))
        found.append(ClaimedEpisode(claim, keys, tuple(calls.get(number, ())), reason))
    return found


def _outstanding(connection: sqlite3.Connection) -> OutstandingBatch | None:
    row = connection.execute("SELECT batch_id, members, attempts FROM batches").fetchone()
    if row is None:
        return None
    batch_id, members, attempts = row
    out: dict[str, Trajectory] = {
        uuid: unpack_trajectory(uuid, data, call)
        for uuid, data, call in connection.execute(f"SELECT uuid, t.data, c.data FROM {TRAJECTORIES} WHERE state = 2")
    }
    # a part of a batch may have been dropped while it was out
    groups = [(task_id, [out[uuid] for uuid in uuids if uuid in out]) for task_id, uuids in json.loads(members)]
    batch = TrainBatch(
        batch_id=batch_id,
        groups=[TrainGroup(task_id=task_id, trajectories=one) for task_id, one in groups if one],
    )
    return OutstandingBatch(batch, attempts)


def _step(step: int, batch_id: str, metrics: str, seconds: float) -> StepResult:
    parsed: dict[str, Any] = json.loads(metrics)
    return StepResult(step=step, batch_id=batch_id, metrics=parsed, seconds=seconds)
