"""The latest groups of a journal, read beside the server that writes it.

Invariant: the journal is only read, a bounded number of its latest episodes, in one short transaction.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import ConfigError
from swarm.job import TrainJob, parse_job
from swarm.judged_groups import GroupAnswer, JudgedGroup, JudgedGroups, SampledText, StepRewards, Wanted, histogram
from swarm.measures import components_of
from swarm.server.journal.schema import reading
from swarm.server.journal.sqlite import clean, finish_reason_of, notes_of, state_name, unpack_trajectory
from swarm.types import Notes

#: Latest ends that are looked through, and steps with a histogram.
MAX_ENDS, MAX_STEPS = 5_000, 20

_COLUMNS = (
    "uuid, run_id, state, client_uuid, coalesce(task_id, '') AS task_id, reward, quarantine_reason, batch_id, step,"
    " coalesce(nullif(drop_reason, ''), lost_reason) AS why, ended_at, rowid, output"
)


class _Ended(NamedTuple):
    """An episode: its row, and what is in its output."""

    row: sqlite3.Row
    output: dict[str, Any]
    notes: Notes


def judged_groups(journal: Path, wanted: Wanted) -> JudgedGroups:
    """The latest groups of train episodes that are wanted.

    A group is what one call of a reward hook judged, or else the episodes of one task in one batch.

    Raises:
        ConfigError: there is no journal, or it cannot be read.
    """
    with reading(journal) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM episodes WHERE ended IS NOT NULL AND type = 'train'"
            " AND (how = 'ended' OR drop_reason != '') ORDER BY ended DESC LIMIT ?",
            (MAX_ENDS,),
        ).fetchall()
        members: dict[str, list[_Ended]] = {}
        for row in rows:
            output = json.loads(row["output"]) if row["output"] else {}
            episode = _Ended(row, output, notes_of(output))
            members.setdefault(_group_id(episode), []).append(episode)
        judged: list[JudgedGroup] = []
        for name, episodes in members.items():
            if len(judged) == wanted.limit:
                break
            if not name.startswith(wanted.group):
                continue
            episodes.sort(key=lambda episode: episode.row["rowid"])
            group = _group(name, episodes)
            if wanted.fits(group):
                uuids = [answer.episode_uuid for answer in group.answers]
                measured = _measured(connection, uuids, timelines=wanted.tokens)
                answers = [answer.model_copy(update=measured.get(answer.episode_uuid, {})) for answer in group.answers]
                judged.append(group.model_copy(update={"answers": answers}))
    return JudgedGroups(groups=judged, rewards=_rewards(rows))


def last_run(journal: Path) -> tuple[TrainJob | None, int]:
    """The job of the latest run of a journal, if it has one that can be read, and the last step that it did.

    Raises:
        ConfigError: there is no journal, or it cannot be read.
    """
    with reading(journal) as connection:
        run = connection.execute("SELECT run_id, job_yaml FROM runs ORDER BY rowid DESC LIMIT 1").fetchone()
        if run is None:
            return None, 0
        (step,) = connection.execute("SELECT coalesce(max(step), 0) FROM steps WHERE run_id = ?", run[:1]).fetchone()
    try:
        return (parse_job(run[1]) if run[1] else None), step
    except ConfigError:
        # of an earlier version
        return None, step


def _group_id(episode: _Ended) -> str:
    row, group_id = episode.row, episode.notes.group_id
    names = f"{row['run_id']}\n{row['batch_id']}\n{row['task_id']}"
    return clean(group_id) or hashlib.sha256(names.encode("utf-8", "replace")).hexdigest()[:16]


def _group(group_id: str, episodes: list[_Ended]) -> JudgedGroup:
    row, _, first = episodes[0]
    query = next((notes.task.get("main_query") for _, _, notes in episodes if notes.task), "")
    return JudgedGroup(
        group_id=group_id,
        task_id=row["task_id"],
        query=clean(query) if isinstance(query, str) else "",
        client=row["client_uuid"],
        route=clean(first.route),
        session=clean(first.session),
        request_id=clean(first.request_id),
        hook=clean(first.hook),
        code=clean(first.code),
        step=next((row["step"] for row, _, _ in episodes if row["step"] is not None), None),
        ended_at=max(row["ended_at"] for row, _, _ in episodes),
        answers=[
            GroupAnswer(
                episode_uuid=row["uuid"],
                state=state_name(row["state"]),
                why=row["quarantine_reason"] or row["why"] or "",
                reward=row["reward"],
                rank=notes.rank,
                is_success=output.get("is_success"),
                components=components_of(output.get("log_metrics") or {}),
                reason=clean(notes.reason),
                delivered=notes.delivered,
                ended_at=row["ended_at"],
            )
            for row, output, notes in episodes
        ],
    )


def _measured(connection: sqlite3.Connection, uuids: list[str], *, timelines: bool) -> dict[str, dict[str, Any]]:
    """What the tokens of these episodes say, as fields of :class:`GroupAnswer`; by episode."""
    measured: dict[str, dict[str, Any]] = {}
    for uuid, data, call in connection.execute(
        "SELECT t.episode, t.data, c.data FROM trajectories t LEFT JOIN calls c ON c.episode = t.episode"
        " WHERE t.episode IN (SELECT value FROM json_each(?))",
        (json.dumps(uuids),),
    ):
        trajectory = unpack_trajectory(uuid, data, call)
        lines = trajectory.timelines
        measured[uuid] = {
            "calls": trajectory.num_calls,
            "prompt_tokens": len(lines[0].prompt_ids),
            "sampled_tokens": trajectory.sampled_tokens,
            "policy_version": max(line.max_policy_version for line in lines),
            "finish_reason": finish_reason_of(call),
            "timelines": [
                SampledText(
                    prompt_ids=line.prompt_ids.tolist(),
                    response_ids=line.response_ids.tolist(),
                    mask=(line.response_mask + 0).tolist(),
                )
                for line in lines
                if timelines
            ],
        }
    return measured


def _rewards(rows: list[sqlite3.Row]) -> list[StepRewards]:
    """Of the latest steps of the latest run among ``rows``, the oldest first."""
    by_step: dict[int, list[float]] = {}
    batches: dict[int, str] = {}
    for row in rows:
        step, reward = row["step"], row["reward"]
        if row["run_id"] != rows[0]["run_id"] or step is None or reward is None:
            continue
        # of a step that was done again, the batch with the latest end
        if batches.setdefault(step, row["batch_id"]) == row["batch_id"]:
            by_step.setdefault(step, []).append(reward)
    steps = sorted(by_step)[-MAX_STEPS:]
    every = [reward for step in steps for reward in by_step[step]]
    return [histogram(step, by_step[step], min(every), max(every)) for step in steps]
