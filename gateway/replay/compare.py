"""Held-out prompts, scored with two versions of a model: which of them is better, and whether that can be told.

A prompt is paired with itself: its difference is the mean reward of the later version's answers minus that of the
earlier one's. The interval is Student's, of the mean of these differences (:func:`swarm.intervals.mean_interval`), so
how hard a prompt is cancels out. A hook judges the answers of both versions to a prompt in one call, in an order that
tells it nothing of the version. That is right for hooks that score and for hooks that rank.

Invariant: a prompt that lacks a reward of either version enters no mean, and is counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from adapters.dialects import SampledAnswer
from gateway.reports.report import CONFIDENCE, Comparison, Report, SavedAnswer, by_prompt
from gateway.rollout.sampling import candidate_of
from reward_hooks import Candidate, HookContext, HookRunner, Hooks, Submission, UserRequest
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
        hooks: what judges the answers, those of both to one prompt in one call.

    Raises:
        ConfigError: the two have no prompt in common, or the hook fails on all of them.
    """
    versions = [by_prompt(replay.scores) for replay in ([report] if earlier is None else [earlier, report])]
    shared = [key for key in versions[0] if all(key in scores for scores in versions)]
    if earlier is not None and not shared:
        raise ConfigError(
            f"{earlier.label} and {report.label} have no prompt in common: compare replays --no-train of the same "
            "--data"
        )
    sides = {
        key: [[answer for score in scores[key] for answer in score.answers] for scores in versions] for key in shared
    }
    means = await _judged(sides, hooks)
    if earlier is not None:
        left_out = len(versions[0].keys() | versions[1].keys()) - len(means)
        return report.model_copy(update={"comparison": _comparison(earlier.label, [*means.values()], left_out)})
    judged = [
        score.model_copy(update={"reward": means[key][0] if key in means else None})
        for key, scores in versions[0].items()
        for score in scores
    ]
    return report.model_copy(update={"scores": judged})


def _comparison(earlier: str, means: Sequence[Sequence[float]], left_out: int) -> Comparison:
    """What the mean rewards of both versions tell, a pair for each prompt, the ``earlier`` one's first."""
    counts = {"prompts": len(means), "left_out": left_out}
    if not means:
        return Comparison(
            earlier=earlier, **counts, verdict="nothing can be told: no prompt has a reward of both versions"
        )
    differences = [after - before for before, after in means]
    mean, low, high = mean_interval(differences, CONFIDENCE)
    has_spread = len(differences) > 1
    return Comparison(
        earlier=earlier,
        **counts,
        before=fmean(before for before, _ in means),
        after=fmean(after for _, after in means),
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
    if low > 0 or high < 0:
        how, least, most = ("better", low, high) if low > 0 else ("worse", -high, -low)
        return f"{how} by {reward(abs(mean))} [{reward(least)}, {reward(most)}] on {count} prompts"
    sign = "" if mean < 0 else "+"
    words = f"no difference can be told on {count} prompts: {sign}{reward(mean)} [{reward(low)}, {reward(high)}]"
    wanted = values_to_tell(mean, stdev(differences), CONFIDENCE)
    if wanted is None or wanted > _MOST_PROMPTS:
        return words
    return f"{words}; about {max(1, wanted - count)} more prompts would tell a difference of this size"


async def _judged(sides: Mapping[str, Sequence[Sequence[SavedAnswer]]], hooks: Hooks) -> dict[str, list[float]]:
    """By prompt the mean reward of each side; without prompts on which the hook fails, unless it fails on all, or which
    it lets pass."""
    failure, runner = "", HookRunner(hooks, HOOK_SECONDS)
    groups: dict[str, tuple[RecordedGroup, list[int]]] = {}
    for key, answers in sides.items():
        if not all(answers):
            continue
        listed = [(side, answer) for side, answers_of_side in enumerate(answers) for answer in answers_of_side]
        # a judge that prefers a place must not prefer a version
        random.Random(key).shuffle(listed)
        body = {"messages": json.loads(key)}
        request = UserRequest(request_id=f"prompt-{len(groups)}", body=body)
        context = HookContext(num_repeat=len(listed), deadline_seconds=HOOK_SECONDS)
        try:
            submission = await runner.submit(request, context)
        except HookError as exc:
            failure = failure or exc.message
            continue
        if isinstance(submission, Submission):
            candidates = [_candidate(index, answer, body) for index, (_, answer) in enumerate(listed)]
            groups[key] = RecordedGroup(task=submission.task, candidates=candidates), [side for side, _ in listed]
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


def _candidate(index: int, saved: SavedAnswer, body: dict[str, Any]) -> Candidate:
    usage = {"completion_tokens": saved.completion_tokens}
    answer = SampledAnswer(model="", message=saved.message, finish_reason=saved.finish_reason, usage=usage)
    return candidate_of(answer, 0.0, index=index, request=body)
