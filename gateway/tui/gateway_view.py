"""What the monitor shows of a gateway's status.

Invariant: shares are of counts since the gateway's start, those of rewards are of the latest groups; a share of nothing
is unknown.
"""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.stats import GatewayStatus, RouteStatus, Stats, SwarmStatus
from gateway.views.format import (
    BAD,
    GOOD,
    UNKNOWN,
    WARNING,
    Columns,
    Line,
    View,
    counts_table,
    number,
    percent,
    printable,
    seconds,
    short,
    table_of,
)
from swarm.progress import reward

_ROUTES: Columns[tuple[str, RouteStatus]] = {
    "route": lambda row: row[0],
    ">in flight": lambda row: str(row[1].load.running),
    ">queued": lambda row: str(row[1].load.waiting),
    ">requests": lambda row: number(row[1].requests),
    ">shed": lambda row: number(row[1].load.refused),
    ">errors": lambda row: number(sum(row[1].errors.values())),
    "breaker": lambda row: UNKNOWN if row[1].breaker is None else f"{'! ' if _is_ill(row[1]) else ''}{row[1].breaker}",
    ">trained": lambda row: number(row[1].groups.trained),
    ">reward": lambda row: _reward(row[1]),
    ">groups differ": lambda row: _differ(row[1]),
    ">not delivered": lambda row: _waste(row[1]),
    "policy": lambda row: row[1].policy,
    "models": lambda row: ", ".join(row[1].models),
}
_SWARMS: Columns[SwarmStatus] = {
    # an address may name a user and a password
    "swarm server": lambda swarm: swarm.url.partition("://")[2].rpartition("@")[2],
    "engine": lambda swarm: swarm.engine.removeprefix("ENGINE."),
    "down for": lambda swarm: "" if swarm.down_since is None else f"! {_since(swarm.down_since)}",
    ">version": lambda swarm: _version(swarm.policy_version),
    ">open groups": lambda swarm: str(swarm.open_groups),
    ">background": lambda swarm: str(swarm.background),
}

#: Groups without a signal from which on that is a warning.
_ENOUGH = 8


def view(status: GatewayStatus, per_second: float) -> View:
    """Everything of one status; ``per_second``: the rate of its requests."""
    failures = {
        "errors that callers got, by code": status.errors,
        "groups that were not trained, by reason": status.groups.dropped,
        "hooks without a result, by code": status.hook_failures,
        "the same by what happened first": status.hook_errors,
        "fallbacks: answered without a group of the swarm's, by reason": status.fallbacks,
    }
    return View(
        state=short(status.engine or "no engine", 40).removeprefix("ENGINE."),
        version=_version(status.policy_version),
        batch=f"{number(status.groups.trained)} groups trained",
        now=f"{status.in_flight} in flight, {per_second:.1f}/s",
        reward=f"{_reward(status).partition(' ')[0]}, {_differ(status)} differ" if status.recent.groups else UNKNOWN,
        head=_head(status, per_second),
        tables={
            "g": table_of(
                _ROUTES,
                status.routes.items(),
                lambda row: BAD if _is_ill(row[1]) else WARNING if row[1].load.waiting else "",
            ),
            "w": table_of(
                _SWARMS,
                status.swarms,
                lambda swarm: BAD if swarm.down_since else "",
                empty="no route has a swarm server",
            ),
            "f": counts_table(("count", "kind"), failures, "nothing has failed"),
        },
    )


def _head(status: GatewayStatus, per_second: float) -> list[Line]:
    engine = short((status.engine or "no swarm server").removeprefix("ENGINE."), 40)
    away = engine in ("unreachable", "OFFLINE")
    queued = sum(route.load.waiting for route in status.routes.values())
    failed = sum(status.errors.values())
    shed = sum(route.load.refused for route in status.routes.values())
    control = f", control: {short(status.control, 40)}" if status.control != "none" else ""
    lines = [
        Line(
            f"policy version {_version(status.policy_version)}, model {short(status.model, 40) or UNKNOWN}{control}",
            label=f"{'○' if away else '●'} engine {engine},",
            label_style=BAD if away else GOOD,
        ),
        Line(
            f"{number(status.requests)} requests, {per_second:.1f}/s; {status.in_flight} in flight, {queued} queued, "
            f"{number(shed)} shed, {number(failed)} errors, {number(status.joined)} retries joined",
            WARNING if queued else "",
            "users",
        ),
        Line(
            f"{number(status.groups.trained)} trained, {number(sum(status.groups.dropped.values()))} dropped; "
            f"{number(sum(status.passed_through.values()))} requests passed through",
            label="groups",
        ),
        Line(
            f"{number(status.tokens.delivered)} of answers that users got, {number(status.tokens.wasted)} of the "
            f"others ({_waste(status)}: the price of several answers to each request, not a fault)",
            label="tokens",
        ),
    ]
    if recent := status.recent.groups:
        line = f"reward {_reward(status)}; {_differ(status)} groups differ, of the latest judged"
        nothing = recent >= _ENOUGH and not status.recent.with_signal
        words = f"! {line}: nothing to learn, make the reward finer or raise job.temperature" if nothing else line
        lines.append(Line(words, WARNING if nothing else "", "learns"))
    if status.reload_error:
        lines.append(Line(f"! the last reload failed: {printable(status.reload_error)}", WARNING, "config"))
    if status.engine_failure is not None:
        failure = status.engine_failure
        reason = f"{short(failure.reason, 200)} ({failure.count} in a row without a step)"
        lines.insert(1, Line(reason, WARNING, "died"))
    sessions = status.sessions.open
    behind = f"{status.background} tasks after answers went out (other answers, judging, submitting)"
    lines.append(Line(behind + (f"; {sessions} conversations" if sessions else ""), label="rest", minor=True))
    return lines


def _reward(counts: Stats) -> str:
    """Mean reward and spread within a group, of the latest groups."""
    recent = counts.recent
    return (
        f"{reward(recent.reward / recent.groups)} ±{reward(recent.spread / recent.groups)}"
        if recent.groups
        else UNKNOWN
    )


def _differ(counts: Stats) -> str:
    """``37 of 40``: those of the latest groups whose rewards differ."""
    return f"{counts.recent.with_signal} of {counts.recent.groups}" if counts.recent.groups else UNKNOWN


def _waste(counts: Stats) -> str:
    """The share of sampled completion tokens that were not delivered."""
    return percent(counts.tokens.wasted, counts.tokens.wasted + counts.tokens.delivered)


def _is_ill(route: RouteStatus) -> bool:
    return route.breaker not in (None, "closed")


def _version(policy_version: int | None) -> str:
    return UNKNOWN if policy_version is None else str(policy_version)


def _since(moment: str) -> str:
    try:
        began = datetime.fromisoformat(moment).astimezone(UTC)
    except (ValueError, OverflowError):
        return printable(moment)
    return seconds((datetime.now(UTC) - began).total_seconds())
