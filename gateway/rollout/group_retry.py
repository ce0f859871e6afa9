"""From a request to a group under way, and to another where that one was lost.

Invariant: a group that was lost has been given back before another is claimed, so nothing is sampled twice for
training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gateway.observability.request import phase
from gateway.rollout.claimed_group import Claimed
from gateway.rollout.claims import Waiting
from gateway.rollout.group import GroupRun
from gateway.rollout.ports import Link, Route
from gateway.rollout.sampling import EpisodeLostError
from gateway.rollout.shaping import shape
from gateway.stats import DropReason
from gateway.types import Incoming

T = TypeVar("T")

#: Groups that are lost under one request before it is given up.
_GROUPS_PER_REQUEST = 3


async def with_group(
    route: Route, incoming: Incoming, session: Link | None, use: Callable[[GroupRun], Awaitable[T]]
) -> T:
    """What ``use`` makes of a group that is claimed for ``incoming``; of another one where it was lost as a whole, to a
    weight sync or a restart of the engine.

    Raises:
        RequestError: see :func:`gateway.rollout.shaping.shape`.
        UnavailableError: no episodes in time, or none of them could be served; nothing was sampled.
        UpstreamError: what ``use`` raises.
    """
    assert route.swarm is not None
    episodes = route.swarm.episodes
    waited = Waiting(route.settings, route.window_seconds)
    losses, gave_way = 0, False
    while True:
        with phase("claim"):
            serving = await episodes.wait_for_job(waited)
        shaped = await shape(route, incoming, serving)
        count = len(shaped.bodies)
        # where one that was claimed ahead is gone, others may be
        ready = episodes.ready(count, waited) if not gave_way else None
        with phase("claim"):
            group = ready if ready is not None else await episodes.claim(count, waited)
        run = GroupRun(route, session, shaped, Claimed(group, episodes.abort))
        try:
            return await use(run)
        except EpisodeLostError as exc:
            if ready is not None and exc.unopened:
                run.cancel(DropReason.GAVE_WAY)
                episodes.standby.release()
                gave_way = True
                continue
            run.cancel(DropReason.SAMPLE)
            losses += 1
            if losses == _GROUPS_PER_REQUEST:
                raise
            # sampling has taken its time; the wait for the next group is a new one
            waited = Waiting(route.settings, route.window_seconds)
            await waited.after(exc)
        except asyncio.CancelledError:
            run.cancel(DropReason.CANCELLED)
            raise
        except BaseException:
            run.cancel(DropReason.SAMPLE)
            raise
        finally:
            # not before the answer has begun: both would ask the same server at once
            episodes.claim_ahead(count, waited)


async def outliving(route: Route, work: Coroutine[Any, Any, T], session: Link | None) -> T:
    """The result of ``work``, which answers a request of ``session``; where the route says so it goes on when the user
    hangs up, and the answer that comes of it is an abandoned one."""
    if route.settings.on_disconnect == "cancel":
        return await work
    answering = route.background.start(work, "answering a request")
    try:
        return await asyncio.shield(answering)
    except asyncio.CancelledError:
        if session is not None:
            answering.add_done_callback(lambda _: session.abandoned())
        raise
