"""The latest groups of a journal, read beside the server that writes it.

Invariant: the journal is only read, a bounded number of its latest episodes, in one short transaction.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError
from swarm.job import TrainJob, parse_job
from swarm.judged_groups import GroupAnswer, JudgedGroup, JudgedGroups, SampledText, StepRewards, Wanted, histogram
from swarm.measures import components_of
from swarm.server.journal.codec import STATE_NAMES, clean, finish_reason_of, notes_of, unpack_trajectory
from swarm.server.journal.schema import reading
from swarm.tokens import Trajectory
from swarm.types import Notes

#: Latest ends that are looked through, groups in one answer, and steps with a histogram.
MAX_ENDS, MAX_GROUPS, MAX_STEPS = 5_000, 200, 20

_COLUMNS = (
    "uuid, run_id, state, client_uuid, task_id, reward, output, coalesce(nullif(drop_reason, ''), lost_reason),"
    " quarantine_reason, batch_id, step, ended_at, rowid"
)


def judged_groups(
    journal: Path, wanted: Wanted | None = None, group_id: str = "", limit: int = 20, *, tokens: bool = False
) -> JudgedGroups:
    """The latest groups of train episodes that ``wanted`` fits, or the one whose id begins with ``group_id``.

    A group is what one call of a reward hook judged, or else the episodes of one task in one batch. With ``tokens`` the
    answers have their timelines.

    Raises:
        ConfigError: there is no journal, or it cannot be read.
    """
    wanted = wanted or Wanted()
    with reading(journal) as connection:
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM episodes WHERE ended IS NOT NULL AND type = 'train'"
            " AND (how = 'ended' OR drop_reason != '') ORDER BY ended DESC LIMIT ?",
            (MAX_ENDS,),
        ).fetchall()
        members: dict[str, list[tuple[Any, ...]]] = {}
        for row in rows:
            output = json.loads(row[6]) if row[6] else {}
            members.setdefault(_group_id(row, output), []).append((*row[:6], output, *row[7:]))
        judged: list[JudgedGroup] = []
        for name, episodes in members.items():
            if len(judged) == min(limit, MAX_GROUPS):
                break
            if not name.startswith(group_id):
                continue
            group = _group(name, sorted(episodes, key=lambda row: row[-1]))
            if wanted.fits(group):
                judged.append(_with_tokens(connection, group, timelines=tokens))
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


def _group_id(row: tuple[Any, ...], output: dict[str, Any]) -> str:
    if group_id := notes_of(output).group_id:
        return clean(group_id)
    _, run_id, _, _, task_id, *_, batch_id, _, _, _ = row
    return hashlib.sha256(f"{run_id}\n{batch_id}\n{task_id}".encode("utf-8", "replace")).hexdigest()[:16]


def _group(group_id: str, episodes: list[tuple[Any, ...]]) -> JudgedGroup:
    notes_of_group = [notes_of(row[6]) for row in episodes]
    first = notes_of_group[0]
    query = next((notes.task.get("main_query") for notes in notes_of_group if notes.task), "")
    return JudgedGroup(
        group_id=group_id,
        task_id=episodes[0][4] or "",
        query=clean(query) if isinstance(query, str) else "",
        client=episodes[0][3],
        route=clean(first.route),
        session=clean(first.session),
        request_id=clean(first.request_id),
        hook=clean(first.hook),
        code=clean(first.code),
        step=next((row[10] for row in episodes if row[10] is not None), None),
        ended_at=max(row[11] for row in episodes),
        answers=[_answer(row, notes) for row, notes in zip(episodes, notes_of_group, strict=True)],
    )


def _answer(row: tuple[Any, ...], notes: Notes) -> GroupAnswer:
    uuid, _, state, _, _, reward, output, dropped, quarantined, _, _, ended_at, _ = row
    return GroupAnswer(
        episode_uuid=uuid,
        state=str(STATE_NAMES.get(state, state)),
        why=quarantined or dropped or "",
        reward=reward,
        rank=notes.rank,
        is_success=output.get("is_success"),
        components=components_of(output.get("log_metrics") or {}),
        reason=clean(notes.reason),
        delivered=notes.delivered,
        ended_at=ended_at,
    )


def _with_tokens(connection: sqlite3.Connection, group: JudgedGroup, *, timelines: bool) -> JudgedGroup:
    uuids = json.dumps([answer.episode_uuid for answer in group.answers])
    stored = {
        uuid: (unpack_trajectory(uuid, data, call), "" if call is None else finish_reason_of(call))
        for uuid, data, call in connection.execute(
            "SELECT t.episode, t.data, c.data FROM trajectories t LEFT JOIN calls c ON c.episode = t.episode"
            " WHERE t.episode IN (SELECT value FROM json_each(?))",
            (uuids,),
        )
    }
    return group.model_copy(
        update={
            "answers": [
                answer
                if answer.episode_uuid not in stored
                else _measured(answer, *stored[answer.episode_uuid], timelines)
                for answer in group.answers
            ]
        }
    )


def _measured(answer: GroupAnswer, trajectory: Trajectory, finish_reason: str, timelines: bool) -> GroupAnswer:
    lines = trajectory.timelines
    return answer.model_copy(
        update={
            "calls": trajectory.num_calls,
            "prompt_tokens": len(lines[0].prompt_ids),
            "sampled_tokens": trajectory.sampled_tokens,
            "policy_version": max(line.max_policy_version for line in lines),
            "finish_reason": finish_reason,
            "timelines": [
                SampledText(
                    prompt_ids=line.prompt_ids.tolist(),
                    response_ids=line.response_ids.tolist(),
                    mask=(line.response_mask + 0).tolist(),
                )
                for line in lines
            ]
            if timelines
            else [],
        }
    )


def _rewards(rows: list[tuple[Any, ...]]) -> list[StepRewards]:
    """Of the latest steps of the latest run among ``rows``, the oldest first."""
    by_step: dict[int, list[float]] = {}
    batches: dict[int, str] = {}
    run_id = rows[0][1] if rows else ""
    for row in rows:
        if row[1] != run_id or row[10] is None or row[5] is None:
            continue
        # of a step that was done again, the batch with the latest end
        if batches.setdefault(row[10], row[9]) == row[9]:
            by_step.setdefault(row[10], []).append(row[5])
    steps = sorted(by_step)[-MAX_STEPS:]
    every = [reward for step in steps for reward in by_step[step]]
    return [histogram(step, by_step[step], min(every), max(every)) for step in steps]
