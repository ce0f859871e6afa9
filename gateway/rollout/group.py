"""One group: its answers are sampled, judged, and, if it was claimed, submitted behind whatever is delivered.

Invariant: a claimed group is submitted with rewards that one call of its hook gave for all of it, or it is counted as
dropped; every episode is submitted or given back exactly once, whatever happens in whatever order. A group without
episodes leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from gateway.observability.request import deleted, notes, phase, span
from gateway.rollout.reference import Reference
from gateway.rollout.sampling import EpisodeLostError, Sample, Shaped, UnrecordedGroup, candidate_of
from gateway.rollout.server import Training
from gateway.rollout.submission import add_up, refuses, submit, workflow_outputs
from gateway.sessions.conversation import GroupWatcher, WatchedGroup
from gateway.sessions.sessions import SessionLink
from gateway.stats import Accounted, DropReason, hook_failed
from reward_hooks import Candidate, Feedback, GroupScore
from reward_hooks.contract import malformed_calls, sendable
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.errors import FatalRequestError, HookError, RelayedError, SwarmGatewayError, UpstreamError
from swarm.evidence.pairs import Pair
from swarm.protocol import MAX_NAME
from swarm.types import Notes

logger = logging.getLogger(__name__)

#: Fewer answers cannot be compared.
_LEAST_GROUP = 2


class GroupRun:
    """One group; every method is for the event loop that made it.

    Args:
        episodes: the claimed episodes to sample with, known by their index from here on; or none of them.

    Attributes:
        trains: whether it was claimed.
        outcomes: of each sample, by its index; ``None`` while it is under way, or after it was cancelled.
        reference: an answer that is judged beside the group's; ``None``: there is none.
    """

    def __init__(
        self, training: Training, session: SessionLink | None, shaped: Shaped, episodes: EpisodeGroup | UnrecordedGroup
    ) -> None:
        self.training, self.session = training, session
        self.swarm = training.swarm
        self.shaped = shaped
        self.episodes = episodes
        self.outcomes: list[Sample | SwarmGatewayError | None] = [None] * len(shaped.bodies)
        self.deadline = asyncio.get_running_loop().time() + training.settings.sample_timeout_seconds
        #: indices of episodes that are neither handed over nor given back
        self._claimed: Sequence[EpisodeEndpoint] = () if isinstance(episodes, UnrecordedGroup) else episodes
        self._open = set(range(len(self._claimed)))
        self.trains = bool(self._claimed)
        self.reference: Reference | None = None
        self._failure: HookError | None = shaped.failure
        self._sampling: set[asyncio.Task[None]] = set()
        self._settling: asyncio.Task[str | None] | None = None
        self._cancelled: str | None = None
        self._settled = False
        self._delivered: tuple[int, ...] = ()
        self._accounted = Accounted()
        if session is not None:
            session.ledger.under_way += 1

    # ------------------------------------------------------------------ sampling

    @property
    def samples(self) -> dict[int, Sample]:
        """The answers so far, by their index."""
        return {index: outcome for index, outcome in enumerate(self.outcomes) if isinstance(outcome, Sample)}

    @property
    def sampling(self) -> bool:
        """Whether answers are still being sampled."""
        return bool(self._sampling)

    def sample(self, indices: Sequence[int], *, apart: bool = False) -> None:
        """Begin to sample the answers with ``indices``: in one call where that is possible, unless they are to come
        ``apart``."""
        sampler, bodies = self.swarm.sampler, self.shaped.bodies

        async def sample_alone(index: int) -> list[Sample]:
            return [await sampler.sample(self.episodes[index], bodies[index], self.deadline)]

        async def all_together() -> list[Sample]:
            return await sampler.sample_group(self.episodes, indices, bodies[0], self.deadline)

        if len(indices) > 1 and not apart and self.shaped.shares_call and self.episodes.base_url:
            self.start(indices, all_together)
        else:
            for index in indices:
                self.start([index], partial(sample_alone, index))

    def start(self, indices: Sequence[int], sample: Callable[[], Awaitable[Sequence[Sample]]]) -> None:
        """Begin to sample the answers with ``indices``."""
        name = f"sample {indices[0]}" if len(indices) == 1 else f"sample {len(indices)} together"

        async def sampled() -> None:
            outcomes: Sequence[Sample | SwarmGatewayError]
            try:
                with span(name):
                    outcomes = await sample()
            except SwarmGatewayError as exc:
                logger.warning("%s failed: %s", name, exc)
                outcomes = [exc] * len(indices)
            for index, outcome in zip(indices, outcomes, strict=True):
                self.outcomes[index] = outcome

        task = self.swarm.background.start(sampled(), name)
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)

    async def progress(self, until: float | None = None) -> bool:
        """Return when a sample has ended or failed; ``False`` when none did before ``until`` on the loop's clock."""
        if not self._sampling:
            return True
        timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait(self._sampling, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def failure(self) -> SwarmGatewayError:
        """Why there is no answer at all: the user's own mistake first, then what another group can cure."""
        return min(self._failures, key=_gravity, default=EpisodeLostError("the group's samples were cancelled"))

    @property
    def _failures(self) -> list[SwarmGatewayError]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, SwarmGatewayError)]

    # ------------------------------------------------------------------ judging

    async def judge(self, feedback: Mapping[int, Feedback] | None = None) -> GroupScore | None:
        """The hook's rewards of the answers so far, in order of their indices; ``None`` where it gives none. The user's
        ``feedback`` is by index. Groups that will not be trained are judged too: the score chooses the answer."""
        if self.shaped.drop is DropReason.SUBMIT_HOOK:
            return None
        candidates, indices = self._candidates(feedback or {}), tuple(self.samples)
        judge = self.reference or self.training.hooks
        try:
            with phase("hook"):
                score = await judge.score(self.shaped.submission.task, candidates, self.shaped.context)
            self._failure = None
        except HookError as exc:
            logger.debug("group %s has no rewards: %s", self.shaped.group_id, exc)
            self._failure, score = exc, None
            hook_failed(exc, self.training.stats)
        self._show(indices, candidates, score)
        return score

    async def compared(self, reference: Reference) -> Pair:
        """The pair of the answers, once all are there, and ``reference``, judged in a call of its own; it trains
        nothing."""
        while self._sampling:
            await asyncio.wait(self._sampling)
        if self.samples and self.shaped.drop is not DropReason.SUBMIT_HOOK:
            try:
                await reference.judge(self.shaped.submission.task, self._candidates({}), self.shaped.context)
            except HookError as exc:
                hook_failed(exc, self.training.stats)
        pair = reference.pair(self.shaped, self.outcomes)
        if (difference := pair.difference) is not None:
            self._tell(lambda watcher: watcher.compared(self.shaped.group_id, difference))
        return pair

    # ------------------------------------------------------------------ its end

    def deliver(self, message: dict[str, Any], reward: float | None, choices: int) -> None:
        """The session's answer is ``message``, the best of ``choices``; see :meth:`SessionLink.delivered`."""
        if self.session is not None:
            answer_id, trains = self.shaped.answer_id, self.shaped.may_train
            self.session.delivered(answer_id, message, reward, choices=choices, trains=trains)

    def settle(self, judged: Sequence[int], score: GroupScore | None, delivered: Sequence[int]) -> None:
        """Bring the group to its end in the background: wait for unfinished samples, have the hook judge again if those
        or feedback are new to it, and submit.

        Args:
            judged: the indices of the answers that the hook has judged.
            score: the hook's; ``None``: it gave none.
            delivered: the indices of the delivered answers, best first.
        """
        self._delivered = tuple(delivered)
        if (session := self.session) is not None:
            self._tell(lambda watcher: watcher.settling(self.shaped.group_id, delivered, session.turn))
        settling = self._settle(tuple(judged), score)
        self._settling = self.swarm.background.start(settling, f"settling group {self.shaped.group_id}")
        # a callback, because a task that is cancelled before its first step runs none of its own code
        self._settling.add_done_callback(lambda settling: self._end(self._outcome(settling)))

    async def settled(self, within: float) -> tuple[bool, str | None]:
        """Wait up to ``within`` seconds for the end: whether it is there, and why the group is not trained, if it is
        not. An end that fails does not fail the answer."""
        assert self._settling is not None, "settle() comes first"
        await asyncio.wait({self._settling}, timeout=within)
        return (True, self._outcome(self._settling)) if self._settling.done() else (False, None)

    def cancel(self, reason: DropReason) -> None:
        """Stop everything at once, unless the group has been handed over; idempotent."""
        if self._settled:
            return
        self._cancelled = self._cancelled or reason
        self.stop_sampling()
        if self._settling is not None:
            self._settling.cancel()
        else:
            self._end(self._cancelled)

    def fail(self) -> None:
        """Note that the group, which is cancelled already, gave its user no answer."""
        for index, outcome in enumerate(self.outcomes):
            if not isinstance(outcome, SwarmGatewayError):
                self.outcomes[index] = UpstreamError("nobody waited longer for this answer", code="given_up")

    def stop_sampling(self) -> None:
        """Cancel unfinished samples and give their episodes back."""
        for task in self._sampling:
            task.cancel()
        self._sampling.clear()
        given_up = [index for index, outcome in enumerate(self.outcomes) if not isinstance(outcome, Sample)]
        self._give_back(given_up, self._cancelled or DropReason.PARTIAL)

    async def _settle(self, judged: tuple[int, ...], score: GroupScore | None) -> str | None:
        while self._sampling:
            await asyncio.wait(self._sampling)
        self._count_tokens()
        indices = tuple(self.samples)
        if not self.trains:
            if score is not None:
                self.training.stats.recent.add(score)
            return self._objection(indices, score)
        best = next((index for index in self._delivered[:1] if index in indices), None)
        turn = self.session.turn if self.session is not None else None
        if indices and indices != judged:
            # the first rewards are void: rewards of two calls cannot be compared
            score = await self.judge()
            if score is not None and best is not None and turn is not None:
                turn.reward = score.values[indices.index(best)]
        if turn is not None and best is not None:
            await turn.closing(self.swarm.open_groups)
            if feedback := turn.feedback_in_group(self._delivered):
                score = await self.judge(feedback)
        if score is not None:
            self.training.stats.recent.add(score)
        reason = self._objection(indices, score)
        if reason is None and score is not None:
            credit = {indices.index(best): turn.credit} if best is not None and turn is not None and turn.credit else {}
            return await self._submit(indices, score, credit)
        return reason

    def _end(self, reason: str | None) -> None:
        """Give back what was not submitted, and tell the session what became of the group's tokens: ``reason`` says why
        they are not trained."""
        if not self._settled:
            self._settled = True
            reason = self._cancelled = self._cancelled or reason or DropReason.SAMPLE
            self.stop_sampling()
            self._give_back(range(len(self.episodes)), reason)
            if self.trains:
                self.training.stats.groups.dropped[reason] += 1
        if self.session is not None:
            usages = [sample.answer.usage for sample in self.samples.values()]
            sampled, masked = (
                sum(int(usage.get(name) or 0) for usage in usages) for name in ("completion_tokens", "prompt_tokens")
            )
            self.session.ledger.add(reason, len(usages), sampled, masked)
            add_up(self.session.ledger.accounted, self._accounted)
            self._tell(lambda watcher: watcher.over(self.shaped.group_id, reason))

    def _outcome(self, settling: asyncio.Task[str | None]) -> str | None:
        """Why the group, which has ended, was not trained."""
        if settling.cancelled():
            return self._cancelled or DropReason.CANCELLED
        return DropReason.SAMPLE if settling.exception() is not None else settling.result()

    def _objection(self, indices: Sequence[int], score: GroupScore | None) -> str | None:
        """Why these answers with these rewards are not to be trained."""
        if self.shaped.drop is not None:
            # of a group without episodes people want to know that the hook did not choose
            failed = not self.trains and score is None and self.shaped.failure is None
            return DropReason.REWARD_HOOK if failed else self.shaped.drop
        answers = [self.samples[index].answer.message for index in indices]
        if (rules := self.training.settings.data.rules) is not None and rules.private(answers):
            self.training.stats.withheld["answer"] += 1
            return DropReason.PRIVATE
        partial = self.shaped.takes_partial and len(indices) >= _LEAST_GROUP
        if len(indices) < len(self.outcomes) and not partial:
            return DropReason.SAMPLE if self._failures else DropReason.PARTIAL
        return DropReason.REWARD_HOOK if score is None else None

    async def _submit(
        self, indices: Sequence[int], score: GroupScore, credit: Mapping[int, float]
    ) -> DropReason | None:
        settings, stats = self.training.settings, self.training.stats
        stats.groups.informative += score.informative
        stats.groups.uninformative += not score.informative
        task = self.shaped.submission.task
        delivered = [index in self._delivered for index in indices]
        answers = [self.samples[index].answer for index in indices]
        refused = [refuses(answer.message, answer.finish_reason, settings.refusal_openings) for answer in answers]
        shuffled = settings.control == "shuffle"
        outputs = workflow_outputs(score, credit, self._notes, task, delivered, refused, shuffled=shuffled)
        self._give_back(self._open.difference(indices), DropReason.SAMPLE)
        self._open.clear()
        self._settled = True
        by_episode = {self._claimed[index].episode_uuid: output for index, output in zip(indices, outputs, strict=True)}
        # from here on :meth:`cancel` leaves a judged group alone
        pair = None if self.reference is None else self.reference.pair(self.shaped, self.outcomes)
        within = settings.submit_timeout_seconds
        return await submit(self.swarm.client, task.task_id, by_episode, within, stats, self._accounted, pair)

    def _count_tokens(self) -> None:
        usage = next((sample.answer.usage for sample in self.samples.values()), {})
        cached: int | None = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            prompts = self.training.stats.prompts
            prompts.cached += cached
            prompts.computed += max(0, int(usage.get("prompt_tokens") or 0) - cached)
        for index, sample in self.samples.items():
            calls = cast("list[dict[str, Any]]", sample.answer.message.get("tool_calls") or [])
            self.training.stats.malformed_calls += len(malformed_calls(calls))
            tokens = int(sample.answer.usage.get("completion_tokens") or 0)
            if index in self._delivered:
                self.training.stats.tokens.delivered += tokens
            else:
                self.training.stats.tokens.wasted += tokens

    def _give_back(self, indices: Iterable[int], reason: str) -> None:
        """Abort those episodes with ``indices`` that are open; the server keeps the reason with them."""
        going = sorted(self._open.intersection(indices))
        if not going:
            return
        self._open.difference_update(going)
        failed = self._failure or next(iter(self._failures), None)
        details = f": {failed.code}: {failed.message}" if failed is not None else ""
        if failed is not None and (rules := self.training.settings.data.rules) is not None and rules.private(details):
            # a hook's exception may quote the answer for which the group is not kept
            details = f": {failed.code}"
        episodes = [self._claimed[index] for index in going]
        self.swarm.abort(episodes, sendable(f"{reason}{details}"), self._notes)

    @property
    def _notes(self) -> Notes:
        # a name may hold a lone surrogate, which JSON bodies can carry
        session = self.session.name.encode(errors="replace").decode()[:MAX_NAME] if self.session is not None else ""
        hooks = self.training.hooks
        mine = {"group_id": self.shaped.group_id, "hook": hooks.source, "code": hooks.code, "session": session}
        return notes().model_copy(update=mine)

    def _candidates(self, feedback: Mapping[int, Feedback]) -> list[Candidate]:
        return [
            candidate_of(
                sample.answer,
                sample.latency,
                index=position,
                policy_version=sample.policy_version,
                request=self.shaped.submission.requests[index],
                logprobs=sample.answer.logprobs,
                session=self.session.session if self.session is not None else None,
                feedback=feedback.get(index),
            )
            for position, (index, sample) in enumerate(self.samples.items())
        ]

    def _tell(self, news: Callable[[GroupWatcher], None]) -> None:
        """Call ``news`` with whoever watches; one that fails is logged and harms no request."""
        if self.session is not None and (watcher := self.session.sessions.watcher) is not None:
            try:
                news(watcher)
            except Exception:
                logger.exception("what watches the groups has failed")

    def _show(self, indices: Sequence[int], candidates: Sequence[Candidate], score: GroupScore | None) -> None:
        """Show the judged group to whoever watches, unless a text of it may not be kept."""
        session = self.session
        if session is None or session.sessions.watcher is None:
            return
        if deleted() or session.incoming.consent.withholds([candidate.message for candidate in candidates]):
            # an earlier judging may have shown the others
            self._tell(lambda watcher: watcher.forget(self.shaped.group_id))
            return
        group = WatchedGroup(
            self.shaped.group_id,
            session.incoming,
            session.scope.route,
            session.name,
            self._notes,
            indices,
            candidates,
            score,
            self._failure,
            session.turn,
        )
        self._tell(lambda watcher: watcher.judged(group))


def _gravity(failure: SwarmGatewayError) -> int:
    order = (RelayedError, FatalRequestError, EpisodeLostError)
    return next((rank for rank, kind in enumerate(order) if isinstance(failure, kind)), len(order))
