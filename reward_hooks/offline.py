"""Run hooks over recorded groups without an engine: rankings, agreement, order flips, cost and time.

Invariant: a group on which a hook fails is reported with the reason and enters no mean; no group is dropped silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from math import sqrt

from reward_hooks.contract import EQUAL_WITHIN, GroupScore, HookContext, Hooks, Reward
from reward_hooks.recorded import RecordedGroup
from reward_hooks.runner import HookRunner
from reward_hooks.spending import Spending, metered
from swarm.concurrency import all_of
from swarm.errors import HookError
from swarm.types import Model, OnProgress


class GroupResult(Model):
    """The result of one group; ``answers`` has the texts of the candidates, of one without text its tool calls, and
    ``order`` their indices, best first.

    If the hook failed, ``error`` says why, and the results are empty. A number is ``None`` without a known rank,
    another hook, a second scoring, or an order to compare with.
    """

    task_id: str
    prompt: str
    answers: list[str] = []
    order: list[int] = []
    rewards: list[Reward] = []
    informative: bool = False
    tau_rank: float | None = None
    tau_against: float | None = None
    flip_rate: float | None = None
    seconds: float = 0.0
    error: str = ""


class HookReport(Model):
    """The results of one hook on a data file.

    ``tau_rank`` and ``tau_against`` are means of Kendall's tau-b over the groups that have one (``ranked``,
    ``compared``), ``flip_rate`` the mean share of pairs that change their order when the candidates are shuffled.
    ``seconds_median`` and ``seconds_most`` are of one call; ``spent`` is the cost of this hook's judges.
    """

    hooks: str
    against: str | None
    groups: list[GroupResult]
    scored: int
    failed: dict[str, int]
    failed_against: dict[str, int]
    uninformative: int
    ranked: int
    tau_rank: float | None
    compared: int
    tau_against: float | None
    flip_rate: float | None
    seconds: float
    seconds_median: float | None
    seconds_most: float | None
    spent: dict[str, float]


@dataclass(frozen=True)
class OfflineConfig:
    """How to run: ``shuffles`` further scorings per group in other orders, ``concurrency`` groups at once."""

    shuffles: int = 1
    concurrency: int = 8
    timeout: float = 60.0
    seed: int = 0


async def run_offline(
    hooks: Hooks,
    groups: Sequence[RecordedGroup],
    against: Hooks | None = None,
    config: OfflineConfig = OfflineConfig(),
    on_progress: OnProgress | None = None,
) -> HookReport:
    """Score every group with ``hooks`` (and ``against``), again in shuffled orders, and compare.

    Args:
        hooks: the rewards to report.
        groups: from :func:`reward_hooks.recorded.read_groups`.
        against: another hook to compare the orders with.
        on_progress: called after each group.
    """
    began = time.monotonic()
    side = _Side(hooks, config.timeout)
    other = None if against is None else _Side(against, config.timeout)
    permits = asyncio.Semaphore(config.concurrency)
    done = 0

    async def work(number: int, group: RecordedGroup) -> GroupResult:
        nonlocal done
        async with permits:
            report = await _report(side, other, config, number, group)
        done += 1
        if on_progress is not None:
            on_progress("scoring", done, len(groups), "groups")
        return report

    reports = await all_of([work(number, group) for number, group in enumerate(groups)])
    scored = [report for report in reports if not report.error]
    times = sorted(side.seconds)
    return HookReport(
        hooks=hooks.source,
        against=None if against is None else against.source,
        groups=reports,
        scored=len(scored),
        failed=dict(side.failed),
        failed_against={} if other is None else dict(other.failed),
        uninformative=sum(1 for report in scored if not report.informative),
        ranked=sum(1 for report in scored if report.tau_rank is not None),
        tau_rank=_mean([report.tau_rank for report in scored]),
        compared=sum(1 for report in scored if report.tau_against is not None),
        tau_against=_mean([report.tau_against for report in scored]),
        flip_rate=_mean([report.flip_rate for report in scored]),
        seconds=time.monotonic() - began,
        seconds_median=times[len(times) // 2] if times else None,
        seconds_most=times[-1] if times else None,
        spent=asdict(side.spent),
    )


class _Side:
    """One hook with the time and money of its calls, and the reasons of their failures."""

    def __init__(self, hooks: Hooks, timeout: float) -> None:
        self._runner = HookRunner(hooks, timeout)
        self._timeout = timeout
        self.seconds: list[float] = []
        self.failed: Counter[str] = Counter()
        self.spent = Spending()

    async def score(self, group: RecordedGroup, group_id: str, order: Sequence[int]) -> GroupScore:
        """The rewards of the candidates shown in ``order``, in their recorded order."""
        context = HookContext(num_repeat=len(group.candidates), group_id=group_id, deadline_seconds=self._timeout)
        shown = [
            group.candidates[index].model_copy(update={"index": shown_index}) for shown_index, index in enumerate(order)
        ]
        began = time.monotonic()
        try:
            with metered(self.spent):
                score = await self._runner.score(group.task, shown, context)
        except HookError as exc:
            self.failed[exc.code or "hook_error"] += 1
            raise
        finally:
            self.seconds.append(time.monotonic() - began)
        rewards = dict(zip(order, score.rewards, strict=True))
        return GroupScore(rewards=[rewards[index] for index in range(len(order))])


async def _report(
    side: _Side, other: _Side | None, config: OfflineConfig, number: int, group: RecordedGroup
) -> GroupResult:
    # two lines may have one task_id, and each is a group of its own
    group_id = f"{number}/{group.task.task_id}"
    recorded = range(len(group.candidates))
    answers = [each.text or (json.dumps(each.tool_calls) if each.tool_calls else "") for each in group.candidates]
    draw = random.Random(f"{config.seed}/{group_id}")
    report_of_group = partial(GroupResult, task_id=group.task.task_id, prompt=group.task.main_query, answers=answers)
    began = time.monotonic()
    try:
        score = await side.score(group, group_id, recorded)
        seconds = time.monotonic() - began
        flips: list[float | None] = []
        for shuffle in range(config.shuffles):
            order = draw.sample(recorded, len(recorded))
            again = await side.score(group, f"{group_id}/{shuffle}", order)
            flips.append(flip_rate(score.values, again.values))
    except HookError as exc:
        return report_of_group(error=exc.message)
    tau_against: float | None = None
    if other is not None:
        with contextlib.suppress(HookError):  # it is counted
            tau_against = kendall_tau(score.values, (await other.score(group, group_id, recorded)).values)
    return report_of_group(
        order=sorted(recorded, key=lambda index: -score.values[index]),
        rewards=score.rewards,
        informative=score.informative,
        tau_rank=None if group.rank is None else kendall_tau(score.values, [-rank for rank in group.rank]),
        tau_against=tau_against,
        flip_rate=_mean(flips),
        seconds=seconds,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def kendall_tau(scores: Sequence[float], reference: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists of scores, in [-1, 1]: 1 where they order every pair alike.

    Ties count as in Kendall (1945), "The Treatment of Ties in Ranking Problems". If only ``scores`` are all equal, the
    result is 0; if ``reference`` has no order, it is ``None``. Lists of different lengths raise :class:`ValueError`.
    """
    signs = list(_signs(scores, reference))
    ordered, wanted = sum(1 for a, _ in signs if a), sum(1 for _, b in signs if b)
    if not wanted:
        return None
    return sum(a * b for a, b in signs) / sqrt(ordered * wanted) if ordered else 0.0


def flip_rate(scores: Sequence[float], again: Sequence[float]) -> float | None:
    """The share of pairs of answers that change their order between two scorings of one group, in [0, 1].

    A pair that is tied in exactly one of the two counts half; ``None`` for fewer than two answers. Lists of different
    lengths raise :class:`ValueError`.
    """
    changes = [abs(a - b) / 2 for a, b in _signs(scores, again)]
    return sum(changes) / len(changes) if changes else None


def _signs(left: Sequence[float], other: Sequence[float]) -> Iterator[tuple[int, int]]:
    """How each list orders each pair: 1, 0 or -1."""
    for (a, x), (b, y) in combinations(zip(left, other, strict=True), 2):
        yield _sign(a - b), _sign(x - y)


def _sign(difference: float) -> int:
    return 0 if abs(difference) <= EQUAL_WITHIN else 1 if difference > 0 else -1
