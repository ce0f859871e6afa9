"""The stage ``shadow``: the incumbent answers the user; behind that, the challenger answers the same request N times,
both are judged, the challenger learns, and the pair of both is evidence.

Invariant: a group in the shadow begins after the user has the whole answer, waits for nobody's place, and whatever
becomes of it, no user is told. Only a request that may be trained is sampled.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from adapters.dialects import SampledAnswer
from gateway.config.takeover import ServeConfig
from gateway.rollout.answering import PassedThroughError, run_with_group
from gateway.rollout.group import GroupRun
from gateway.rollout.policy import Policy, passes
from gateway.rollout.reference import INCUMBENT, Reference
from gateway.rollout.server import Training
from gateway.serving.incumbent import Overheard
from gateway.stats import DropReason, Stats
from gateway.types import Incoming, LeftOut, Prospect
from reward_hooks import Candidate
from reward_hooks.contract import sendable
from swarm.client.claiming import NEEDS_NONE
from swarm.errors import RequestError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.evidence.pairs import MAX_NAME, GateRules, Pair, Terms

logger = logging.getLogger(__name__)

#: Why a request has no group in the shadow, or what became of it; counted in ``/status``.
TRAINED, COMPARED = "trained", "compared"
LEFT_OUT, BUSY, NOT_WHOLE, UNREAD = "left_out", "busy", "not_whole", "unread"
REFUSED, AWAY = "refused", "engine_away"
#: Seconds added to the deadlines of judging and submitting.
_GRACE = 30.0


class Shadow:
    """The shadow of one route; groups of it run in the background of their swarm server.

    Args:
        route: its name.
        serve: its settings.
        stats: counts what becomes of the groups.
    """

    def __init__(self, route: str, serve: ServeConfig, stats: Stats) -> None:
        self._route = route
        self._serve = serve
        self._stats = stats
        self._running = 0

    def overhears(self, training: Training, incoming: Incoming) -> Overheard:
        """What the incumbent's answer to ``incoming`` passes through: then the challenger answers too."""

        def done(overheard: Overheard) -> None:
            why = self._objection(training, incoming, overheard)
            if why:
                self._stats.shadows[why] += 1
                return
            self._running += 1
            task = training.swarm.background.start(
                self._follow(training, incoming, overheard), "answering behind the incumbent"
            )
            task.add_done_callback(self._ended)

        return Overheard(incoming.path, done)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._running -= 1
        if task.cancelled():
            self._stats.shadows["cancelled"] += 1
        elif task.exception() is not None:
            self._stats.shadows["failed"] += 1
        else:
            self._stats.shadows[task.result()] += 1

    def _objection(self, training: Training, incoming: Incoming, overheard: Overheard) -> str:
        settings = training.settings.model_copy(update={"train_fraction": self._serve.shadow_fraction})
        try:
            policy = Policy.of(settings, incoming.headers)
        except RequestError:
            # the user is answered all the same, and what may have been an opt-out counts as one
            return LEFT_OUT
        consent = incoming.consent
        if not consent.granted or consent.withholds(incoming.call.body):
            return LEFT_OUT
        passed = policy.train is None and passes(settings, incoming)
        if passed or not policy.trains(settings, self._route, incoming.request_id):
            return LEFT_OUT
        if overheard.read is None:
            return NOT_WHOLE
        return BUSY if self._running >= self._serve.max_shadows else ""

    async def _follow(self, training: Training, incoming: Incoming, overheard: Overheard) -> str:
        """One group behind the incumbent's answer; returns what became of it."""
        assert overheard.read is not None, "only a whole answer is followed"
        try:
            answer = overheard.read()
        except UpstreamError as exc:
            logger.debug("the incumbent's answer to request %s is not compared: %s", incoming.request_id, exc)
            return UNREAD
        swarm, settings = training.swarm, training.settings
        # one try: a claim that waits would take the place of a user of another route
        settings = settings.model_copy(
            update={"claim_wait_seconds": 0.0, "offline_wait_seconds": 0.0, "on_disconnect": "cancel"}
        )
        training = replace(training, settings=settings)
        incoming = replace(incoming, prospect=Prospect(), left_out=LeftOut())
        tokens = _count(answer, "completion_tokens")
        reference = Reference(_candidate(answer, overheard.seconds), tokens, self._terms(training, incoming))
        if swarm.gone_for(0.0) is not None:
            return AWAY

        async def use(run: GroupRun) -> _End:
            run.reference = reference
            run.sample(range(len(run.shaped.bodies)))
            while run.sampling:
                await run.progress()
            if not run.samples:
                # nothing to judge: it is the challenger's failure unless its engine went away
                failure = run.failure()
                if isinstance(failure, UnavailableError):
                    raise failure
                run.settle([], None, [])
                pair = reference.pair(run.shaped, run.samples, run.outcomes)
                return _End(pair, failure.code or failure.type)
            score = await run.judge()
            run.settle(list(run.samples), score, [])
            within = settings.submit_timeout_seconds + 2 * settings.hook_timeout_seconds + _GRACE
            done, drop = await run.settled(within)
            pair = reference.pair(run.shaped, run.samples, run.outcomes)
            return _End(pair, (drop or "") if done else DropReason.SUBMIT_TIMEOUT)

        fans_out = settings.when_batch_waits == "best"
        try:
            end = await run_with_group(training, incoming, None, use, fans_out=fans_out)
        except (RequestError, PassedThroughError):
            return REFUSED
        except SwarmGatewayError as exc:
            return exc.code or exc.type
        if not end.drop:
            return TRAINED
        # the end of its group did not take the pair along
        try:
            await swarm.client.record_pair(end.pair)
        except SwarmGatewayError as exc:
            logger.warning("a pair of group %s is lost: %s", end.pair.group_id, exc)
        return COMPARED if end.drop in NEEDS_NONE and not end.pair.unjudged else end.drop

    def _terms(self, training: Training, incoming: Incoming) -> Terms:
        upstream = self._serve.incumbent.upstream
        name = f"{upstream.model or incoming.call.model or 'its model'} at {urlsplit(upstream.base_url).netloc}"
        return Terms(
            route=self._route[:MAX_NAME],
            # a name may hold a lone surrogate, which JSON bodies can carry
            incumbent=sendable(name)[:MAX_NAME],
            model=training.swarm.report.model[:MAX_NAME],
            hook=training.hooks.source[:MAX_NAME],
            code=training.hooks.code[:MAX_NAME],
            rules=GateRules.model_validate(self._serve.gate.model_dump()),
        )


@dataclass(frozen=True, slots=True)
class _End:
    """A group that is over; ``drop``: why it is not trained, empty if it is."""

    pair: Pair
    drop: str


def _candidate(answer: SampledAnswer, seconds: float) -> Candidate:
    return Candidate(
        index=0,
        source=INCUMBENT,
        message=answer.message,
        text=answer.text,
        tool_calls=answer.message.get("tool_calls") or [],
        finish_reason=answer.finish_reason,
        completion_tokens=_count(answer, "completion_tokens") or 0,
        prompt_tokens=_count(answer, "prompt_tokens") or 0,
        latency_seconds=seconds,
    )


def _count(answer: SampledAnswer, name: str) -> int | None:
    """A count of its usage; ``None`` where its server says none."""
    count = answer.usage.get(name)
    return count if isinstance(count, int) and count >= 0 else None
