"""How good a policy is on prompts that it is not trained on: eval episodes, scored by the hook that trains it.

Invariant: every prompt has all its answers and a score, or there is no result; nothing sampled here is trained on.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from reward_hooks import Candidate, HookContext, HookRunner
from study.curves import interval
from swarm.client import AsyncSwarmClient
from swarm.errors import UpstreamError
from swarm.http.client import ConnectionBrokenError, HttpClient
from swarm.types import Model, Task, WorkflowOutput

_ATTEMPTS, _PAUSE = 3, 1.0
_CLAIM_SECONDS, _SAMPLE_SECONDS = 300.0, 300.0
_VERSION = "x-swarm-policy-version"


class HeldOutConfig(Model):
    """What is sampled: ``samples`` answers to each prompt; ``resamples`` of the prompts give the interval."""

    samples: int = Field(default=4, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int = Field(ge=1)
    concurrency: int = Field(default=8, ge=1)
    resamples: int = Field(default=10_000, ge=100)
    seed: int = 0


class HeldOutAnswer(Model):
    """One answer with its reward."""

    text: str
    finish_reason: str
    tokens: int
    reward: float
    components: dict[str, float]
    reason: str


class HeldOutPrompt(Model):
    """One prompt with its answers."""

    prompt: str
    answers: list[HeldOutAnswer]

    @property
    def mean(self) -> float:
        """Mean reward of the answers."""
        return fmean(answer.reward for answer in self.answers)


class HeldOutScore(Model):
    """The score of one policy.

    Attributes:
        mean: mean reward over all answers.
        low: lower end of the bootstrap 95 % interval of the mean, over prompts.
        high: its upper end.
        components: their means, over the answers that have them.
        policy_versions: training steps whose weights answered.
    """

    label: str
    mean: float
    low: float
    high: float
    components: dict[str, float]
    tokens: float
    policy_versions: list[int]
    config: HeldOutConfig
    prompts: list[HeldOutPrompt]


async def evaluate(
    label: str, swarm: AsyncSwarmClient, hooks: HookRunner, tasks: Sequence[Task], config: HeldOutConfig
) -> HeldOutScore:
    """Answer ``tasks`` with the weights that serve now, and score the answers.

    Args:
        label: of the result.
        swarm: of a swarm server whose engine rolls.
        hooks: the reward hook sees the task as it is, without the submit hook.
        tasks: with ``init_messages``.
        config: of the sampling.

    Raises:
        HookError: the hook failed on a prompt.
        SwarmGatewayError: a prompt could not be answered in three attempts.
        ExceptionGroup: of these, from the prompts that ran at once.
    """
    places = asyncio.Semaphore(config.concurrency)
    versions: set[int] = set()
    http = HttpClient()

    async def one(task: Task) -> HeldOutPrompt:
        async with places:
            prompt, version = await _answered(swarm, http, hooks, task, config)
        versions.update([] if version is None else [int(version)])
        return prompt

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task)) for task in tasks]
    finally:
        await http.close()
    prompts = [task.result() for task in running]
    answers = [answer for prompt in prompts for answer in prompt.answers]
    low, high = interval([prompt.mean for prompt in prompts], config.resamples, config.seed)
    names = sorted({name for answer in answers for name in answer.components})
    return HeldOutScore(
        label=label,
        mean=fmean(prompt.mean for prompt in prompts),
        low=low,
        high=high,
        components={
            name: fmean(answer.components[name] for answer in answers if name in answer.components) for name in names
        },
        tokens=fmean(answer.tokens for answer in answers),
        policy_versions=sorted(versions),
        config=config,
        prompts=prompts,
    )


async def _answered(
    swarm: AsyncSwarmClient, http: HttpClient, hooks: HookRunner, task: Task, config: HeldOutConfig
) -> tuple[HeldOutPrompt, str | None]:
    """The prompt with its answers, and the policy version that gave them."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            async with swarm.group(config.samples, _CLAIM_SECONDS, episode_type="eval") as group:
                choices, version = await _sampled(http, group.base_url, group.api_key, task, config)
                candidates = [_candidate(index, choice) for index, choice in enumerate(choices)]
                score = await hooks.score(task, candidates, HookContext(num_repeat=config.samples))
                outputs = [
                    WorkflowOutput(reward=reward.value, log_metrics=reward.components) for reward in score.rewards
                ]
                await group.end(task, outputs)
        except UpstreamError:
            # a weight sync takes episodes away; the next claim waits for its end
            if attempt == _ATTEMPTS:
                raise
            await asyncio.sleep(_PAUSE * random.uniform(0.5, 1.0))
        else:
            answers = [
                HeldOutAnswer(
                    text=candidate.text,
                    finish_reason=candidate.finish_reason,
                    tokens=candidate.completion_tokens,
                    reward=reward.value,
                    components=reward.components,
                    reason=reward.reason,
                )
                for candidate, reward in zip(candidates, score.rewards, strict=True)
            ]
            return HeldOutPrompt(prompt=task.main_query, answers=answers), version
    raise AssertionError("the last attempt returns or raises")


async def _sampled(
    http: HttpClient, base_url: str, api_key: str, task: Task, config: HeldOutConfig
) -> tuple[list[dict[str, Any]], str | None]:
    """The choices of one call, and its policy version."""
    body = {
        "messages": task.init_messages,
        "temperature": config.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": config.max_tokens,
        "return_token_ids": True,
    }
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    try:
        content = json.dumps(body).encode()
        answer = await http.post(f"{base_url}/chat/completions", content, headers, _SAMPLE_SECONDS)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {answer.content[:300]!r}")
        choices: list[dict[str, Any]] = json.loads(answer.content)["choices"]
        if len(choices) != config.samples:
            raise ValueError(f"{len(choices)} answers")
    except (ConnectionBrokenError, TimeoutError, ValueError, LookupError, TypeError) as exc:
        raise UpstreamError(f"a held-out prompt was not answered {config.samples} times: {exc}") from exc
    return sorted(choices, key=lambda choice: choice["index"]), answer.headers.get(_VERSION)


def _candidate(index: int, choice: dict[str, Any]) -> Candidate:
    message: dict[str, Any] = choice["message"]
    return Candidate(
        index=index,
        message=message,
        text=message.get("content") or "",
        finish_reason=choice["finish_reason"],
        completion_tokens=len(choice.get("token_ids") or ()),
    )
