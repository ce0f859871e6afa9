"""What is shown of judged groups: a row for each, the answers of one side by side, rewards by step; without textual.

Invariant: texts from a server are printable, see :mod:`gateway.views.format`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.views.format import (
    BAD,
    DIM,
    UNKNOWN,
    WARNING,
    Columns,
    Table,
    measure,
    printable,
    seconds,
    short,
    table_of,
)
from swarm.judged_groups import GroupAnswer, JudgedGroup, StepRewards
from swarm.progress import reward

_BLOCKS = " ▁▂▃▄▅▆▇█"
_REWARDS_SHOWN = 8

_ANSWERS: Columns[tuple[int, GroupAnswer]] = {
    ">": lambda row: str(row[0]),
    ">reward": lambda row: UNKNOWN if row[1].reward is None else reward(row[1].reward),
    ">rank": lambda row: str(row[1].rank or ""),
    "what became of it": lambda row: _fate(row[1]),
    ">tokens": lambda row: str(row[1].sampled_tokens or ""),
    ">calls": lambda row: str(row[1].calls or ""),
    ">version": lambda row: "" if row[1].policy_version is None else str(row[1].policy_version),
    "end": lambda row: row[1].finish_reason,
    "components": lambda row: ", ".join(f"{name} {measure(value)}" for name, value in row[1].components.items()),
    "reason": lambda row: row[1].reason,
}
_REWARDS: Columns[StepRewards] = {
    ">step": lambda step: str(step.step),
    # of all steps, so that their bars can be compared
    ">from": lambda step: reward(step.low),
    "rewards": lambda step: bars(step.counts),
    ">to": lambda step: reward(step.high),
    ">answers": lambda step: str(sum(step.counts)),
}


def groups_table(groups: Sequence[JudgedGroup], now: float) -> Table:
    """A row for each group; ``now`` is in Unix seconds."""
    columns: Columns[JudgedGroup] = {
        "group": lambda group: group.group_id[:12],
        ">ago": lambda group: seconds(max(0.0, now - group.ended_at)),
        "from": lambda group: short(group.route or group.client, 20),
        "session": lambda group: short(group.session, 12),
        ">step": lambda group: "" if group.step is None else str(group.step),
        "rewards": lambda group: _rewards(group),
        "task": lambda group: short(group.query or group.task_id, 40),
        "what became of it": lambda group: short(group.fate, 60),
    }
    return table_of(columns, groups, lambda group: _style(group), empty="no group fits")


def answers_table(group: JudgedGroup) -> Table:
    """The answers of one group side by side."""
    return table_of(
        _ANSWERS,
        enumerate(group.answers, 1),
        lambda row: BAD if row[1].state == "dropped" else WARNING if row[1].why else "",
        note=short(f"group {group.group_id[:12]}: {group.query or group.task_id}", 100),
    )


def rewards_table(rewards: Sequence[StepRewards]) -> Table:
    """Where the rewards of each step lie."""
    return table_of(_REWARDS, rewards, empty="nothing was trained yet")


def facts(group: JudgedGroup) -> list[str]:
    """What is known of a group as a whole, a line each."""
    fields = {
        "group": group.group_id,
        "task": " ".join(filter(None, (group.task_id, group.query))),
        "from": " ".join(filter(None, (group.route, group.client))),
        "session": group.session,
        "request": group.request_id,
        "hook": group.hook,
        "code": group.code,
        "step": "" if group.step is None else str(group.step),
        "became": group.fate,
    }
    return [f"{name:<8}{printable(value)}" for name, value in fields.items() if value]


def bars(counts: Sequence[int]) -> str:
    """A histogram in one cell each; the fullest part is full."""
    most = max(counts, default=0)
    return "".join(_BLOCKS[-(-8 * count // most) if most else 0] for count in counts)


def _rewards(group: JudgedGroup) -> str:
    shown = " ".join(reward(value) for value in group.rewards[:_REWARDS_SHOWN])
    more = len(group.rewards) - _REWARDS_SHOWN
    return (shown or UNKNOWN) + (f" +{more}" if more > 0 else "")


def _fate(answer: GroupAnswer) -> str:
    parts = (["delivered"] if answer.delivered else []) + [answer.state]
    return ", ".join(parts) + (f": {answer.why}" if answer.why else "")


def _style(group: JudgedGroup) -> str:
    if any(answer.state == "dropped" for answer in group.answers):
        return WARNING
    # equal rewards teach nothing
    return DIM if len(set(group.rewards)) == 1 else ""
