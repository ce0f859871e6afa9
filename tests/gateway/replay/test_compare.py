"""Held-out prompts on two versions: pairs, intervals, verdicts, and hooks that score or rank."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gateway.replay.compare import scored, verdict
from gateway.reports.printing import summary
from gateway.reports.report import Report, SavedAnswer, Score, versions
from reward_hooks import Candidate, HookContext, Hooks, PassThrough, Task, UserRequest
from swarm.errors import ConfigError, HookError

pytestmark = pytest.mark.anyio


def report(label: str, scores: Sequence[Score]) -> Report:
    return Report(
        label=label,
        data="held_out.jsonl",
        target="http://a/v1",
        model="tiny",
        seconds=1.0,
        stopped_because="all prompts sent",
        steps=[],
        seed=0,
        concurrency=1,
        requests=len(scores),
        answered=len(scores),
        cancelled=0,
        failures={},
        latency=None,
        scores=list(scores),
    )


def score(prompt: int, reward: float | None = None, *answers: str, version: int | None = 3) -> Score:
    messages = [{"content": f"q{prompt}", "role": "user"}]
    saved = [SavedAnswer(message={"role": "assistant", "content": one}) for one in answers]
    return Score(messages=messages, reward=reward, policy_version=version, answers=saved)


def answered(*sizes: tuple[int, int]) -> list[Score]:
    """An answer for each prompt, of so many letters."""
    return [score(prompt, None, "a" * size) for prompt, size in sizes]


async def test_prompts_are_paired_by_content_whatever_their_order_and_hardness() -> None:
    before = report("before", answered(*((index, 100 * index) for index in range(20))))
    gains = [10 + index % 3 for index in range(20)]
    later = answered(*((index, 100 * index + gains[index]) for index in range(20)))
    random.Random(0).shuffle(later)
    told = await scored(report("after", [*later, *answered((99, 1))]), before, Hooks(reward=lengths))
    found = told.comparison
    assert found is not None and (found.prompts, found.left_out) == (20, 1)
    assert found.difference == pytest.approx(sum(gains) / 20)
    # unpaired, the spread of the prompts would hide the gain
    assert found.low is not None and found.low > 10
    assert found.verdict.startswith("better by 10.9") and found.verdict.endswith("on 20 prompts")


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([0.1] * 7, "nothing can be told from 7 prompts: give 8 at least"),
        ([-0.1, -0.3] * 10, "worse by 0.200 [0.152, 0.248] on 20 prompts"),
        ([0.3, -0.2] * 10, "no difference can be told on 20 prompts: +0.050 [-0.070, 0.170]; about 187 more prompts"),
        ([0.5, -0.5] * 10, "no difference can be told on 20 prompts: +0.000 [-0.240, 0.240]"),
        ([0.0002, 0.0001] * 10, "better by 0.00015 [0.000126, 0.000174] on 20 prompts"),
        ([0.0] * 20, "no difference can be told on 20 prompts: +0.000 [0.000, 0.000]"),
    ],
)
def test_the_verdict_says_what_can_be_told(differences: list[float], words: str) -> None:
    assert verdict(differences).startswith(words)


@pytest.mark.slow
def test_without_a_difference_one_verdict_in_twenty_is_wrong() -> None:
    draw, wrong = random.Random(7), 0
    for _ in range(600):
        wrong += not verdict([draw.choice((-1.0, 0.0, 0.0, 1.0)) for _ in range(32)]).startswith("no difference")
    assert 0.02 < wrong / 600 < 0.08


def lengths(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [float(len(one.text)) for one in candidates]


def ranks(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    order = sorted(range(len(candidates)), key=lambda index: len(candidates[index].text))
    return [float(order.index(index)) for index in range(len(candidates))]


def first_is_best(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [1.0, *[0.0] * (len(candidates) - 1)]


def versions_of(count: int = 12) -> tuple[Report, Report]:
    before = [score(index, None, "a" * index, "a" * (index + 1)) for index in range(count)]
    after = [score(index, None, "a" * (index + 2), "a" * (index + 3)) for index in range(count)]
    return report("before", before), report("after", after)


@pytest.mark.parametrize("hook", [lengths, ranks])
async def test_a_hook_here_judges_both_versions_answers_together(hook: object) -> None:
    before, after = versions_of()
    told = await scored(after, before, Hooks(reward=hook))  # type: ignore[arg-type]
    assert told.comparison is not None and told.comparison.difference == 2.0
    assert told.comparison.verdict == "better by 2.000 [2.000, 2.000] on 12 prompts"


async def test_a_judge_that_prefers_a_place_prefers_no_version() -> None:
    before, after = versions_of(200)
    told = await scored(after, before, Hooks(reward=first_is_best))
    assert told.comparison is not None and told.comparison.verdict.startswith("no difference can be told")


async def test_what_the_hook_fails_on_or_lets_pass_is_left_out() -> None:
    def unsure(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        if task.main_query == "q1":
            raise HookError("cannot tell")
        return lengths(task, candidates, context)

    def submit(request: UserRequest, context: HookContext) -> list[dict[str, object]] | PassThrough:
        passes = request.body["messages"][0]["content"] == "q2"
        return PassThrough() if passes else [dict(request.body)] * context.num_repeat

    before, after = versions_of()
    told = await scored(after, before, Hooks(reward=unsure, submit=submit))
    assert told.comparison is not None
    assert (told.comparison.prompts, told.comparison.left_out) == (10, 2)


async def test_prompts_that_are_others_are_told() -> None:
    _, after = versions_of()
    with pytest.raises(ConfigError, match="no prompt in common"):
        await scored(after, report("other", answered((77, 1))), Hooks(reward=lengths))
    told = await scored(after, report("empty", [score(index) for index in range(12)]), Hooks(reward=lengths))
    assert told.comparison is not None and told.comparison.verdict.startswith("nothing can be told: no prompt has")


async def test_the_summary_says_which_weights_answered() -> None:
    alone = report("run", [score(index, index / 8) for index in range(8)])
    assert summary(alone)[-1] == (
        "mean reward: 0.438 [0.182, 0.693] on 8 prompts (policy version 3); nothing was trained"
    )
    assert versions(report("run", [score(0, version=2), score(1, version=5)])) == "policy versions 2 to 5, mixed"
    assert versions(report("run", [score(0, version=None)])) == ""
