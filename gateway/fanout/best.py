"""Policy ``best``: sample a group, judge it, answer with the winner."""

from __future__ import annotations

from gateway.fanout.policy import Policy
from gateway.fanout.ports import Link, Route
from gateway.forms import Decided, Incoming


async def best(route: Route, incoming: Incoming, session: Link | None, policy: Policy) -> Decided:
    """The best of the answers that ``policy`` waits for.

    Args:
        route: with a swarm and hooks.
        incoming: the request; its model name has been checked.
        session: its conversation, if it is part of one.
        policy: how long to wait for the others.

    Raises:
        RequestError: more choices than the group has answers, or the engine refuses the request.
        UnavailableError: no episodes in time; nothing was sampled.
        UpstreamError: not one answer could be sampled.
    """
    raise NotImplementedError
