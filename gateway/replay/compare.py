"""Held-out prompts, scored with two versions of a model: which of them is better, and whether that can be told.

A prompt is paired with itself: its difference is the mean reward of the later version's answers minus that of the
earlier one's. The interval is Student's, of the mean of these differences (:func:`swarm.intervals.mean_interval`), so
how hard a prompt is cancels out. A hook judges the answers of both versions to a prompt in one call, in an order that
tells it nothing of the version. That is right for hooks that score and for hooks that rank.

Invariant: a prompt that lacks a reward of either version enters no mean, and is counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from gateway.reports.report import CONFIDENCE, Comparison, Report, SavedAnswer, Score, by_prompt
from reward_hooks import Candidate, HookContext, HookRunner, Hooks, Submission, UserRequest
from reward_hooks.contract import texts_of
from reward_hooks.offline import OfflineConfig, run_offline
from reward_hooks.recorded import RecordedGroup
from swarm.errors import ConfigError, HookError
from swarm.intervals import mean_interval, values_to_tell
from swarm.progress import reward

#: Fewer prompts than this support no verdict: their spread is not known well enough.
LEAST_PROMPTS = 8
#: Seconds that a call of a hook may take.
HOOK_SECONDS = 60.0
#: More prompts than this are not worth naming.
_MOST_PROMPTS = 100_000


async def scored(report: Report, earlier: Report | None, hooks: Hooks) -> Report:
    """``report`` with the rewards of its prompts, or with what can be told of it against an ``earlier`` one.

    Args:
        report: an untrained replay.
        earlier: another one, of the version to compare with.
        hooks: what judges the answers.

    Raises:
        ConfigError: the two have no prompt in common, or the hook fails on all of them.
    """
    if earlier is None:
        return await judge_alone(report, hooks)
    rewards = await judge_together(earlier, report, hooks)
    return report.model_copy(update={"comparison": compare(earlier, report, rewards)})


def compare(earlier: Report, later: Report, rewards: Mapping[str, tuple[float, float]]) -> Comparison:
    """What can be told of the ``later`` version against the ``earlier`` one.

    Args:
        earlier, later: untrained replays of the same prompts.
        rewards: by prompt, of both versions, from :func:`judge_together`.
    """
    before, after = by_prompt(earlier.scores), by_prompt(later.scores)
    counts = {"prompts": len(rewards), "left_out": len(before.keys() | after.keys()) - len(rewards)}
    if not rewards:
        return Comparison(
            earlier=earlier.label, **counts, verdict="nothing can be told: no prompt has a reward of both versions"
        )
    differences = [b - a for a, b in rewards.values()]
    mean, low, high = mean_interval(differences, CONFIDENCE)
    has_spread = len(differences) > 1
    return Comparison(
        earlier=earlier.label,
        **counts,
        before=fmean(a for a, _ in rewards.values()),
        after=fmean(b for _, b in rewards.values()),
        difference=mean,
        low=low if has_spread else None,
        high=high if has_spread else None,
        verdict=verdict(differences),
    )


def verdict(differences: Sequence[float]) -> str:
    """In one sentence whether the later version is better, by its differences to the earlier one, one per prompt."""
    count = len(differences)
    if count < LEAST_PROMPTS:
        return f"nothing can be told from {count} prompt{'s' * (count != 1)}: give {LEAST_PROMPTS} at least"
    mean, low, high = mean_interval(differences, CONFIDENCE)
    interval = f"{reward(abs(mean))} [{reward(low)}, {reward(high)}] on {count} prompts"
    if low > 0:
        return f"better by {interval}"
    if high < 0:
        return f"worse by {reward(abs(mean))} [{reward(-high)}, {reward(-low)}] on {count} prompts"
    sign = "" if mean < 0 else "+"
    words = f"no difference can be told on {count} prompts: {sign}{reward(mean)} [{reward(low)}, {reward(high)}]"
    wanted = values_to_tell(mean, stdev(differences), CONFIDENCE)
    if wanted is None or wanted > _MOST_PROMPTS:
        return words
    return f"{words}; about {max(1, wanted - count)} more prompts would tell a difference of this size"


async def judge_alone(report: Report, hooks: Hooks) -> Report:
    """``report`` with the rewards that ``hooks`` give its answers, those to one prompt in one call.

    Args:
        report: an untrained replay with answers.
        hooks: what judges.
    """
    listed = by_prompt(report.scores)
    sides = [(key, [_answers(scores)]) for key, scores in listed.items()]
    means = await _judged(sides, {key: scores[0].messages for key, scores in listed.items()}, hooks)
    scores = [
        score.model_copy(update={"reward": means[key][0] if key in means else None})
        for key, ones in listed.items()
        for score in ones
    ]
    return report.model_copy(update={"scores": scores})


async def judge_together(earlier: Report, later: Report, hooks: Hooks) -> dict[str, tuple[float, float]]:
    """Mean rewards of both versions' answers by prompt: ``hooks`` judge them in one call, shuffled.

    Args:
        earlier, later: untrained replays with answers.
        hooks: what judges.

    Raises:
        ConfigError: the two have no prompt in common.
    """
    before, after = by_prompt(earlier.scores), by_prompt(later.scores)
    shared = [key for key in before if key in after]
    if not shared:
        raise ConfigError(
            f"{earlier.label} and {later.label} have no prompt in common: compare replays --no-train of the same --data"
        )
    sides = [(key, [_answers(before[key]), _answers(after[key])]) for key in shared]
    means = await _judged(sides, {key: before[key][0].messages for key in shared}, hooks)
    return {key: (means[0], means[1]) for key, means in means.items()}


def _answers(scores: Sequence[Score]) -> list[SavedAnswer]:
    return [answer for score in scores for answer in score.answers]


async def _judged(
    sides: Sequence[tuple[str, list[list[SavedAnswer]]]],
    prompts: Mapping[str, list[dict[str, Any]]],
    hooks: Hooks,
) -> dict[str, list[float]]:
    """By prompt the mean reward of each side; without prompts on which the hook fails, or which it lets pass.

    Raises:
        ConfigError: it fails on all of them; with its first error.
    """
    failure = ""
    runner, groups = HookRunner(hooks, HOOK_SECONDS), dict[str, tuple[RecordedGroup, list[int]]]()
    for key, answers in sides:
        if not all(answers):
            continue
        listed = [(side, answer) for side, answers_of_side in enumerate(answers) for answer in answers_of_side]
        # a judge that prefers a place must not prefer a version
        random.Random(key).shuffle(listed)
        body = {"messages": prompts[key]}
        request = UserRequest(request_id=f"prompt-{len(groups)}", body=body)
        try:
            submission = await runner.submit(
                request, HookContext(num_repeat=len(listed), deadline_seconds=HOOK_SECONDS)
            )
        except HookError as exc:
            failure = failure or exc.message
            continue
        if isinstance(submission, Submission):
            candidates = [_candidate(index, answer, body) for index, (_, answer) in enumerate(listed)]
            groups[key] = (
                RecordedGroup(task=submission.task, candidates=candidates),
                [side for side, _ in listed],
            )
    config = OfflineConfig(shuffles=0, timeout=HOOK_SECONDS)
    judged = await run_offline(hooks, [group for group, _ in groups.values()], config=config)
    means: dict[str, list[float]] = {}
    for (key, (_, order)), report in zip(groups.items(), judged.groups, strict=True):
        failure = failure or report.error
        if not report.error:
            rewards = list(zip(order, report.rewards, strict=True))
            means[key] = [
                fmean(reward.value for side, reward in rewards if side == number) for number in sorted(set(order))
            ]
    if failure and not means:
        raise ConfigError(f"--hooks judges no prompt: {failure}")
    return means


def _candidate(index: int, answer: SavedAnswer, body: dict[str, Any]) -> Candidate:
    message = answer.message
    return Candidate(
        index=index,
        message=message,
        text="\n".join(texts_of(message)),
        tool_calls=message.get("tool_calls") or [],
        finish_reason=answer.finish_reason,
        completion_tokens=answer.completion_tokens,
        request=body,
    )
