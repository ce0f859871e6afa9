"""From a request to a claimed group: the bodies to sample, the claim, and another group where one was lost.

Invariant: where the submit hook fails, the request is sampled as it came and never trained; a lost group has been given
back before another is claimed, so nothing is sampled twice for training.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from adapters.dialects import ChatDialect
from gateway.observability.request import phase
from gateway.rollout.claims import Serving, Waiting
from gateway.rollout.group import GroupRun, Shaped
from gateway.rollout.sampling import EpisodeLostError
from gateway.rollout.swarm import Training
from gateway.sessions.sessions import SessionLink
from gateway.stats import DropReason
from gateway.types import Incoming
from reward_hooks import HookContext, Submission, UserRequest
from swarm.errors import HookError, RequestError
from swarm.types import Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Groups that one request may lose.
_GROUPS_PER_REQUEST = 3
#: vLLM samples greedily below this temperature.
_GREEDY = 1e-5


async def run_with_group(
    training: Training, incoming: Incoming, session: SessionLink | None, use: Callable[[GroupRun], Awaitable[T]]
) -> T:
    """The result of ``use`` on a group claimed for ``incoming``; on another one where a weight sync or a restart of the
    engine lost the whole group.

    Raises:
        RequestError: see :func:`shape`.
        UnavailableError: no episodes in time, or none of them could be served; nothing was sampled.
        UpstreamError: what ``use`` raises.
    """
    episodes = training.swarm.episodes
    losses = 0
    while True:
        waited = Waiting(training.settings, training.window_seconds)
        with phase("claim"):
            serving = await episodes.wait_for_job(waited)
        shaped = await shape(training, incoming, serving)
        with phase("claim"):
            group = await episodes.claim(len(shaped.bodies), waited)
        run = GroupRun(training, session, shaped, group)
        try:
            return await use(run)
        except EpisodeLostError as exc:
            run.cancel(DropReason.SAMPLE)
            losses += 1
            if losses == _GROUPS_PER_REQUEST:
                raise
            # sampling took its time: the wait for another group is a new one
            await Waiting(training.settings, training.window_seconds).after(exc)
        except asyncio.CancelledError:
            run.cancel(DropReason.CANCELLED)
            raise
        except BaseException:
            run.cancel(DropReason.SAMPLE)
            raise


async def outliving(training: Training, work: Coroutine[Any, Any, T], session: SessionLink | None) -> T:
    """The result of ``work``, which answers a request of ``session``. With ``on_disconnect: finish`` it goes on when
    the user hangs up, and its answer counts as abandoned."""
    if training.settings.on_disconnect == "cancel":
        return await work
    answering = training.swarm.background.start(work, "answering a request")
    try:
        return await asyncio.shield(answering)
    except asyncio.CancelledError:
        if session is not None:
            answering.add_done_callback(lambda _: session.abandoned())
        raise


async def shape(training: Training, incoming: Incoming, serving: Serving) -> Shaped:
    """What to sample for ``incoming``.

    Raises:
        RequestError: more choices are asked for than the group has answers, or a body is not JSON.
    """
    call, settings = incoming.call, training.settings
    size = settings.num_repeat or serving.num_repeat or 1
    if call.choices > size:
        raise RequestError(f"n is {call.choices}, but this gateway samples {size} answers", param="n")
    group_id = secrets.token_hex(16)
    context = HookContext(
        num_repeat=size,
        policy_version=serving.policy_version,
        group_id=group_id,
        deadline_seconds=settings.hook_timeout_seconds,
    )
    # the group's own id names the task: a caller may send one x-request-id twice, and two prompts are two groups
    request = UserRequest(request_id=group_id, body=call.body, model=call.model or "", headers=dict(incoming.headers))
    drop: DropReason | None = None if size == serving.num_repeat else DropReason.SIZE
    failure: HookError | None = None
    try:
        with phase("hook"):
            submission = await training.hooks.submit(request, context)
    except HookError as exc:
        logger.error("group %s is not trained: %s", group_id, exc)
        training.stats.hook_failures[exc.code or exc.type] += 1
        submission = Submission(task=Task(task_id=group_id), requests=[call.body] * call.choices)
        drop, failure = DropReason.SUBMIT_HOOK, exc
    # the served model replaces whatever name the application or the hook gave
    bodies = _bodies(submission.requests, serving.model)
    return Shaped(
        group_id=group_id,
        submission=submission,
        bodies=bodies,
        context=context,
        shares_call=_shares_call(submission.requests, bodies, serving),
        takes_partial=serving.takes_partial,
        drop=drop,
        failure=failure,
    )


def _bodies(requests: Sequence[dict[str, Any]], model: str) -> list[bytes]:
    """Each request as JSON; a run of equal requests is encoded once."""
    dialect = ChatDialect()
    bodies: list[bytes] = []
    for place, request in enumerate(requests):
        same = place > 0 and request == requests[place - 1]
        bodies.append(bodies[-1] if same else dialect.sampling_body(request, model))
    return bodies


def _shares_call(requests: Sequence[Mapping[str, Any]], bodies: Sequence[bytes], serving: Serving) -> bool:
    """Whether the bodies are alike and really sampled; vLLM refuses to give several answers to a greedy call."""
    if len(bodies) < 2 or bodies.count(bodies[0]) < len(bodies):
        return False
    temperature = requests[0].get("temperature")
    greedy = (isinstance(temperature, int | float) and temperature < _GREEDY) or requests[0].get("use_beam_search")
    return not (serving.keeps_sampling and greedy)
