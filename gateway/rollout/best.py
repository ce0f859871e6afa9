"""Policy ``best``: sample a group, judge it, answer with the winner.

Invariant: the delivered answers are the best of those that were judged; later samples change only what is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from adapters.dialects.chat_answers import chunks_of, completion_of
from gateway.observability.request import phase
from gateway.rollout.group import GroupRun
from gateway.rollout.policy import GroupReport, Policy
from gateway.rollout.shaping import outliving, run_with_group
from gateway.rollout.swarm import Training
from gateway.sessions.sessions import SessionLink
from gateway.types import Decided, Incoming


async def best(training: Training, incoming: Incoming, session: SessionLink | None, policy: Policy) -> Decided:
    """The best of the answers that ``policy`` waits for.

    Args:
        training: of the request's route.
        incoming: the request; its model name has been checked.
        session: its place in a conversation, if it is part of one.
        policy: how long to wait for the others.

    Raises:
        RequestError: more choices than the group has answers, or the engine refuses the request.
        UnavailableError: no episodes in time; nothing was sampled.
        UpstreamError: no answer could be sampled.
    """

    async def use(run: GroupRun) -> Decided:
        return await _decide(run, incoming, session, policy)

    return await outliving(training, run_with_group(training, incoming, session, use), session)


async def _decide(run: GroupRun, incoming: Incoming, session: SessionLink | None, policy: Policy) -> Decided:
    settings = run.training.settings
    with phase("sample"):
        await _sample(run, incoming, policy)
    samples = run.samples
    if not samples:
        raise run.failure()
    score = await run.judge()
    values = dict(zip(samples, score.values, strict=True)) if score is not None else {}
    delivered = sorted(samples, key=lambda place: -values.get(place, 0.0))[: incoming.call.choices]
    if run.sampling and settings.stragglers == "cancel":
        run.stop_sampling()
    winner = samples[delivered[0]]
    reward = values.get(delivered[0])
    if session is not None:
        session.delivered(run.shaped.answer_id, winner.answer.message, reward, choices=len(delivered))
    # a group that waits for stragglers or for its user does not end in time for a header
    waits = run.sampling or (session is not None and run.training.window_seconds > 0)
    run.settle(list(samples), score, delivered)
    done, drop = await run.settled(0.0 if waits else settings.acknowledge_seconds)
    report = GroupReport(
        policy_version=winner.policy_version,
        reward=reward,
        reward_mean=score.mean if score is not None else None,
        trained=(drop is None) if done else None,
        drop_reason=drop,
    )
    return _decided(run, incoming, session, delivered, report)


async def _sample(run: GroupRun, incoming: Incoming, policy: Policy) -> None:
    """Sample until there is what ``policy`` waits for."""
    count = len(run.shaped.bodies)
    pieces = incoming.call.stream
    early = policy.deadline is not None or (policy.quorum or count) < count
    if run.shares_call and not early:
        run.start_together(range(count), pieces=pieces)
    else:
        # one call for all of them answers only when the last is done
        run.start_each(range(count), pieces=pieces)
    wanted = max(min(policy.quorum or count, count), incoming.call.choices)
    until = None if policy.deadline is None else asyncio.get_running_loop().time() + policy.deadline
    while run.sampling and len(run.samples) < wanted:
        if not await run.progress(until):
            # at the deadline any number of answers will do, but there must be one
            wanted, until = incoming.call.choices, None


def _decided(
    run: GroupRun, incoming: Incoming, session: SessionLink | None, delivered: Sequence[int], report: GroupReport
) -> Decided:
    answer_id = run.shaped.answer_id
    samples = [run.samples[place] for place in delivered]
    answers = [sample.answer for sample in samples]
    # nobody learns whether a plain answer arrives
    whole = not incoming.call.stream

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        nonlocal whole
        pieces = [sample.pieces for sample in samples]
        for chunk in chunks_of(
            answers,
            answer_id,
            include_usage=incoming.call.include_usage,
            last={"swarm": report.as_dict()},
            pieces=pieces,
        ):
            yield chunk
        whole = True

    async def close() -> None:
        if not whole and session is not None:
            session.abandoned()

    return Decided(completion_of(answers, answer_id), chunks, report.headers(), close)
