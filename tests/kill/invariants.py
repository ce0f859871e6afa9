"""What must hold of one run of the kill test, however often which process was killed: all of it in one place.

The witnesses are independent of each other: the files of the clients (what they were promised), the file of the engine
(what it trained), the journal (what the server recorded), and the server's last word on its pool.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.states import EpisodeState

Line = dict[str, Any]


@dataclass(frozen=True)
class Witnesses:
    """All that is left of a run. ``pool`` is the last answer of the pool's information."""

    clients: dict[str, list[Line]]
    engine: list[Line]
    episodes: dict[str, Line]
    rows: int
    steps: list[Line]
    runs: list[Line]
    pool: Line

    @classmethod
    def read(cls, folder: Path, clients: Iterable[str], pool: Line, *, engine: bool = True) -> Witnesses:
        """Those in ``folder``; a real ``engine`` leaves none."""
        with closing(sqlite3.connect(folder / "run" / "journal.db")) as journal:
            journal.row_factory = sqlite3.Row
            episodes = [dict(row) for row in journal.execute("SELECT * FROM episodes")]
            steps = [dict(row) for row in journal.execute("SELECT * FROM steps ORDER BY rowid")]
            runs = [dict(row) for row in journal.execute("SELECT * FROM runs ORDER BY rowid")]
        return cls(
            clients={name: lines(folder / f"{name}.jsonl") for name in clients},
            engine=lines(folder / "engine.jsonl") if engine else [],
            episodes={row["uuid"]: row for row in episodes},
            rows=len(episodes),
            steps=steps,
            runs=runs,
            pool=pool,
        )

    @property
    def acknowledged(self) -> dict[str, Line]:
        """By episode: its client's name, the key, the reward and the answer of the acknowledged end."""
        return {
            uuid: {"client": name, "reward": reward, **line}
            for name, said in self.clients.items()
            for line in said
            if "acked" in line
            for uuid, reward in line["rewards"].items()
        }


def lines(path: Path) -> list[Line]:
    """The lines of a file; a kill can cut the last one short."""
    found: list[Line] = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            found.append({"cut": text})
    return found


def violations(seen: Witnesses) -> list[str]:
    """Everything that does not hold, in words; empty if all is well."""
    return [
        *contradictions(seen),
        *lost_rewards(seen),
        *foreign_rewards(seen),
        *doubled_claims(seen),
        *doubled_training(seen),
        *wrong_counts(seen),
    ]


def contradictions(seen: Witnesses) -> list[str]:
    """A client got an answer that contradicts an earlier one.

    A repeated claim may get other episodes only if a kill came before the disk had the first ones.
    """
    told = [(name, line) for name, said in seen.clients.items() for line in said]
    return [f"{name}: {line['violation']}" for name, line in told if "violation" in line] + [
        f"{name}: a repeated claim got others than {line['replaced']}, which the journal has"
        for name, line in told
        if seen.episodes.keys() & line.get("replaced", ())
    ]


def lost_rewards(seen: Witnesses) -> list[str]:
    """Every acknowledged reward is in the journal once: waiting, in a batch, trained, or dropped with a reason."""
    wrong: list[str] = []
    if seen.rows != len(seen.episodes):
        wrong.append(f"{seen.rows} rows for {len(seen.episodes)} episodes")
    for uuid, ack in seen.acknowledged.items():
        row = seen.episodes.get(uuid)
        if row is None:
            wrong.append(f"{uuid}: acknowledged, but not in the journal")
            continue
        where = f"{uuid} ({row['state']})"
        if row["client_uuid"] != ack["client"]:
            wrong.append(f"{where}: acknowledged to {ack['client']}, of {row['client_uuid']} in the journal")
        if (row["how"], row["end_key"], row["reward"]) != ("ended", ack["acked"], ack["reward"]):
            wrong.append(
                f"{where}: acknowledged {ack['reward']} under {ack['acked']}; the journal has {row['how']} "
                f"{row['reward']} under {row['end_key']}"
            )
        if ack["kind"] == "eval":
            if row["state"] not in (EpisodeState.REGISTERED, EpisodeState.DELETED):
                wrong.append(f"{where}: an eval episode")
        elif ack["error"]:
            if row["state"] != EpisodeState.DROPPED or row["drop_reason"] not in ack["error"]:
                wrong.append(f"{where}: its client was told {ack['error']!r}, the journal says {row['drop_reason']!r}")
        elif row["state"] == EpisodeState.DROPPED:
            if not row["lost_reason"]:
                wrong.append(f"{where}: dropped without a reason")
        elif row["state"] not in (EpisodeState.FINISHED, EpisodeState.BATCHED, EpisodeState.TRAINED):
            wrong.append(f"{where}: acknowledged as to be trained")
    return wrong


def foreign_rewards(seen: Witnesses) -> list[str]:
    """No reward is in the journal that no client sent, and none of an end that was refused."""
    sent: dict[tuple[str, str], float] = {}
    refused: set[tuple[str, str]] = set()
    for said in seen.clients.values():
        keys: dict[str, Line] = {}
        for line in said:
            if "ending" in line:
                keys[line["ending"]] = line
                sent |= {(uuid, line["ending"]): reward for uuid, reward in line["rewards"].items()}
            if "late" in line and line["late"] in keys:
                refused |= {(uuid, line["late"]) for uuid in keys[line["late"]]["rewards"]}
    wrong: list[str] = []
    for uuid, row in seen.episodes.items():
        if row["how"] == "ended":
            end = (uuid, row["end_key"])
            if sent.get(end) != row["reward"]:
                wrong.append(f"{uuid}: the journal has reward {row['reward']}, its client sent {sent.get(end)}")
            if end in refused:
                wrong.append(f"{uuid}: its end was refused as too late, but the journal has it")
    return wrong


def doubled_claims(seen: Witnesses) -> list[str]:
    """Of the episodes that one claim key ever got, those of one claim at most were ended: the others never arrived."""
    ended: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for uuid, row in seen.episodes.items():
        if row["how"] == "ended" and row["claim_key"]:
            ended[row["client_uuid"], row["claim_key"]].add(row["group_uuid"] or uuid)
    return [f"claim {key} of {client} got {claims}" for (client, key), claims in ended.items() if len(claims) > 1]


def doubled_training(seen: Witnesses) -> list[str]:
    """Every episode is in one batch; a batch is the same in every attempt; of each one step is recorded; weights that
    have learned from a batch never learn from it again."""
    wrong: list[str] = []
    content: dict[str, dict[str, float]] = {}
    batch_of: dict[str, str] = {}
    of_step: dict[int, str] = {}
    begun_with = ""
    for line in seen.engine:
        if "started" in line:
            begun_with = of_step.get(line["version"], "")
        if "trained" in line:
            batch_id, members = line["trained"], line["episodes"]
            of_step[line["step"]] = batch_id
            if batch_id == begun_with:
                wrong.append(f"batch {batch_id} was trained again by weights that had learned from it")
            if content.setdefault(batch_id, members) != members:
                wrong.append(f"batch {batch_id} was sent twice with different episodes or rewards")
            for uuid in members:
                if batch_of.setdefault(uuid, batch_id) != batch_id:
                    wrong.append(f"episode {uuid} was trained in the batches {batch_of[uuid]} and {batch_id}")
    recorded = Counter(step["batch_id"] for step in seen.steps)
    wrong += [f"batch {batch_id} has {count} recorded steps" for batch_id, count in recorded.items() if count > 1]
    wrong += [
        f"batch {line['recorded']}: the engine was given the next one, but no step is recorded"
        for line in seen.engine
        if "recorded" in line and line["recorded"] not in recorded
    ]
    trained: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for uuid, row in seen.episodes.items():
        if row["state"] == EpisodeState.TRAINED:
            trained[row["batch_id"]][uuid] = row["reward"]
    for batch_id in recorded.keys() | trained.keys():
        if batch_id not in recorded:
            wrong.append(f"episodes of batch {batch_id} count as trained, but no step is recorded")
        elif trained[batch_id] != content.get(batch_id):
            wrong.append(f"batch {batch_id}: the engine trained {content.get(batch_id)}, recorded {trained[batch_id]}")
    return wrong


def wrong_counts(seen: Witnesses) -> list[str]:
    """The pool's counts are the journal's, and there was one run: no crash begins another."""
    states = Counter(row["state"] for row in seen.episodes.values())
    run = seen.runs[-1]
    pool = seen.pool
    pairs = {
        "runs": (1, len(seen.runs)),
        "claimed": (pool["running_episodes"], states[EpisodeState.CLAIMED]),
        "waiting": (pool["completed_episodes"], states[EpisodeState.FINISHED]),
        "in the batch": (pool["batched_episodes"], states[EpisodeState.BATCHED]),
        "trained": (run["trained"], states[EpisodeState.TRAINED]),
        "dropped and quarantined": (run["dropped"] + run["quarantined"], states[EpisodeState.DROPPED]),
        "dropped by the pool": (pool["dropped_episodes"], run["dropped"]),
        "quarantined by the pool": (pool["quarantined_episodes"], run["quarantined"]),
    }
    return [f"{name}: {said} against {counted}" for name, (said, counted) in pairs.items() if said != counted]
