"""What the monitor shows of a gateway's status.

Invariant: shares are of counts since the gateway's start; a share of nothing is unknown.
"""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.stats import Accounted, GatewayStatus, RouteStatus, Stats, SwarmStatus
from gateway.tui.format import (
    BAD,
    GOOD,
    UNKNOWN,
    WARNING,
    Columns,
    Line,
    View,
    counts_table,
    number,
    printable,
    seconds,
    share,
    short,
    table_of,
)

_ROUTES: Columns[tuple[str, RouteStatus]] = {
    "route": lambda one: one[0],
    ">in flight": lambda one: str(one[1].load.running),
    ">queued": lambda one: str(one[1].load.waiting),
    ">requests": lambda one: number(one[1].requests),
    ">shed": lambda one: number(one[1].load.refused),
    ">errors": lambda one: number(sum(one[1].errors.values())),
    "breaker": lambda one: UNKNOWN if one[1].breaker is None else f"{'! ' if _is_ill(one[1]) else ''}{one[1].breaker}",
    ">trained": lambda one: number(one[1].groups.trained),
    ">informative": lambda one: _informative(one[1]),
    ">wasted": lambda one: _waste(one[1]),
    "policy": lambda one: one[1].policy,
    "models": lambda one: ", ".join(one[1].models),
}
_SWARMS: Columns[SwarmStatus] = {
    # an address may name a user and a password
    "swarm server": lambda swarm: swarm.url.partition("://")[2].rpartition("@")[2],
    "engine": lambda swarm: swarm.engine.removeprefix("ENGINE."),
    "down for": lambda swarm: "" if swarm.down_since is None else f"! {_since(swarm.down_since)}",
    ">version": lambda swarm: _version(swarm.policy_version),
    ">open groups": lambda swarm: str(swarm.open_groups),
    ">behind": lambda swarm: str(swarm.background),
}

_ACCOUNTED = ("sampled", "timelines", "trained", "repeated", "dropped", "masked", "calls", "kept", "lost", "edited")


def view(status: GatewayStatus, per_second: float) -> View:
    """Everything of one status; ``per_second``: the rate of its requests."""
    failures = {
        "errors that callers got, by code": status.errors,
        "groups that were not trained, by reason": status.groups.dropped,
        "hooks without a result, by code": status.hook_failures,
        "fallbacks: answered without a group of the swarm's, by reason": status.fallbacks,
    }
    return View(
        state=short(status.engine or "no engine", 40).removeprefix("ENGINE."),
        version=_version(status.policy_version),
        batch=f"{number(status.groups.trained)} groups trained",
        now=f"{status.in_flight} in flight, {per_second:.1f}/s",
        head=_head(status, per_second),
        tables={
            "g": table_of(
                _ROUTES,
                status.routes.items(),
                lambda one: BAD if _is_ill(one[1]) else WARNING if one[1].load.waiting else "",
            ),
            "w": table_of(
                _SWARMS, status.swarms, lambda one: BAD if one.down_since else "", empty="no route has a swarm server"
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
            f"{number(status.groups.trained)} trained, {_informative(status)} of those submitted informative; "
            f"{number(sum(status.groups.dropped.values()))} dropped; "
            f"{number(sum(status.passed_through.values()))} requests passed through",
            label="groups",
        ),
        Line(
            f"{number(status.tokens.delivered)} delivered, {number(status.tokens.wasted)} wasted ({_waste(status)} of "
            "all: the price of the fan-out)",
            label="tokens",
        ),
    ]
    if any(status.accounted.tokens.values()):
        lines.append(_accounted(status.accounted))
    if status.engine_failure is not None:
        failure = status.engine_failure
        reason = f"{short(failure.reason, 200)} ({failure.count} in a row without a step)"
        lines.insert(1, Line(reason, WARNING, "died"))
    sessions = status.sessions.open
    behind = f"{status.background} pieces of work behind answers"
    lines.append(Line(behind + (f", {sessions} sessions" if sessions else ""), label="behind"))
    return lines


def _accounted(accounted: Accounted) -> Line:
    """What the swarm server counted, over all timelines."""
    told, why = {name: number(count) for name, count in accounted.tokens.items()}, accounted.why
    named = {name: told.get(name, UNKNOWN) for name in _ACCOUNTED}
    reasons = f" ({', '.join(short(reason, 60) for reason in list(why)[:3])})" if why else ""
    return Line(
        "{sampled} sampled in {timelines} rows: {trained} trained, {repeated} repeated, {dropped} dropped".format(
            **named
        )
        + reasons
        + "; {masked} masked; of {calls} calls {kept} kept, {lost} lost, {edited} edited".format(**named),
        WARNING if why else "",
        "server",
    )


def _informative(counts: Stats) -> str:
    """The share of submitted groups whose rewards differ: only those teach."""
    groups = counts.groups
    return share(groups.informative, groups.informative + groups.uninformative)


def _waste(counts: Stats) -> str:
    """The share of sampled completion tokens that were not delivered."""
    return share(counts.tokens.wasted, counts.tokens.wasted + counts.tokens.delivered)


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
