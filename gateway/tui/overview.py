"""The first page: one row for each server, and in words what is wrong with those that do not answer.

Invariant: every server has its row, whatever it says or does not say.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from gateway.cli.status import printable
from gateway.tui.following import GatewayFollower, SwarmFollower
from gateway.tui.swarm_text import BAD, DIM, WARNING, progress, state_words, trouble_lines
from gateway.tui.table import Column, Row, lines
from gateway.tui.words import UNKNOWN, bar, number, seconds
from swarm.states import EngineState

_BAR = 8
_COLUMNS = (
    Column("tab", align="right"),
    Column("server", most=36),
    Column("state", most=20),
    Column("version", rank=2, align="right"),
    Column("batch", rank=1, most=32),
    Column("now", rank=1, most=32),
    Column("heard", align="right"),
)

AnyFollower = SwarmFollower | GatewayFollower


def overview(followers: Sequence[AnyFollower], width: int) -> list[Content]:
    """The rows, and below them the words of those in trouble."""
    rows = [_row(place, follower) for place, follower in enumerate(followers, 2)]
    made = lines(_COLUMNS, rows, width)
    for follower in followers:
        made += trouble_lines(follower.trouble, follower.next_try, follower.age)
        if follower.trouble is None and isinstance(follower, SwarmFollower) and follower.status is not None:
            engine = follower.status.engine
            if engine.engine_status is EngineState.OFFLINE:
                why = printable(engine.engine_status_detail)
                made.append(Content.styled(f"! {follower.target.name} is OFFLINE: {why}", WARNING))
    return made


def answering(followers: Sequence[AnyFollower]) -> str:
    """``2 of 3 servers answer``, or ``the gateway answers`` where there is one server alone."""
    well = sum(follower.trouble is None and follower.status is not None for follower in followers)
    if len(followers) == 1:
        return f"the {followers[0].target.kind} {'answers' if well else 'does not answer'}"
    return f"{well} of {len(followers)} servers answer"


def _row(place: int, follower: AnyFollower) -> Row:
    state, version, batch, now = UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
    if isinstance(follower, SwarmFollower):
        if (status := follower.status) is not None:
            state = state_words(status.engine.engine_status)[0]
            version = str(status.engine.global_step)
            if status.pool is not None:
                done, total, words = progress(status.pool, status.job)
                batch = f"{bar(done, total, _BAR)} {words}" if total else words
                now = f"{status.pool.running_episodes} run, {status.waiting_claims} claims wait"
    elif (told := follower.status) is not None:
        state = (told.engine or "no engine").removeprefix("ENGINE.")
        version = UNKNOWN if told.policy_version is None else str(told.policy_version)
        batch = f"{number(told.groups.trained)} groups trained"
        now = f"{told.in_flight} in flight, {follower.growth.per_second:.1f}/s"
    if follower.trouble is not None:
        state = f"! {follower.trouble.why.value}"
    heard = UNKNOWN if follower.age is None else seconds(follower.age)
    return Row((str(place), follower.target.name, state, version, batch, now, heard), _style(follower))


def _style(follower: AnyFollower) -> str:
    if follower.trouble is not None:
        return BAD
    return DIM if follower.status is None else ""
