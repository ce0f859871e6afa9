"""Faults of the judge: behind a judge that fails in any of these ways, a challenger that is truly better by 0.4 is not
promoted, and behind the same judge without its fault it is.

A judge reads the reward in the answer, and fails at the requests whose numbers are in :attr:`Fault.numbers`. A fault in
few requests holds the challenger back as long as more than ``gate.max_unjudged`` (2 %) of those so far lack a judgement
at the moment when the proof is there. So intermittent faults are fixed sets of numbers, for which this is certain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response

from swarm.evidence.pairs import GateRules, Pair, SideResult, Terms
from swarm.evidence.stages import ServingStage
from swarm.evidence.verdict import PairedEvidence, Verdict
from tests.gateway.conftest import OpenGateway, ask, write_hooks
from tests.gateway.takeover.test_shadow import known, serve
from tests.standins.swarm import Swarm, error, said
from tests.standins.upstream import CHAT, Upstream

pytestmark = pytest.mark.anyio

REQUESTS = 60
ALL = frozenset(range(REQUESTS))
#: Two of 60, the fewest that count as 3 %.
RARE = frozenset({0, 33})
SOURCE = """
import asyncio
import time
from math import inf, nan

from reward_hooks import Reward
from swarm.errors import HookError

ASYNC def on_compute_relative_reward(task, candidates, context):
    rewards = [float(candidate.text.split()[1]) for candidate in candidates]
    alone = [candidate.source for candidate in candidates] == ["incumbent"]
    if int(task.main_query.split()[1]) in NUMBERS and (WHEN):
        FAULT
    return rewards
"""


@dataclass(frozen=True)
class Fault:
    """How a judge fails.

    Attributes:
        does: Python in its hook.
        why: stands in the pairs.
        numbers: the requests at which it fails.
        when: a condition in Python, beside these.
        asynchronous: whether its hook is.
        apart: whether the incumbent's answer is judged in a call of its own.
        gate: whether the judge is the hook of the gate; the one that trains works.
        more: settings of the gate.
        seconds: limit of a call.
        answers_fail: the answers of each group that fail, by their index, instead of the judge.
    """

    does: str = "pass"
    why: str = "the hook failed"
    numbers: frozenset[int] = ALL
    when: str = "True"
    asynchronous: bool = False
    apart: bool = False
    gate: bool = False
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 10.0
    answers_fail: frozenset[int] = frozenset()

    def hook(self, numbers: frozenset[int]) -> str:
        """The source of the judge that fails at ``numbers``."""
        source = SOURCE.replace("ASYNC ", "async " if self.asynchronous else "")
        source = source.replace("NUMBERS", f"{{-1, {', '.join(map(str, sorted(numbers)))}}}")
        return source.replace("WHEN", self.when).replace("FAULT", self.does)


def drawn(rate: float, seed: int) -> frozenset[int]:
    """Request numbers, each with the chance ``rate``."""
    chance = random.Random(seed)
    return frozenset(number for number in range(REQUESTS) if chance.random() < rate)


BEYOND = "a reward is not within the bounds"
APART = "the hook failed on the incumbent's answer"
FAULTS: dict[str, Fault] = {
    "raises": Fault("raise ValueError('dead')"),
    "raises a HookError": Fault("raise HookError('the model is away', code='judge_away')"),
    "raises a lone surrogate": Fault(r"raise ValueError('\ud800')"),
    "raises StopIteration": Fault("raise StopIteration"),
    "recurses": Fault("(lambda again: again(again))(lambda again: again(again))"),
    "exits": Fault("raise SystemExit(0)"),
    "is interrupted": Fault("raise KeyboardInterrupt"),
    "raises, asynchronous": Fault("raise ValueError('dead')", asynchronous=True),
    "is cancelled, asynchronous": Fault("raise asyncio.CancelledError", asynchronous=True),
    "exits, asynchronous": Fault("raise SystemExit(0)", asynchronous=True),
    "NaN": Fault("return [nan] * len(candidates)"),
    "infinite": Fault("return [inf] * len(candidates)"),
    "minus infinite": Fault("return [-inf] * len(candidates)"),
    "too large for a float": Fault("return [10**400] * len(candidates)"),
    "NaN for the incumbent": Fault("rewards[-1] = nan"),
    "NaN for one answer": Fault("rewards[0] = nan"),
    "NaN in a Reward": Fault("rewards[0] = Reward.model_construct(value=nan)"),
    "a word in a Reward": Fault("rewards[0] = Reward.model_construct(value='high')"),
    "None": Fault("return None"),
    "None for each": Fault("return [None] * len(candidates)"),
    "None for the incumbent": Fault("rewards[-1] = None"),
    "a number": Fault("return 0.7"),
    "a string": Fault("return '0.7'"),
    "strings": Fault("return [str(reward) for reward in rewards]"),
    "a mapping": Fault("return dict(enumerate(rewards))"),
    "a generator": Fault("return (reward for reward in rewards)"),
    "complex": Fault("rewards[1] = 0.7 + 0j"),
    "no rewards": Fault("return []"),
    "one too few": Fault("return rewards[:-1]"),
    "one too many": Fault("return [*rewards, 1.0]"),
    "percent": Fault("return [100 * reward for reward in rewards]", BEYOND),
    "negative": Fault("return [-reward for reward in rewards]", BEYOND),
    "one answer above": Fault("rewards[0] = 1.5", BEYOND),
    "the incumbent below": Fault("rewards[-1] = -0.5", BEYOND),
    "just above": Fault("rewards[0] = 1.000001", BEYOND),
    "the incumbent below declared bounds": Fault("rewards[-1] = 0.1", BEYOND, more={"bounds": [0.2, 1]}),
    "hangs": Fault("await asyncio.Event().wait()", asynchronous=True, seconds=0.02),
    "hangs in a thread": Fault("time.sleep(2)", seconds=0.02),
    "hangs in 3 %": Fault("await asyncio.Event().wait()", numbers=RARE, asynchronous=True, seconds=1.0),
    "raises in 3 %": Fault("raise ValueError('dead')", numbers=RARE),
    "NaN for the incumbent in 3 %": Fault("rewards[-1] = nan", numbers=RARE),
    "beyond the bounds in 3 %": Fault("rewards[0] = 2.0", BEYOND, numbers=RARE),
    "raises at random in 5 %": Fault("raise ValueError('dead')", numbers=drawn(0.05, 1)),
    "raises at random in 10 %": Fault("raise ValueError('dead')", numbers=drawn(0.1, 1)),
    "raises at random in 50 %": Fault("raise ValueError('dead')", numbers=drawn(0.5, 0)),
    "fails on an answer": Fault("raise ValueError('dead')", when="0.68 in rewards"),
    "fails on the incumbent's answer": Fault("raise ValueError('dead')", APART, when="alone", apart=True),
    "NaN for the incumbent alone": Fault("return [nan]", APART, when="alone", apart=True),
    "the incumbent alone below": Fault("return [-1.0]", BEYOND, when="alone", apart=True),
    "hangs on the incumbent's answer": Fault(
        "await asyncio.Event().wait()", APART, RARE, when="alone", apart=True, asynchronous=True, seconds=1.0
    ),
    "fails on the group alone": Fault("raise ValueError('dead')", when="not alone", apart=True),
    "the gate raises": Fault("raise ValueError('dead')", gate=True),
    "the gate says NaN": Fault("return [nan] * len(candidates)", gate=True),
    "the gate is one short": Fault("return rewards[:-1]", gate=True),
    "the gate is beyond the bounds": Fault("return [100 * reward for reward in rewards]", BEYOND, gate=True),
    "the gate hangs": Fault("await asyncio.Event().wait()", gate=True, asynchronous=True, seconds=0.02),
    "the gate raises in 3 %": Fault("raise ValueError('dead')", numbers=RARE, gate=True),
    "the gate fails on the incumbent": Fault("raise ValueError('dead')", APART, when="alone", apart=True, gate=True),
    "an answer of each group fails": Fault(why="1 of 4 answers failed", answers_fail=frozenset({2})),
    "an answer fails in 3 %": Fault(why="1 of 4 answers failed", answers_fail=frozenset({2}), numbers=RARE),
    "a group fails in 3 %": Fault(why="4 of 4 answers failed", answers_fail=frozenset(range(4)), numbers=RARE),
}
NEVER: frozenset[int] = frozenset()
CONTROLS = {
    "joined": Fault(numbers=NEVER),
    "asynchronous": Fault(numbers=NEVER, asynchronous=True),
    "apart": Fault(numbers=NEVER, apart=True),
    "gate": Fault(numbers=NEVER, gate=True),
    "gate, apart": Fault(numbers=NEVER, apart=True, gate=True),
    "declared bounds": Fault(numbers=NEVER, more={"bounds": [0.2, 1]}),
    "answers apart": Fault(numbers=NEVER, answers_fail=frozenset({2})),
}
#: In the canary the challenger's answers are judged elsewhere than the incumbent's.
CANARY = ("raises", "NaN", "raises in 3 %", "the gate raises", "fails on the incumbent's answer")
QUICK = ("raises", "raises in 3 %", "fails on the incumbent's answer", "the gate says NaN", "an answer fails in 3 %")
CASES = [pytest.param("shadow", name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]
CASES += [pytest.param("canary", name, marks=pytest.mark.slow) for name in CANARY]
CONTROL_CASES = [
    pytest.param(stage, name, marks=() if stage == "shadow" else pytest.mark.slow)
    for name in CONTROLS
    for stage in ("shadow", "canary")
]


def answering(fault: Fault, numbers: frozenset[int]) -> Callable[[dict[str, Any], int], Response]:
    """The challenger: worth 0.7 in the mean."""

    def answer(body: dict[str, Any], index: int) -> Response:
        number = int(body["messages"][-1]["content"].split()[1])
        if number in numbers and index in fault.answers_fail:
            return error(500, "boom")
        return said(f"worth {0.64 + 0.04 * index:.2f} of it")

    return answer


@dataclass(frozen=True)
class Judged:
    """What became of :data:`REQUESTS` requests, or of those until the challenger was promoted: the stages after each,
    and the pairs of the first of these stages."""

    stages: list[ServingStage]
    verdict: Verdict
    reasons: list[str]


@pytest.fixture
def judging(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """``await judging(fault, numbers, stage)``: users ask one after another, each about another thing."""
    # who begins on which side in the canary is the same in each run
    monkeypatch.setattr("swarm.server.episodes.stages.secrets", SimpleNamespace(token_hex=lambda _: "salt"))

    async def judging(fault: Fault, numbers: frozenset[int], stage: str) -> Judged:
        upstream.answers[CHAT] = lambda _: said("worth 0.30 of it")
        swarm.answer, swarm.grouped = answering(fault, numbers), not fault.answers_fail
        gate: dict[str, Any] = {"mode": "auto", "trial_every": 5, "reference": not fault.apart, **fault.more}
        hook, works = fault.hook(numbers), Fault(asynchronous=fault.asynchronous).hook(frozenset())
        if fault.gate:
            gate["hook"] = str(write_hooks(tmp_path / "gate", hook).resolve())
        settings = serve(upstream, stage=stage, gate=gate, canary={"shares": [0.5]}, watch_share=1, max_shadows=100)
        settings["hook_timeout_seconds"] = fault.seconds
        stages: list[ServingStage] = []
        async with open_gateway(**settings, reward=works if fault.gate else hook) as http:
            await known(http, "shadow" if stage == "shadow" else "canary 0.5")
            for number in range(REQUESTS):
                message = {"role": "user", "content": f"question {number}"}
                assert (await ask(http, messages=[message])).status_code == 200
                await swarm.until(lambda number=number: len(swarm.compared) == number + 1)
                stages.extend(swarm.stages.pointers.values())
                if stages[-1].share > stages[0].share:
                    break
        [followed] = swarm.comparisons.followed.values()
        return Judged(stages, followed.verdict(), [pair.unjudged for pair in swarm.compared])

    return judging


@pytest.mark.parametrize(("stage", "name"), CASES)
async def test_behind_a_judge_that_fails_nobody_is_promoted(judging: Callable[..., Any], stage: str, name: str) -> None:
    fault = FAULTS[name]
    judged: Judged = await judging(fault, fault.numbers, stage)
    assert {each.share for each in judged.stages} == {0.5 if stage == "canary" else 0.0}
    assert not judged.verdict.promotable
    # the trial goes on: a proof would have promoted it; answers that fail are the challenger's own
    assert {each.trial for each in judged.stages} == {True} or judged.verdict.guards == ("errors",)
    # it failed where it should, in that way, and nowhere else
    assert [number for number, why in enumerate(judged.reasons) if why] == sorted(fault.numbers)
    assert {why.startswith(fault.why) for why in judged.reasons if why} == {True}, set(judged.reasons)
    assert judged.verdict.requests == REQUESTS - len(fault.numbers) == REQUESTS - judged.verdict.unjudged


@pytest.mark.parametrize(("stage", "name"), CONTROL_CASES)
async def test_behind_the_same_judge_without_its_fault_it_is_promoted(
    judging: Callable[..., Any], stage: str, name: str
) -> None:
    judged: Judged = await judging(CONTROLS[name], NEVER, stage)
    assert judged.stages[-1].share > judged.stages[0].share and judged.stages[-1].by == "the verdict"
    assert 5 < len(judged.stages) < REQUESTS and set(judged.reasons) == {""}
    scale = 0.8 if CONTROLS[name].more else 1
    assert judged.verdict.difference == pytest.approx(0.4 / scale, abs=0.001)


def test_an_intermittent_fault_is_there_whenever_the_proof_is() -> None:
    terms = Terms(rules=GateRules())

    def promoted(numbers: frozenset[int]) -> list[int]:
        """After how many requests the challenger could be promoted."""
        evidence, moments = PairedEvidence(terms), list[int]()
        for number in range(REQUESTS):
            ours, theirs = (None, None) if number in numbers else (0.7, 0.3)
            sides = SideResult(reward=ours), SideResult(reward=theirs)
            evidence.add(Pair(group_id=str(number), terms=terms, challenger=sides[0], incumbent=sides[1]))
            if evidence.promotable():
                moments.append(number + 1)
        return moments

    [first, *_] = promoted(NEVER)
    assert 5 < first < REQUESTS
    for name, fault in FAULTS.items():
        assert promoted(fault.numbers) == [], name
        assert len(fault.numbers) >= 0.03 * REQUESTS, name
    # a fault that has not come by then holds nobody back
    assert first in promoted(RARE - {0})


def test_a_judge_that_gives_all_the_same_proves_no_gain_but_in_time_no_loss() -> None:
    """Nothing tells it from a judge of answers that are equally good: ``gate.better`` holds back what it says."""
    worth = SideResult(reward=0.0)
    for better, promoted in ((True, None), (False, 85)):
        terms = Terms(rules=GateRules(better=better))
        evidence = PairedEvidence(terms)
        moments = [
            number
            for number in range(1, 201)
            if not evidence.add(Pair(group_id=str(number), terms=terms, challenger=worth, incumbent=worth))
            and evidence.promotable()
        ]
        assert next(iter(moments), None) == promoted
