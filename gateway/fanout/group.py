"""One request becomes a group of episodes: claim, sample, score, submit; the best answers come back.

Invariant: a group is submitted whole with the rewards its hook gave, or every episode of it is aborted and the reason
counted; the user gets an answer from whatever was sampled.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.dialects import Answer, ChatDialect, LLMRequest
from gateway.background import Background
from gateway.config import RouteSettings
from gateway.fanout.episodes import Episodes, Serving, Waiting
from gateway.fanout.sampling import EpisodeLostError, Sample, Sampler
from gateway.fanout.submission import Submitter
from gateway.stats import DropReason, Stats
from reward_hooks import Candidate, GroupScore, HookContext, HookRunner, Submission, UserRequest
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.errors import HookError, RelayedError, RequestError, SwarmGatewayError
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

#: Seconds an answer waits for its group's acknowledgement, so that its header can say ``true``.
_ACKNOWLEDGE_SECONDS = 0.25
#: Temperatures below it are none to vLLM.
_GREEDY = 1e-5


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What came of one group.

    Attributes:
        group_id: names the group in logs and in the answer's id.
        answers: the answers to deliver, best first.
        policy_version: of the weights that sampled the first of them.
        reward: of the first of them, as the hook gave it; ``None`` where there is no score.
        reward_mean: over the group.
        trained: acknowledged by the swarm server; ``None`` while the acknowledgement is still under way.
        drop_reason: why the group is not trained.
    """

    group_id: str
    answers: list[Answer]
    policy_version: int | None
    reward: float | None
    reward_mean: float | None
    trained: bool | None
    drop_reason: DropReason | None

    def report(self) -> dict[str, Any]:
        """What the user may know of the group, as JSON: the ``swarm`` object of a stream."""
        return {
            "policy_version": self.policy_version,
            "reward": self.reward,
            "reward_mean": self.reward_mean,
            "trained": self.trained,
            "drop_reason": self.drop_reason,
        }

    def headers(self) -> dict[str, str]:
        """The same as response headers; what is not known is left out."""
        trained = {True: "true", False: "false", None: "pending"}[self.trained]
        values = {
            "x-swarm-policy-version": self.policy_version,
            "x-swarm-reward": self.reward,
            "x-swarm-reward-mean": self.reward_mean,
            "x-swarm-trained": trained,
            "x-swarm-drop-reason": self.drop_reason,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


class FanOut:
    """Runs groups; one per route, safe for concurrent requests."""

    def __init__(
        self,
        config: RouteSettings,
        episodes: Episodes,
        sampler: Sampler,
        hooks: HookRunner,
        submitter: Submitter,
        background: Background,
        stats: Stats,
    ) -> None:
        self._config = config
        self._episodes = episodes
        self._sampler = sampler
        self._hooks = hooks
        self._submitter = submitter
        self._background = background
        self._stats = stats

    async def run(
        self, dialect: ChatDialect, request: LLMRequest, headers: Mapping[str, str], waited: Waiting, serving: Serving
    ) -> GroupResult:
        """Run the group of one request.

        Args:
            dialect: says how a body is sent on.
            request: what the application asked for.
            headers: the application's own, names in lower case and without secrets; the hook sees them.
            waited: what the request has spent of its waiting time.
            serving: what the swarm serves, with a job.

        Raises:
            RequestError: more choices are asked for than the group has, or the engine refuses the request.
            EpisodeLostError: the whole group went away; another one may be run.
            UnavailableError: no episodes in time, or none of them could be served; nothing was sampled.
            UpstreamError: not one answer could be sampled.
        """
        size = self._config.num_repeat or serving.num_repeat or 1
        if request.choices > size:
            raise RequestError(f"n is {request.choices}, but this gateway samples {size} answers", param="n")
        group_id = uuid.uuid4().hex
        context = HookContext(
            num_repeat=size,
            policy_version=serving.policy_version,
            group_id=group_id,
            deadline_seconds=self._config.hook_timeout_seconds,
        )
        submission, drop = await self._shape(request, headers, context)
        if drop is None and size != serving.num_repeat:
            drop = DropReason.SIZE
        # whatever name the application or the hook gave, an alias or nothing: there is one model to sample from
        bodies = [dialect.sampling_body(body, serving.model) for body in submission.requests]
        episodes = await self._episodes.claim(len(bodies), waited)
        handed_over = False
        try:
            samples = await self._sample(episodes, bodies, one_call=_may_share(submission.requests, bodies, serving))
            drop = drop or (DropReason.SAMPLE if len(samples) < len(bodies) else None)
            score, drop = await self._score(submission, samples, context, drop)
            acknowledged: asyncio.Task[DropReason | None] | None = None
            if drop is None and score is not None:
                outputs = self._outputs(episodes, score)
                self._stats.uninformative += not score.informative
                acknowledged = self._background.start(
                    self._submitter.submit(
                        submission.task.task_id, outputs, self._config.submit_timeout_seconds, self._stats
                    ),
                    f"submitting group {group_id}",
                )
                handed_over = True
        except asyncio.CancelledError:
            drop = DropReason.CANCELLED
            raise
        except SwarmGatewayError:
            drop = drop or DropReason.SAMPLE
            raise
        finally:
            if not handed_over:
                self._episodes.abort(episodes)
                self._stats.dropped[drop or DropReason.SAMPLE] += 1
        trained: bool | None = False
        if acknowledged is not None:
            await asyncio.wait({acknowledged}, timeout=_ACKNOWLEDGE_SECONDS)
            drop = acknowledged.result() if acknowledged.done() else None
            trained = drop is None if acknowledged.done() else None
        return _result(group_id, samples, score, request.choices, trained, drop)

    async def _shape(
        self, request: LLMRequest, headers: Mapping[str, str], context: HookContext
    ) -> tuple[Submission, DropReason | None]:
        """The request bodies of the group; where the hook fails, one untouched body that will not be trained."""
        # the group's own id names the task: a caller may send one x-request-id twice, two prompts are two groups
        asked = UserRequest(
            request_id=context.group_id, body=request.body, model=request.model or "", headers=dict(headers)
        )
        try:
            return await self._hooks.submit(asked, context), None
        except HookError as exc:
            self._failed(exc, context)
            return Submission(
                task=Task(task_id=context.group_id), requests=[request.body] * request.choices
            ), DropReason.SUBMIT_HOOK

    async def _sample(self, episodes: EpisodeGroup, bodies: Sequence[bytes], *, one_call: bool) -> list[Sample]:
        """The samples that succeeded, in order of their episodes; ``one_call`` if one may sample them all.

        Raises:
            RequestError: the engine refused the request itself, everywhere.
            UnavailableError, UpstreamError: no sample succeeded.
        """
        deadline = asyncio.get_running_loop().time() + self._config.sample_timeout_seconds
        if one_call and episodes.base_url:
            return await self._sampler.sample_group(episodes, bodies[0], deadline)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._attempt(episode, body, deadline))
                for episode, body in zip(episodes, bodies, strict=True)
            ]
        outcomes = [task.result() for task in tasks]
        samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, SwarmGatewayError)]
        for failure in failures:
            logger.warning("a sample failed: %s", failure.message)
        if not samples:
            raise min(failures, key=_gravity)
        return samples

    async def _attempt(self, episode: EpisodeEndpoint, body: bytes, deadline: float) -> Sample | SwarmGatewayError:
        try:
            return await self._sampler.sample(episode, body, deadline)
        except SwarmGatewayError as exc:
            return exc

    async def _score(
        self, submission: Submission, samples: Sequence[Sample], context: HookContext, drop: DropReason | None
    ) -> tuple[GroupScore | None, DropReason | None]:
        """The hook's rewards; also for groups that are dropped, because they choose the answer."""
        if drop is DropReason.SUBMIT_HOOK:
            return None, drop
        # which request a sample came from is known only when none of them failed
        requests = submission.requests if len(samples) == len(submission.requests) else [{}] * len(samples)
        candidates = [
            _candidate(index, sample, request)
            for index, (sample, request) in enumerate(zip(samples, requests, strict=True))
        ]
        try:
            return await self._hooks.score(submission.task, candidates, context), drop
        except HookError as exc:
            self._failed(exc, context)
            return None, drop or DropReason.REWARD_HOOK

    def _failed(self, error: HookError, context: HookContext) -> None:
        logger.error("group %s is not trained: %s", context.group_id, error.message)
        self._stats.hook_failures[error.code or error.type] += 1

    def _outputs(self, episodes: Sequence[EpisodeEndpoint], score: GroupScore) -> dict[str, WorkflowOutput]:
        """What to submit for each episode, by uuid; permuted rewards under ``control: shuffle``."""
        values = score.values
        if self._config.control == "shuffle":
            values = random.sample(values, len(values))
        return {
            episode.episode_uuid: WorkflowOutput(
                reward=value, log_metrics=reward.components, metadata={"reason": reward.reason} if reward.reason else {}
            )
            for episode, value, reward in zip(episodes, values, score.rewards, strict=True)
        }


def _may_share(requests: Sequence[Mapping[str, Any]], bodies: Sequence[bytes], serving: Serving) -> bool:
    """Whether one call may sample all answers: the hooks left the bodies alike, and they are sampled in fact (a greedy
    call has but one answer, so vLLM refuses to give several)."""
    if len(bodies) < 2 or bodies.count(bodies[0]) < len(bodies):
        return False
    temperature = requests[0].get("temperature")
    greedy = (isinstance(temperature, int | float) and temperature < _GREEDY) or requests[0].get("use_beam_search")
    return not (serving.keeps_sampling and greedy)


def _gravity(failure: SwarmGatewayError) -> int:
    """Which of several failures to tell: the user's own mistake first, then what another group can cure."""
    order = (RelayedError, EpisodeLostError)
    return next((rank for rank, kind in enumerate(order) if isinstance(failure, kind)), len(order))


def _candidate(index: int, sample: Sample, request: dict[str, Any]) -> Candidate:
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
        request=request,
        logprobs=answer.logprobs,
    )


def _result(
    group_id: str,
    samples: Sequence[Sample],
    score: GroupScore | None,
    choices: int,
    trained: bool | None,
    drop: DropReason | None,
) -> GroupResult:
    order = list(range(len(samples)))
    if score is not None:
        order.sort(key=lambda index: -score.values[index])
    best = order[0]
    return GroupResult(
        group_id=group_id,
        answers=[samples[index].answer for index in order[:choices]],
        policy_version=samples[best].policy_version,
        reward=score.values[best] if score is not None else None,
        reward_mean=score.mean if score is not None else None,
        trained=trained,
        drop_reason=drop,
    )
