"""The comparison behind a user's answer. Where the incumbent answered, the challenger answers the same request N times,
a hook judges both sides, and the challenger learns; where the challenger answered, the incumbent is asked too. The pair
of both sides is evidence.

Invariant: a group in the shadow begins after the user has the whole answer and takes no place from another request. An
error in the shadow reaches no user. Only a request that may be trained is compared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from adapters.dialects import SampledAnswer
from gateway.config.takeover import ServeConfig
from gateway.rollout.answering import PassedThroughError, run_with_group
from gateway.rollout.following import StageFollower
from gateway.rollout.group import GroupRun
from gateway.rollout.reference import Drawn, Reference
from gateway.rollout.return_policy import ReturnPolicy, passes
from gateway.rollout.sampling import candidate_of, count_of
from gateway.rollout.server import Training
from gateway.stats import DropReason, Stats
from gateway.takeover.incumbent import INCUMBENT, Overheard
from gateway.takeover.sides import Draw, Sides, position_of
from gateway.types import Incoming, LeftOut, Outcome, Prospect, stream_of
from swarm.client.calls import NO_EPISODE_NEEDED
from swarm.errors import RequestError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.evidence.pairs import MAX_NAME, Pair, Terms
from swarm.evidence.stages import ServingStage

logger = logging.getLogger(__name__)

#: Why a request has no group in the shadow, or what became of it; counted in ``/status``.
TRAINED, COMPARED = "trained", "compared"
LEFT_OUT, BUSY, NOT_WHOLE, UNREAD = "left_out", "busy", "not_whole", "unread"
REFUSED, AWAY = "refused", "engine_away"
#: Seconds added to the deadlines of judging and submitting.
_GRACE = 30.0

#: Asks the incumbent.
Ask = Callable[[Incoming], Awaitable[Outcome]]
#: What began before, and is not over.
Earlier = Sequence[asyncio.Task[str]]


class Shadow:
    """The shadow of one route; groups of it run in the background of their swarm server.

    Attributes:
        sides: who answers which request.
    """

    def __init__(self, route: str, serve: ServeConfig, stats: Stats, follower: StageFollower) -> None:
        self._route = route
        self._serve = serve
        self._stats = stats
        self._follower = follower
        self.sides = Sides(route, serve, lambda: follower.stage(route, serve.incumbent_name))
        #: the work behind answers, in the order in which it began
        self._under_way: list[asyncio.Task[str]] = []

    @property
    def free(self) -> int:
        """Groups that may still be begun now."""
        return self._serve.max_shadows - len(self._under_way)

    @property
    def conflict(self) -> str:
        """See :meth:`StageFollower.conflict`."""
        return self._follower.conflict(self._route, self._serve.incumbent_name)

    def overhears(self, training: Training, incoming: Incoming, draw: Draw) -> Overheard:
        """What the incumbent's answer to ``incoming`` passes through: then the challenger answers too."""

        def done(overheard: Overheard) -> None:
            why = self._objection(training, incoming, overheard)
            if why:
                self._stats.shadows[why] += 1
                return
            work = self._follow(training, incoming, overheard, draw, tuple(self._under_way))
            self._begin(training, work, "answering behind the incumbent")

        return Overheard(incoming.path, done)

    def asks(self, training: Training, incoming: Incoming, draw: Draw, ask: Ask) -> Callable[[GroupRun], None] | None:
        """What is done with the challenger's group once its answer is chosen: then the incumbent is asked too.
        ``None``: this request is not drawn by ``watch_share``."""
        assert draw.stage is not None, "nobody answers in a stage that is not known"
        if position_of(incoming.request_id, f"watch {draw.stage.salt}") >= self._serve.watch_share:
            return None

        def behind(run: GroupRun) -> None:
            if self.free <= 0:
                self._stats.shadows[BUSY] += 1
                return
            # a later change of the request is none of the incumbent's
            asked = replace(incoming, prospect=Prospect(), left_out=LeftOut())
            work = self._compare(training, asked, draw, ask, run, tuple(self._under_way))
            self._begin(training, work, "asking the incumbent too")

        return behind

    def _begin(self, training: Training, work: Coroutine[Any, Any, str], name: str) -> None:
        task = training.swarm.background.start(work, name)
        self._under_way.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._under_way.remove(task)
        if task.cancelled():
            self._stats.shadows["cancelled"] += 1
        elif task.exception() is not None:
            self._stats.shadows["failed"] += 1
        else:
            self._stats.shadows[task.result()] += 1

    def _objection(self, training: Training, incoming: Incoming, overheard: Overheard) -> str:
        settings = training.settings.model_copy(update={"train_fraction": self._serve.shadow_fraction})
        try:
            policy = ReturnPolicy.of(settings, incoming.headers)
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
        return BUSY if self.free <= 0 else ""

    async def _compare(
        self, training: Training, incoming: Incoming, draw: Draw, ask: Ask, run: GroupRun, earlier: Earlier
    ) -> str:
        """One answer of the incumbent behind a group; returns what became of it."""
        try:
            answer, seconds = await whole_answer(ask, incoming)
            with self.sides.taken(draw) as drawn:
                pair = await run.compared(self.reference(training, incoming, answer, seconds, draw.stage, drawn))
                if not run.samples and not pair.challenger.failed:
                    raise UpstreamError("its user left the challenger's stream", code=NOT_WHOLE)
        except SwarmGatewayError as exc:
            return exc.code or exc.type
        await self._turn(earlier)
        await _record(training, pair)
        return "unjudged" if pair.unjudged else COMPARED

    async def _follow(
        self, training: Training, incoming: Incoming, overheard: Overheard, draw: Draw, earlier: Earlier
    ) -> str:
        """One group behind the incumbent's answer; returns what became of it."""
        assert overheard.read is not None, "only a whole answer is followed"
        try:
            answer = overheard.read()
        except UpstreamError as exc:
            logger.debug("the incumbent's answer to request %s is not compared: %s", incoming.request_id, exc)
            return UNREAD
        training = giving_way(training)
        swarm, settings = training.swarm, training.settings
        incoming = replace(incoming, prospect=Prospect(), left_out=LeftOut())
        if swarm.gone_for(0.0) is not None:
            return AWAY

        async def use(run: GroupRun, reference: Reference) -> tuple[Pair, str]:
            """The pair, and why the group is not trained; empty if it is."""
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
                return reference.pair(run.shaped, run.outcomes), failure.code or failure.type
            score = await run.judge()
            await self._turn(earlier)
            run.settle(list(run.samples), score, [])
            within = settings.submit_timeout_seconds + 2 * settings.hook_timeout_seconds + _GRACE
            done, drop = await run.settled(within)
            return reference.pair(run.shaped, run.outcomes), (drop or "") if done else DropReason.SUBMIT_TIMEOUT

        fans_out = settings.when_batch_waits == "best" and self._decides(draw.stage)
        try:
            with self.sides.taken(draw) as drawn:
                reference = self.reference(training, incoming, answer, overheard.seconds, draw.stage, drawn)
                pair, drop = await run_with_group(
                    training, incoming, None, partial(use, reference=reference), fans_out=fans_out
                )
        except (RequestError, PassedThroughError):
            return REFUSED
        except SwarmGatewayError as exc:
            return exc.code or exc.type
        if not drop:
            return TRAINED
        # the end of its group did not take the pair along
        await self._turn(earlier)
        await _record(training, pair)
        return COMPARED if drop in NO_EPISODE_NEEDED and not pair.unjudged else drop

    def _decides(self, stage: ServingStage | None) -> bool:
        """Whether a comparison that trains nothing may move somebody: between two trials in the shadow none does."""
        # by the server's rules, which may be others than the file's
        return stage is None or stage.rules.trial_every is None or stage.trial or stage.share > 0

    async def _turn(self, earlier: Earlier) -> None:
        """Pairs that decide come in the order in which their groups began. In that of their ends the first ones are of
        quick answers, and where slow ones are worse, these would prove too much."""
        if earlier and self._decides(self.sides.stage):
            await asyncio.wait(earlier)

    def reference(
        self,
        training: Training,
        incoming: Incoming,
        answer: SampledAnswer,
        seconds: float,
        stage: ServingStage | None,
        drawn: Drawn,
    ) -> Reference:
        """The incumbent's ``answer`` to ``incoming``, to be judged beside the challenger's."""
        candidate = candidate_of(answer, seconds, index=0, request=incoming.call.body, source=INCUMBENT)
        tokens = count_of(answer, "completion_tokens")
        return Reference(candidate, tokens, self.terms(training, stage), drawn, training)

    def terms(self, training: Training, stage: ServingStage | None) -> Terms:
        """Of a comparison in ``stage``, but for the challenger's version and the size of its groups."""
        return Terms(
            route=self._route[:MAX_NAME],
            incumbent=self._serve.incumbent_name,
            stage="shadow" if stage is None else stage.label,
            share=0.0 if stage is None else stage.share,
            model=training.swarm.report.model[:MAX_NAME],
            hook=training.judge.source[:MAX_NAME],
            code=training.judge.code[:MAX_NAME],
            rules=self._serve.gate_rules,
            suites=training.suites,
        )


def giving_way(training: Training, longest_wait: float = 0.0) -> Training:
    """The same for groups that stop when their user leaves, and that claim for ``longest_wait`` seconds at most. Behind
    users there is one try, since a claim that waits would take the place of a user of another route; where the
    incumbent can answer instead, nobody waits for a training step."""
    settings = training.settings.model_copy(
        update={
            "claim_wait_seconds": min(training.settings.claim_wait_seconds, longest_wait),
            "offline_wait_seconds": 0.0,
            # groups of another size are another comparison
            "untrained_repeat": None,
            "on_disconnect": "cancel",
        }
    )
    return replace(training, settings=settings)


async def whole_answer(ask: Ask, incoming: Incoming) -> tuple[SampledAnswer, float]:
    """The incumbent's answer, and its seconds.

    Raises:
        SwarmGatewayError: there is none, with code ``not_whole`` where it is an error, or broke off.
    """
    overheard = Overheard(incoming.path, lambda _: None)
    outcome = overheard.outcome(await ask(incoming))
    try:
        if (stream := stream_of(outcome)) is not None:
            async for _ in stream:
                pass
    finally:
        if outcome.close is not None:
            await outcome.close()
    if overheard.read is None:
        raise UpstreamError("the incumbent's answer is not whole", code=NOT_WHOLE)
    return overheard.read(), overheard.seconds


async def _record(training: Training, pair: Pair) -> None:
    try:
        await training.swarm.client.record_pair(pair)
    except SwarmGatewayError as exc:
        logger.warning("a pair of group %s is lost: %s", pair.group_id, exc)
