"""From a request to a claimed group: the bodies to sample, the claim, and another group where one was lost; and policy
``best``: sample the group, judge it, answer with the winner.

Invariant: the delivered answers are the best of those that were judged; later samples change only what is trained.
Where the submit hook fails, the request is sampled as it came and never trained. A lost group is given back before
another is claimed, so nothing is sampled twice for training. In a group that is not trained, no answer is sampled that
the user does not wait for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from adapters.dialects import ChatDialect
from adapters.dialects.chat_answers import chunks_of, completion_of
from gateway.observability.request import phase
from gateway.rollout.group import GroupRun
from gateway.rollout.return_policy import GroupReport, ReturnPolicy
from gateway.rollout.sampling import EpisodeLostError, Shaped, UnrecordedGroup
from gateway.rollout.server import ServerReport, Training, Waiting
from gateway.sessions.sessions import SessionLink
from gateway.stats import Choice, DropReason, hook_failed
from gateway.types import Decided, Incoming
from reward_hooks import HookContext, PassThrough, Submission, UserRequest
from reward_hooks.contract import default_task
from swarm.client import EpisodeGroup
from swarm.client.calls import NO_EPISODE_NEEDED
from swarm.errors import HookError, RequestError, SwarmGatewayError, UnavailableError
from swarm.types import Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Groups that one request may lose.
_GROUPS_PER_REQUEST = 3
#: vLLM samples greedily below this temperature.
_GREEDY = 1e-5


class PassedThroughError(SwarmGatewayError):
    """A rule of the route or the submit hook wants the request answered once and untrained; nothing was claimed or
    sampled."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"this request passes through as {rule!r}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Untrained:
    """A request is answered from a group without episodes; ``reason``: why, ``patient``: wait for an engine that does
    not serve now, else try once; ``passes``: where the submit hook says so, else it is sampled as it came."""

    reason: str
    patient: bool = True
    passes: bool = True


async def run_with_group(
    training: Training,
    incoming: Incoming,
    session: SessionLink | None,
    use: Callable[[GroupRun], Awaitable[T]],
    *,
    fans_out: bool = False,
    untrained: Untrained | None = None,
    behind: Callable[[GroupRun], None] | None = None,
    within: float | None = None,
) -> T:
    """The result of ``use`` on a group claimed for ``incoming``; on another group if a weight sync or a restart of the
    engine lost the first one whole.

    With ``on_disconnect: finish`` the work goes on when the user hangs up, and its answer counts as abandoned; unless
    the group is not trained.

    Args:
        session: the position of ``incoming`` in a conversation, if it is part of one.
        fans_out: sample a group without episodes where no train episode is needed.
        untrained: claim nothing.
        behind: called with the group once ``use`` has a result, or once the group is given up.
        within: seconds for all of it; ``None``: as long as the settings say.

    Raises:
        RequestError, PassedThroughError: see :func:`shape`.
        UnavailableError: no episodes in time, or none of them could be served; nothing was sampled. Without
            ``fans_out``, its code may be in ``NO_EPISODE_NEEDED``.
        UpstreamError: what ``use`` raises.
    """
    run: GroupRun | None = None
    left = False

    async def claimed(shaped: Shaped, waited: Waiting) -> tuple[Shaped, EpisodeGroup | UnrecordedGroup]:
        reason = "" if untrained is None else untrained.reason
        # what the application sent has been looked at
        own = (request for request in shaped.submission.requests if request != incoming.call.body)
        if not reason and any(map(incoming.consent.withholds, own)):
            training.stats.withheld["prompt"] += 1
            reason = DropReason.PRIVATE
            if not fans_out:
                raise UnavailableError("the hook's prompts hold private data, so nothing is claimed", code=reason)
        if not reason:
            try:
                return shaped, await training.swarm.claim(len(shaped.bodies), waited, training.idle_seconds)
            except UnavailableError as exc:
                if not fans_out or exc.code not in NO_EPISODE_NEEDED:
                    raise
                reason = str(exc.code)
        size = max(training.settings.untrained_repeat or len(shaped.bodies), incoming.call.choices)
        shaped = shaped.untrained(reason, size)
        return shaped, replace(training.swarm.engine, size=len(shaped.bodies))

    async def work() -> T:
        nonlocal run
        losses = 0
        all_waited = Waiting(training.settings)
        while True:
            waited = Waiting(training.settings)
            with phase("claim"):
                report = await training.swarm.wait_for_job(waited)
            shaped = await shape(training, incoming, report, passes=untrained is None or untrained.passes)
            patience, away = training.settings.offline_wait_seconds, partial(training.swarm.gone_for, 0.0)
            with phase("claim"), incoming.prospect.waiting(patience, away):
                shaped, group = await claimed(shaped, waited)
            if left and isinstance(group, UnrecordedGroup):
                raise asyncio.CancelledError
            incoming.left_out.not_as_asked(incoming.call.body, report.job, episode_type="train")
            run = GroupRun(training, session, shaped, group)
            try:
                with incoming.prospect.sampling():
                    result = await use(run)
                if behind is not None:
                    behind(run)
                return result
            except EpisodeLostError as exc:
                run.cancel(DropReason.SAMPLE)
                losses += 1
                if not (losses < _GROUPS_PER_REQUEST if untrained is None else untrained.patient):
                    raise
                # sampling took its time: the wait for another group is a new one
                await (Waiting(training.settings) if untrained is None else all_waited).after(exc)
            except BaseException as exc:
                run.cancel(DropReason.CANCELLED if isinstance(exc, asyncio.CancelledError) else DropReason.SAMPLE)
                raise

    async def worked() -> T | SwarmGatewayError:
        """An error is for who waits; of a task that fails the log says that we are at fault."""
        try:
            return await work()
        except BaseException as exc:
            if session is not None:
                session.gave_up()
            if isinstance(exc, SwarmGatewayError):
                return exc
            raise

    try:
        async with answering_within(within):
            if training.settings.on_disconnect == "cancel":
                return _result(await worked())
            answering = training.swarm.background.start(worked(), "answering a request")
            try:
                return _result(await asyncio.shield(answering))
            except asyncio.CancelledError:
                left = True
                if run is not None and not run.trains:
                    answering.cancel()
                elif session is not None:
                    answering.add_done_callback(lambda _: session.abandoned())
                raise
    except (SwarmGatewayError, asyncio.CancelledError):
        if behind is not None and run is not None:
            run.fail()
            behind(run)
        raise


@asynccontextmanager
async def answering_within(seconds: float | None) -> AsyncGenerator[None]:
    """A block that raises :class:`UnavailableError` once it took so many ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        if seconds is None:
            raise
        raise UnavailableError(f"no answer within {seconds:g} seconds", code="challenger_slow") from exc


def _result(outcome: T | SwarmGatewayError) -> T:
    if isinstance(outcome, SwarmGatewayError):
        raise outcome
    return outcome


async def shape(training: Training, incoming: Incoming, report: ServerReport, *, passes: bool = True) -> Shaped:
    """What to sample for ``incoming``; as it came where the submit hook lets it pass through, unless it ``passes``.

    Raises:
        RequestError: more choices are asked for than the group has answers, or a body is not JSON.
        PassedThroughError: the submit hook says so.
    """
    call, settings = incoming.call, training.settings
    size = settings.num_repeat or report.num_repeat or 1
    if call.choices > size:
        raise RequestError(f"n is {call.choices}, but this gateway samples {size} answers", param="n")
    group_id = secrets.token_hex(16)
    context = HookContext(
        num_repeat=size,
        policy_version=report.policy_version,
        group_id=group_id,
        deadline_seconds=settings.hook_timeout_seconds,
    )
    # the group's own id names the task: a caller may send one x-request-id twice, and two prompts are two groups
    request = UserRequest(request_id=group_id, body=call.body, model=call.model or "", headers=dict(incoming.headers))
    drop: DropReason | None = None if size == report.num_repeat else DropReason.SIZE
    failure: HookError | None = None
    try:
        with phase("hook"):
            submission = await training.hooks.submit(request, context)
    except HookError as exc:
        logger.debug("group %s is not trained: %s", group_id, exc)
        hook_failed(exc, training.stats)
        submission = Submission(task=Task(task_id=group_id), requests=[call.body] * call.choices)
        drop, failure = DropReason.SUBMIT_HOOK, exc
    if isinstance(submission, PassThrough):
        if passes:
            raise PassedThroughError(submission.name)
        submission = Submission(task=default_task(request), requests=[call.body] * size)
    # the served model replaces whatever name the application or the hook gave
    bodies = _bodies(submission.requests, report.model)
    return Shaped(
        group_id=group_id,
        submission=submission,
        bodies=bodies,
        context=context,
        shares_call=_shares_call(submission.requests, bodies, report),
        takes_partial=report.takes_partial,
        drop=drop,
        failure=failure,
    )


def _bodies(requests: Sequence[dict[str, Any]], model: str) -> list[bytes]:
    """Each request as JSON; a run of equal requests is encoded once."""
    dialect = ChatDialect()
    bodies: list[bytes] = []
    for index, request in enumerate(requests):
        same = index > 0 and request == requests[index - 1]
        bodies.append(bodies[-1] if same else dialect.sampling_body(request, model))
    return bodies


def _shares_call(requests: Sequence[Mapping[str, Any]], bodies: Sequence[bytes], report: ServerReport) -> bool:
    """Whether the bodies are alike and really sampled; vLLM refuses to give several answers to a greedy call."""
    if len(bodies) < 2 or bodies.count(bodies[0]) < len(bodies):
        return False
    temperature = requests[0].get("temperature")
    greedy = (isinstance(temperature, int | float) and temperature < _GREEDY) or requests[0].get("use_beam_search")
    return not (report.keeps_sampling and greedy)


async def best(
    training: Training,
    incoming: Incoming,
    session: SessionLink | None,
    policy: ReturnPolicy,
    untrained: Untrained | None = None,
    behind: Callable[[GroupRun], None] | None = None,
    within: float | None = None,
) -> Decided:
    """The best of the answers that ``policy`` waits for; arguments and errors as of :func:`run_with_group`."""
    use, fans_out = partial(_decide, incoming=incoming, policy=policy), policy.fans_out
    return await run_with_group(
        training, incoming, session, use, fans_out=fans_out, untrained=untrained, behind=behind, within=within
    )


async def _decide(run: GroupRun, incoming: Incoming, policy: ReturnPolicy) -> Decided:
    settings, session = run.training.settings, run.session
    with phase("sample"):
        await _sample(run, incoming, policy)
    samples = run.samples
    if not samples:
        raise run.failure()
    score = await run.judge()
    values = dict(zip(samples, score.values, strict=True)) if score is not None else {}
    delivered = sorted(samples, key=lambda index: -values.get(index, 0.0))[: incoming.call.choices]
    if run.sampling and (settings.stragglers == "cancel" or not run.trains):
        run.stop_sampling()
    run.training.stats.answers[_choice(run, len(samples), judged=score is not None)] += 1
    winner = samples[delivered[0]]
    reward = values.get(delivered[0])
    run.deliver(winner.answer.message, reward, len(delivered))
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
        hook=(run.training.hooks.code or None) if score is not None else None,
    )
    return _decided(run, incoming, delivered, report)


async def _sample(run: GroupRun, incoming: Incoming, policy: ReturnPolicy) -> None:
    """Sample until there is what ``policy`` waits for."""
    count = len(run.shaped.bodies)
    early = policy.deadline is not None or (policy.quorum or count) < count
    # one call for all of them answers only when the last is done
    run.sample(range(count), apart=early)
    wanted = max(min(policy.quorum or count, count), incoming.call.choices)
    until = None if policy.deadline is None else asyncio.get_running_loop().time() + policy.deadline
    while run.sampling and len(run.samples) < wanted:
        if not await run.progress(until):
            # at the deadline any number of answers will do, but there must be one
            wanted, until = incoming.call.choices, None


def _choice(run: GroupRun, answers: int, *, judged: bool) -> Choice:
    """How the best of so many ``answers`` was chosen."""
    if answers < 2:
        return Choice.SINGLE
    if not judged:
        return Choice.UNJUDGED
    return Choice.JUDGED if run.shaped.may_train else Choice.JUDGED_UNTRAINED


def _decided(run: GroupRun, incoming: Incoming, delivered: Sequence[int], report: GroupReport) -> Decided:
    answer_id = run.shaped.answer_id
    answers = [run.samples[index].answer for index in delivered]
    # an answer that a retry may share is remembered, without its request
    include_usage = incoming.call.include_usage
    continuous = (incoming.call.body.get("stream_options") or {}).get("continuous_usage_stats") is True
    # nobody learns whether a plain answer arrives
    whole = not incoming.call.stream

    def chunks() -> Iterator[dict[str, Any]]:
        nonlocal whole
        last = {"swarm": report.as_dict()}
        yield from chunks_of(answers, answer_id, include_usage=include_usage, continuous_usage=continuous, last=last)
        whole = True

    async def close() -> None:
        if not whole and run.session is not None:
            run.session.abandoned()

    return Decided(completion_of(answers, answer_id), report.headers(), close, chunks)
