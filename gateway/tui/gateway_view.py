"""What the monitor shows of a gateway's status.

Invariant: shares are of counts since the gateway's start; a share of nothing is unknown.
"""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.tui.client import Counts, GatewayStatus, RouteStatus, SwarmStatus
from gateway.tui.format import (
    BAD,
    GOOD,
    UNKNOWN,
    WARNING,
    Line,
    Row,
    Table,
    View,
    counts_table,
    number,
    printable,
    seconds,
    share,
    short,
)

_ROUTES = (
    "route",
    ">in flight",
    ">queued",
    ">requests",
    ">shed",
    ">errors",
    "breaker",
    ">trained",
    ">informative",
    ">wasted",
    "policy",
    "models",
)
_SWARMS = ("swarm server", "engine", "down for", ">version", ">open groups", ">behind")


def view(status: GatewayStatus, per_second: float) -> View:
    """Everything of one status; ``per_second``: the rate of its requests."""
    swarms = [_swarm_row(swarm) for swarm in status.swarms]
    failures = {
        "errors that callers got, by code": status.errors,
        "groups that were not trained, by reason": status.groups.dropped,
        "hooks without a result, by code": status.hook_failures,
        "fallbacks: answered without a group of the swarm's, by reason": status.fallbacks,
    }
    return View(
        state=short(status.engine or "no engine", 40).removeprefix("ENGINE."),
        version=UNKNOWN if status.policy_version is None else str(status.policy_version),
        batch=f"{number(status.groups.trained)} groups trained",
        now=f"{status.in_flight} in flight, {per_second:.1f}/s",
        head=_head(status, per_second),
        tables={
            "g": Table(_ROUTES, [_route_row(name, route) for name, route in status.routes.items()]),
            "w": Table(_SWARMS, swarms, "" if swarms else "no route has a swarm server"),
            "f": counts_table(("count", "kind"), failures, "nothing has failed"),
        },
    )


def _head(status: GatewayStatus, per_second: float) -> list[Line]:
    engine = short((status.engine or "no swarm server").removeprefix("ENGINE."), 40)
    version = UNKNOWN if status.policy_version is None else str(status.policy_version)
    away = engine in ("unreachable", "OFFLINE")
    queued = sum(route.load.waiting for route in status.routes.values())
    failed = sum(status.errors.values())
    shed = sum(route.load.refused for route in status.routes.values())
    control = f", control: {short(status.control, 40)}" if status.control != "none" else ""
    lines = [
        Line(
            f"policy version {version}, model {short(status.model, 40) or UNKNOWN}{control}",
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
            f"{number(sum(status.groups.dropped.values()))} dropped",
            label="groups",
        ),
        Line(
            f"{number(status.tokens.delivered)} delivered, {number(status.tokens.wasted)} wasted ({_waste(status)} of "
            "all: the price of the fan-out)",
            label="tokens",
        ),
    ]
    if status.engine_failure is not None:
        failure = status.engine_failure
        reason = f"{short(failure.reason, 200)} ({failure.count} in a row without a step)"
        lines.insert(1, Line(reason, WARNING, "died"))
    sessions = status.sessions.get("open")
    behind = f"{status.background} pieces of work behind answers"
    lines.append(Line(behind + (f", {short(str(sessions), 20)} sessions" if sessions else ""), label="behind"))
    return lines


def _informative(counts: Counts) -> str:
    """The share of submitted groups whose rewards differ: only those teach."""
    groups = counts.groups
    return share(groups.informative, groups.informative + groups.uninformative)


def _waste(counts: Counts) -> str:
    """The share of sampled completion tokens that nobody got."""
    return share(counts.tokens.wasted, counts.tokens.wasted + counts.tokens.delivered)


def _route_row(name: str, route: RouteStatus) -> Row:
    ill = route.breaker not in (None, "closed")
    return Row(
        (
            name,
            str(route.load.running),
            str(route.load.waiting),
            number(route.requests),
            number(route.load.refused),
            number(sum(route.errors.values())),
            UNKNOWN if route.breaker is None else f"! {route.breaker}" if ill else route.breaker,
            number(route.groups.trained),
            _informative(route),
            _waste(route),
            route.policy,
            ", ".join(route.models),
        ),
        BAD if ill else WARNING if route.load.waiting else "",
    )


def _swarm_row(swarm: SwarmStatus) -> Row:
    down = swarm.down_since is not None
    return Row(
        (
            # an address may name a user and a password
            swarm.url.partition("://")[2].rpartition("@")[2],
            swarm.engine.removeprefix("ENGINE."),
            f"! {_since(swarm.down_since)}" if swarm.down_since is not None else "",
            UNKNOWN if swarm.policy_version is None else str(swarm.policy_version),
            str(swarm.open_groups),
            str(swarm.background),
        ),
        BAD if down else "",
    )


def _since(moment: str) -> str:
    try:
        began = datetime.fromisoformat(moment).astimezone(UTC)
    except (ValueError, OverflowError):
        return printable(moment)
    return seconds((datetime.now(UTC) - began).total_seconds())
