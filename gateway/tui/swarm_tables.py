"""The tables of a swarm server's page: episodes, tasks, clients, what was dropped, and what happened.

Invariant: a table is made from one status alone, so its rows belong together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

from textual.content import Content

from gateway.cli.status import RESPONSE_TOKENS, REWARD, printable
from gateway.tui.history import Line
from gateway.tui.swarm_text import DIM, WARNING
from gateway.tui.table import Column, Row, counted, lines
from gateway.tui.words import UNKNOWN, bar, measure, number, seconds, short
from swarm.protocol import RunningEpisode, ServerStatus
from swarm.types import StepResult

_TASK_BAR = 10


class Order(StrEnum):
    """What running episodes are sorted by."""

    IDLE = "idle"
    AGE = "age"
    CALLS = "calls"
    CLIENT = "client"
    TASK = "task"

    @property
    def next(self) -> Order:
        """The one after it, round and round."""
        orders = list(Order)
        return orders[(orders.index(self) + 1) % len(orders)]


_KEYS: dict[Order, Callable[[RunningEpisode], tuple[object, ...]]] = {
    Order.IDLE: lambda one: (-one.idle_seconds,),
    Order.AGE: lambda one: (-one.seconds,),
    Order.CALLS: lambda one: (-one.calls, -one.in_flight),
    Order.CLIENT: lambda one: (one.client_uuid, one.task_id),
    Order.TASK: lambda one: (one.task_id, one.client_uuid),
}

_EPISODES = (
    Column("episode", most=8),
    Column("client", most=24),
    Column("task", rank=3, most=24),
    Column("type", rank=5),
    Column("age", rank=1, align="right"),
    Column("idle", align="right"),
    Column("of", rank=4, align="right"),
    Column("left", rank=6, align="right"),
    Column("calls", rank=2, align="right"),
    Column("now", rank=1, align="right"),
    Column("note", rank=7, most=30),
)
_TASKS = (
    Column("task", most=40),
    Column("finished", least=20),
    Column("running", rank=1, align="right"),
    Column("state"),
)
_CLIENTS = (
    Column("client", most=36),
    Column("", most=8, least=8),
    Column("run", align="right"),
    Column("claimed", rank=4, align="right"),
    Column("ended", rank=2, align="right"),
    Column("trained", align="right"),
    Column("waiting", rank=3, align="right"),
    Column("dropped", rank=1, align="right"),
    Column("aborted", rank=5, align="right"),
    Column("timed out", rank=1, align="right"),
    Column("share", rank=6, align="right"),
    Column("silent", rank=2, align="right"),
    Column("note", rank=2, most=20),
)
_LOSSES = (Column("episodes", align="right"), Column("why", most=200))
_STEPS = (
    Column("step", align="right"),
    Column("reward", align="right"),
    Column("± ", rank=3, align="right"),
    Column("tokens", rank=1, align="right"),
    Column("time", align="right"),
    Column("tasks", rank=2, align="right"),
    Column("episodes", rank=2, align="right"),
)


def chosen(episodes: Sequence[RunningEpisode], order: Order, wanted: str) -> list[RunningEpisode]:
    """The episodes of which each word of ``wanted`` stands in a name, sorted by ``order``."""
    words = wanted.lower().split()
    kept = [one for one in episodes if all(word in _names(one) for word in words)]
    return sorted(kept, key=_KEYS[order])  # pyright: ignore[reportArgumentType]


def _names(episode: RunningEpisode) -> str:
    names = (episode.episode_uuid, episode.client_uuid, episode.task_id, episode.episode_type, episode.quarantined)
    return " ".join(names).lower()


def episodes(status: ServerStatus, order: Order, wanted: str, width: int) -> list[Content]:
    """Running episodes; one that has been idle for more than half of what it may is marked with ``!``."""
    rows = [_episode_row(one) for one in chosen(status.running, order, wanted)]
    total = status.pool.running_episodes if status.pool is not None else len(status.running)
    told = len(status.running)
    note = f"by {order.value}" + (f", with {short(wanted, 30)!r}" if wanted else "")
    if total > told:
        note += f"; of {total} the {told} that have been idle for longest"
    none = "no episode has these words" if wanted and told else "no episode runs"
    return [Content.styled(note, DIM), *(lines(_EPISODES, rows, width) if rows else [_none(none)])]


def _episode_row(one: RunningEpisode) -> Row:
    late = one.idle_seconds > one.idle_timeout / 2
    return Row(
        (
            one.episode_uuid[-8:],
            one.client_uuid,
            one.task_id or UNKNOWN,
            one.episode_type,
            seconds(one.seconds),
            ("! " if late else "") + seconds(one.idle_seconds),
            seconds(one.idle_timeout),
            seconds(one.seconds_left),
            str(one.calls),
            str(one.in_flight) if one.in_flight else "",
            one.quarantined,
        ),
        WARNING if late or one.quarantined else "",
    )


def tasks(status: ServerStatus, width: int) -> list[Content]:
    """What the pool has by task: those that lack least first, then those that only run, complete ones last."""
    pool = status.pool
    if pool is None:
        return [_none("no job, no pool")]
    running = Counter(one.task_id for one in status.running if one.task_id and one.episode_type == "train")
    finished = dict(pool.tasks)
    names = [*finished, *(task for task in running if task not in finished)]
    names.sort(key=lambda task: (finished.get(task, 0) >= pool.num_repeat, -finished.get(task, 0)))
    rows: list[Row] = []
    for task in names:
        done = finished.get(task, 0)
        lacking = pool.num_repeat - done
        rows.append(
            Row(
                (
                    task,
                    f"{bar(done, pool.num_repeat, _TASK_BAR)} {done}/{pool.num_repeat}",
                    str(running[task]) if task in running else "",
                    "complete" if lacking <= 0 else f"{lacking} to come" if done else "begun",
                ),
                "" if lacking > 0 else DIM,
            )
        )
    complete = sum(count >= pool.num_repeat for count in finished.values())
    note = f"{complete} complete, {len(names) - complete} begun; a batch takes {pool.batch_size}"
    return [Content.styled(note, DIM), *(lines(_TASKS, rows, width) if rows else [_none("no task has begun")])]


def clients(status: ServerStatus, width: int) -> list[Content]:
    """Who runs episodes, the busiest first; counts are since the server started."""
    ordered = sorted(status.clients, key=lambda row: (not row.active, -row.running, row.idle_seconds))
    rows = [
        Row(
            (
                row.client_uuid,
                "● active" if row.active else "○ silent",
                str(row.running),
                number(row.claimed),
                number(row.ended),
                number(row.trained),
                number(row.waiting),
                number(row.dropped),
                number(row.aborted),
                number(row.timed_out),
                str(row.groups),
                seconds(row.idle_seconds),
                ", ".join(word for word, holds in (("throttled", row.throttled), ("agreed", row.agreed)) if holds),
            ),
            "" if row.active else DIM,
        )
        for row in ordered
    ]
    return lines(_CLIENTS, rows, width) if rows else [_none("no client has come")]


def losses(status: ServerStatus, width: int) -> list[Content]:
    """What was not trained, by reason, and how episodes ended; since the server started."""
    counts = {
        "dropped: finished, or given up, and never trained": status.dropped,
        "quarantined: token ids, log-probabilities and usage disagree": status.quarantined,
        "how episodes ended": status.outcomes,
    }
    return counted(_LOSSES, counts, width) or [_none("nothing was dropped")]


def steps(history: Sequence[StepResult], width: int) -> list[Content]:
    """The latest steps, the last first."""
    rows = [
        Row(
            (
                str(step.step),
                _metric(step, REWARD),
                _metric(step, "swarm/reward_std"),
                _metric(step, RESPONSE_TOKENS),
                seconds(step.seconds),
                _metric(step, "swarm/tasks"),
                _metric(step, "swarm/episodes"),
            )
        )
        for step in reversed(history)
    ]
    return lines(_STEPS, rows, width) if rows else [_none("no step is done yet")]


def _metric(step: StepResult, name: str) -> str:
    return measure(step.metrics[name]) if name in step.metrics else UNKNOWN


def happened(chronicle: Sequence[Line], last_lines: Sequence[str], width: int) -> list[Content]:
    """What happened while somebody watched and what was pushed, the last first, and a dead engine's last words."""
    made: list[Content] = []
    if last_lines:
        made.append(Content.styled("the engine's last lines", WARNING))
        made += [Content(short(f"| {line}", width)) for line in last_lines]
    for line in reversed(chronicle):
        tag = f"[{short(line.tag, 20)}] " if line.tag else ""
        made.append(Content.assemble((f"{_clock(line.at)} ", DIM), (tag, "bold"), printable(line.text)))
    return made or [_none("nothing has happened yet")]


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        # whoever pushes a line says when it was
        return "--:--:--"


def _none(words: str) -> Content:
    return Content.styled(words, DIM)
