"""A gateway's page: its head, its routes, the swarm servers as it sees them, and what went wrong.

Invariant: shares are of what the gateway counted since its start; without anything to count they are not known.
"""

from __future__ import annotations

from datetime import UTC, datetime

from textual.content import Content

from gateway.tui.swarm_text import BAD, DIM, GOOD, WARNING, died, labelled
from gateway.tui.table import Column, Row, counted, lines
from gateway.tui.told import Counts, GatewayStatus, RouteTold, SwarmTold
from gateway.tui.words import UNKNOWN, number, seconds, share, short

_ROUTES = (
    Column("route", most=20),
    Column("in flight", align="right"),
    Column("queued", align="right"),
    Column("shed", rank=1, align="right"),
    Column("requests", align="right"),
    Column("trained", rank=2, align="right"),
    Column("informative", rank=3, align="right"),
    Column("wasted", rank=4, align="right"),
    Column("errors", rank=1, align="right"),
    Column("breaker", rank=1, most=12),
    Column("policy", rank=5, most=8),
    Column("models", rank=6, most=40),
)
_SWARMS = (
    Column("swarm server", most=40, least=21),
    Column("engine", most=18),
    Column("version", rank=1, align="right"),
    Column("open groups", rank=3, align="right"),
    Column("standby", rank=2, align="right"),
    Column("behind", rank=4, align="right"),
    Column("down for"),
)
_COUNTED = (Column("count", align="right"), Column("kind", most=80))


def head_lines(status: GatewayStatus, per_second: float, fresh: tuple[str, str]) -> list[Content]:
    """The gateway as a whole."""
    engine = short((status.engine or "no swarm server").removeprefix("ENGINE."), 40)
    version = UNKNOWN if status.policy_version is None else str(status.policy_version)
    away = engine in ("unreachable", "OFFLINE")
    queued = sum(route.load.waiting for route in status.routes.values())
    shed = sum(route.load.refused for route in status.routes.values())
    failed = sum(status.errors.values())
    lines_ = [
        Content.assemble(
            ("○ " if away else "● ", BAD if away else GOOD),
            (f"engine {engine}", BAD if away else "bold"),
            f", policy version {version}, model {short(status.model, 40) or UNKNOWN}"
            + (f", control: {short(status.control, 40)}" if status.control != "none" else "")
            + "  ",
            fresh,
        ),
        labelled(
            "users",
            f"{number(status.requests)} requests, {per_second:.1f}/s; {status.in_flight} in flight, {queued} queued, "
            f"{number(shed)} shed, {number(failed)} errors, {number(status.joined)} retries joined",
            WARNING if queued else "",
        ),
        labelled(
            "groups",
            f"{number(status.groups.trained)} trained, {informative(status)} of those submitted informative; "
            f"{number(sum(status.groups.dropped.values()))} dropped",
        ),
        labelled(
            "tokens",
            f"{number(status.tokens.delivered)} delivered, {number(status.tokens.wasted)} wasted ({waste(status)} of "
            "all: the price of the fan-out)",
        ),
    ]
    if status.engine_failure is not None:
        lines_.insert(1, died(status.engine_failure.count, short(status.engine_failure.reason, 200)))
    sessions = status.sessions.get("open")
    behind = f"{status.background} pieces of work behind answers"
    lines_.append(labelled("behind", behind + (f", {short(str(sessions), 20)} sessions" if sessions else "")))
    return lines_


def informative(counts: Counts) -> str:
    """The share of submitted groups whose rewards differ: only those teach."""
    groups = counts.groups
    return share(groups.informative, groups.informative + groups.uninformative)


def waste(counts: Counts) -> str:
    """The share of sampled completion tokens that nobody got."""
    return share(counts.tokens.wasted, counts.tokens.wasted + counts.tokens.delivered)


def routes(status: GatewayStatus, width: int) -> list[Content]:
    """One row per route; a breaker that is not closed is marked with ``!``."""
    return lines(_ROUTES, [_route_row(name, route) for name, route in status.routes.items()], width)


def _route_row(name: str, route: RouteTold) -> Row:
    ill = route.breaker not in (None, "closed")
    return Row(
        (
            name,
            str(route.load.running),
            str(route.load.waiting),
            number(route.load.refused),
            number(route.requests),
            number(route.groups.trained),
            informative(route),
            waste(route),
            number(sum(route.errors.values())),
            UNKNOWN if route.breaker is None else f"! {route.breaker}" if ill else route.breaker,
            route.policy,
            ", ".join(route.models),
        ),
        BAD if ill else WARNING if route.load.waiting else "",
    )


def swarms(status: GatewayStatus, width: int) -> list[Content]:
    """The swarm servers as this gateway knows them."""
    if not status.swarms:
        return [Content.styled("no route has a swarm server", DIM)]
    return lines(_SWARMS, [_swarm_row(swarm) for swarm in status.swarms], width)


def _swarm_row(swarm: SwarmTold) -> Row:
    return Row(
        (
            _place(swarm.url),
            swarm.engine.removeprefix("ENGINE."),
            UNKNOWN if swarm.policy_version is None else str(swarm.policy_version),
            str(swarm.open_groups),
            str(swarm.standby_groups),
            str(swarm.background),
            "" if swarm.down_since is None else f"! {_since(swarm.down_since)}",
        ),
        BAD if swarm.down_since is not None else "",
    )


def _place(url: str) -> str:
    # it may name a user and a password
    return url.partition("://")[2].rpartition("@")[2]


def _since(moment: str) -> str:
    try:
        began = datetime.fromisoformat(moment).astimezone(UTC)
    except (ValueError, OverflowError):
        return moment
    return seconds((datetime.now(UTC) - began).total_seconds())


def failures(status: GatewayStatus, width: int) -> list[Content]:
    """What went wrong, by reason and by code, of all routes; since the gateway's start."""
    counts = {
        "errors that callers saw, by code": status.errors,
        "groups that were not trained, by reason": status.groups.dropped,
        "hooks without a result, by code": status.hook_failures,
        "fallbacks: answered without a group of the swarm's, by reason": status.fallbacks,
    }
    return counted(_COUNTED, counts, width) or [Content.styled("nothing has failed", DIM)]
