"""One group under way: its answers are sampled, judged, and submitted behind whatever is delivered.

Invariant: a group is submitted with the rewards that one call of its hook gave for all of it, or every episode of it is
given back and the reason counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from gateway.background import HEAD_START
from gateway.observability.request import metadata, phase, span
from gateway.rollout.claimed_group import Claimed
from gateway.rollout.episode_metadata import Why, outputs
from gateway.rollout.ports import Link, Route, Swarm
from gateway.rollout.sampling import EpisodeLostError, Sample
from gateway.rollout.shaping import Shaped
from gateway.stats import DropReason
from reward_hooks import Candidate, Feedback, GroupScore, HookRunner
from swarm.errors import HookError, RelayedError, SwarmGatewayError
from swarm.text import sendable

logger = logging.getLogger(__name__)

#: A group needs so many answers to compare them with each other.
_LEAST_GROUP = 2
#: Returns when sampling may begin.
After = Callable[[], Awaitable[None]]


class GroupRun:
    """One group; every method is for the event loop that made it.

    Args:
        route: where the request goes; with a swarm and hooks.
        session: its conversation.
        shaped: what is to be sampled.
        claimed: the episodes to sample it with.

    Attributes:
        outcomes: what became of each sample, by its place; ``None`` while it is under way, or once it was cancelled.
    """

    def __init__(self, route: Route, session: Link | None, shaped: Shaped, claimed: Claimed) -> None:
        assert route.swarm is not None and route.hooks is not None
        self.route = route
        self.swarm: Swarm = route.swarm
        self.shaped = shaped
        self.claimed = claimed
        self.outcomes: list[Sample | SwarmGatewayError | None] = [None] * len(shaped.bodies)
        self.deadline = asyncio.get_running_loop().time() + route.settings.sample_timeout_seconds
        self._hooks: HookRunner = route.hooks
        self._failure: HookError | None = shaped.failure
        self._session = session
        self._sampling: set[asyncio.Task[None]] = set()
        self._settling: asyncio.Task[DropReason | None] | None = None
        self._cancelled: DropReason | None = None
        self._settled = False

    # ------------------------------------------------------------------ sampling

    @property
    def samples(self) -> dict[int, Sample]:
        """The answers that are there, by their place."""
        return {place: one for place, one in enumerate(self.outcomes) if isinstance(one, Sample)}

    @property
    def sampling(self) -> bool:
        """Whether answers are still being sampled."""
        return bool(self._sampling)

    @property
    def shares_call(self) -> bool:
        """Whether one call may sample several answers."""
        return self.shaped.shares_call and bool(self.claimed.episodes.base_url)

    def start_together(self, places: Sequence[int], *, pieces: bool, after: After | None = None) -> None:
        """Begin to sample the answers at ``places`` in one call, if :attr:`shares_call`; once ``after()`` returns."""
        self._start(self._sample_together(places, pieces, after), f"sampling {len(places)} answers")

    def start_each(self, places: Sequence[int], *, pieces: bool, after: After | None = None) -> None:
        """Begin to sample the answers at ``places``, each with a call of its own; once ``after()`` returns."""

        async def sample(place: int) -> Sample:
            episode, body = self.claimed.episodes[place], self.shaped.bodies[place]
            return await self.swarm.sampler.sample(episode, body, self.deadline, pieces=pieces)

        for place in places:
            self.start(place, sample, after)

    def start(
        self, place: int, sample: Callable[[int], Coroutine[Any, Any, Sample]], after: After | None = None
    ) -> None:
        """Begin to sample the answer at ``place`` as ``sample`` does it; once ``after()`` returns."""
        self._start(self._sample(place, sample, after), f"sampling answer {place}")

    async def progress(self, until: float | None = None) -> bool:
        """Return when a sample is there or has failed; ``False`` when none did before ``until`` on the loop's clock."""
        if not self._sampling:
            return True
        timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait(self._sampling, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def all_sampled(self) -> None:
        """Return when nothing is sampled any more."""
        while self._sampling:
            await asyncio.wait(self._sampling)

    def failure(self) -> SwarmGatewayError:
        """Why there is no answer at all: the user's own mistake first, then what another group can cure."""
        failures = [one for one in self.outcomes if isinstance(one, SwarmGatewayError)]
        return min(failures, key=_gravity, default=EpisodeLostError("the group's samples were cancelled"))

    # ------------------------------------------------------------------ judging

    async def judge(self, feedback: Mapping[int, Feedback] | None = None) -> GroupScore | None:
        """The hook's rewards of the answers that are there, in order of their places; ``None`` where it gives none.

        Also asked for groups that will not be trained: it chooses the answer.

        Args:
            feedback: of the user, by place.
        """
        if self.shaped.drop is DropReason.SUBMIT_HOOK:
            return None
        candidates = [
            self._candidate(index, place, sample, (feedback or {}).get(place))
            for index, (place, sample) in enumerate(self.samples.items())
        ]
        try:
            with phase("hook"):
                score = await self._hooks.score(self.shaped.submission.task, candidates, self.shaped.context)
            self._failure = None
            return score
        except HookError as exc:
            logger.error("group %s has no rewards: %s", self.shaped.group_id, exc)
            self._failure = exc
            self.route.stats.hook_failures[exc.code or exc.type] += 1
            return None

    # ------------------------------------------------------------------ its end

    def settle(self, judged: Sequence[int], score: GroupScore | None, delivered: Sequence[int]) -> None:
        """Bring the group to its end behind the answer.

        Waits for what is still sampled, has the hook judge again if that, or feedback, is new to it, and submits.

        Args:
            judged: the places of the answers that the hook has been asked about; empty: it was not asked.
            score: what it said; ``None``: nothing.
            delivered: the places of the delivered answers, best first.
        """
        self._settling = self.route.background.start(
            self._settle(tuple(judged), score, tuple(delivered)), f"settling group {self.shaped.group_id}"
        )
        # not within it: a task that is cancelled before its first step runs nothing of its own
        self._settling.add_done_callback(self._over)

    async def settled(self, within: float) -> tuple[bool, DropReason | None]:
        """Whether the group is at its end ``within`` so many seconds, and then why it is not trained, if it is not. An
        end that fails is no failure of the answer."""
        assert self._settling is not None, "settle() comes first"
        if within:
            await asyncio.wait({self._settling}, timeout=within)
        else:
            # its first step tells what is dropped at once
            await asyncio.sleep(0)
        return (True, self._outcome(self._settling)) if self._settling.done() else (False, None)

    def cancel(self, reason: DropReason) -> None:
        """Stop everything at once, unless the group has been handed over; repeating it changes nothing."""
        if self._settled:
            return
        self._cancelled = self._cancelled or reason
        self.stop_sampling()
        if self._settling is not None:
            self._settling.cancel()
        else:
            self._drop(self._cancelled)

    def stop_sampling(self) -> None:
        """Cancel what is still being sampled and give its episodes back."""
        for task in self._sampling:
            task.cancel()
        self._sampling.clear()
        given_up = [place for place, one in enumerate(self.outcomes) if not isinstance(one, Sample)]
        self.claimed.give_back(given_up, self._why(self._cancelled or DropReason.PARTIAL))

    async def _settle(
        self, judged: tuple[int, ...], score: GroupScore | None, delivered: tuple[int, ...]
    ) -> DropReason | None:
        await self.all_sampled()
        self._count_tokens(delivered)
        places = tuple(self.samples)
        best = delivered[0] if delivered and delivered[0] in places else None
        if places and places != judged:
            # what the first answers got is void: rewards of two calls cannot be compared
            score = await self.judge()
            if score is not None and best is not None and self._session is not None:
                self._session.scored(score.values[places.index(best)])
        credit = 0.0
        if self._session is not None and best is not None:
            closing = await self._session.closing()
            credit = closing.credit
            if closing.feedback:
                told = {delivered[at]: one for at, one in closing.feedback.items() if at < len(delivered)}
                score = await self.judge(told)
        reason = self._objection(places, score)
        if reason is None and score is not None:
            if not self.route.settings.acknowledge_seconds:
                await asyncio.sleep(HEAD_START)
            return await self._submit(places, score, delivered, credit)
        return reason

    def _over(self, settling: asyncio.Task[DropReason | None]) -> None:
        """Give back what was not submitted, however that came."""
        if self._settled:
            return
        self._drop(self._outcome(settling) or DropReason.SAMPLE)

    def _outcome(self, settling: asyncio.Task[DropReason | None]) -> DropReason | None:
        """What became of the group, whose end is over."""
        if settling.cancelled():
            return self._cancelled or DropReason.CANCELLED
        return DropReason.SAMPLE if settling.exception() is not None else settling.result()

    def _objection(self, places: Sequence[int], score: GroupScore | None) -> DropReason | None:
        """Why these answers with these rewards are not to be trained."""
        if self.shaped.drop is not None:
            return self.shaped.drop
        partial = self.shaped.takes_partial and len(places) >= _LEAST_GROUP
        if len(places) < len(self.outcomes) and not partial:
            failed = any(isinstance(one, SwarmGatewayError) for one in self.outcomes)
            return DropReason.SAMPLE if failed else DropReason.PARTIAL
        return DropReason.REWARD_HOOK if score is None else None

    async def _submit(
        self, places: Sequence[int], score: GroupScore, delivered: Sequence[int], credit: float
    ) -> DropReason | None:
        self.route.stats.informative += score.informative
        self.route.stats.uninformative += not score.informative
        told = outputs(
            score,
            {places.index(delivered[0]): credit} if credit and delivered else {},
            metadata() | self._origin,
            self.shaped.submission.task,
            shuffled=self.route.settings.control == "shuffle",
        )
        uuids = self.claimed.hand_over(places, self._why(DropReason.SAMPLE))
        self._settled = True
        # from here on only the submitter decides: a user who leaves now leaves behind a group that is judged
        return await asyncio.shield(
            self.route.background.start(
                self.swarm.submitter.submit(
                    self.shaped.submission.task.task_id,
                    dict(zip(uuids, told, strict=True)),
                    self.route.settings.submit_timeout_seconds,
                    self.route.stats,
                ),
                f"submitting group {self.shaped.group_id}",
            )
        )

    def _count_tokens(self, delivered: Sequence[int]) -> None:
        for place, sample in self.samples.items():
            tokens = int(sample.answer.usage.get("completion_tokens") or 0)
            if place in delivered:
                self.route.stats.delivered_tokens += tokens
            else:
                self.route.stats.wasted_tokens += tokens

    def _drop(self, reason: DropReason) -> None:
        self._settled = True
        self._cancelled = self._cancelled or reason
        self.stop_sampling()
        self.claimed.give_back(why=self._why(reason))
        self.route.stats.dropped[reason] += 1

    @property
    def _origin(self) -> dict[str, str]:
        return {"group_id": self.shaped.group_id, "hook": self._hooks.source}

    def _why(self, reason: DropReason) -> Why:
        """What is kept with episodes that are given up: what failed says it in its own words."""
        failed = self._failure or next((one for one in self.outcomes if isinstance(one, SwarmGatewayError)), None)
        said = f": {failed.code}: {failed.message}" if failed is not None else ""
        return Why(sendable(f"{reason}{said}"), metadata() | self._origin)

    # ------------------------------------------------------------------ inside

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self.route.background.start(work, name)
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)

    async def _sample(
        self, place: int, sample: Callable[[int], Coroutine[Any, Any, Sample]], after: After | None
    ) -> None:
        if after is not None:
            await after()
        try:
            with span(f"sample {place}"):
                self.outcomes[place] = await sample(place)
        except SwarmGatewayError as exc:
            logger.warning("a sample failed: %s", exc)
            self.outcomes[place] = exc

    async def _sample_together(self, places: Sequence[int], pieces: bool, after: After | None) -> None:
        if after is not None:
            await after()
        group, body = self.claimed.episodes, self.shaped.bodies[0]
        outcomes: Sequence[Sample | SwarmGatewayError]
        try:
            with span(f"sample {len(places)} together"):
                outcomes = await self.swarm.sampler.sample_group(group, places, body, self.deadline, pieces=pieces)
        except SwarmGatewayError as exc:
            logger.warning("the samples of a group failed: %s", exc)
            outcomes = [exc] * len(places)
        for place, outcome in zip(places, outcomes, strict=True):
            self.outcomes[place] = outcome

    def _candidate(self, index: int, place: int, sample: Sample, feedback: Feedback | None) -> Candidate:
        answer = sample.answer
        return Candidate(
            index=index,
            message=answer.message,
            text=answer.text,
            tool_calls=answer.message.get("tool_calls") or [],
            finish_reason=answer.finish_reason,
            completion_tokens=answer.usage.get("completion_tokens") or 0,
            prompt_tokens=answer.usage.get("prompt_tokens") or 0,
            latency_seconds=sample.latency,
            policy_version=sample.policy_version,
            request=self.shaped.submission.requests[place],
            logprobs=answer.logprobs,
            session=self._session.session if self._session is not None else None,
            feedback=feedback,
        )


def _gravity(failure: SwarmGatewayError) -> int:
    order = (RelayedError, EpisodeLostError)
    return next((rank for rank, kind in enumerate(order) if isinstance(failure, kind)), len(order))
