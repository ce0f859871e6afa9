"""``PairedEvidence``: the pairs of equal terms so far and their ratings; ``Verdict``: what both prove, and one sentence
that says it.

Invariant: the verdict is a function of the set of pairs and of the ratings in their order: neither the order of pairs
nor that of suites matters. What nobody judged counts for no side and holds the challenger back; so does everything that
is not proven. Guards and ratings are of live requests.

Promotion needs *every* one of its tests (reward and each protected suite not worse than the margin, reward better where
that is required), so each has the whole ``alpha`` and the chance of a wrong promotion is at most ``alpha`` (an
intersection-union test: Berger, Technometrics 24, 1982). An alarm needs *one* of its tests (reward or a suite below
zero, a guard beyond its bound), so they share ``alpha``: half is the reward's, the rest is split evenly (Bonferroni).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from swarm.evidence.betting import LowEnd, Wealth
from swarm.evidence.pairs import GateRules, Pair, SideResult, Terms
from swarm.evidence.ratings import Ratings, SideRating
from swarm.intervals import Interval
from swarm.types import Model

#: ``worse``: proven to be below zero, on reward or a suite, or beyond a guard's bound.
Finding = Literal["better", "not_worse", "worse", "undecided"]
REWARD = "reward"
#: the share of requests that may take longer than ``max_p95_seconds``
SLOWEST = 0.05
#: chance that a ratio of the sides which is as meant counts as another one
MISMATCH = 0.001
#: what a guard that is proven worse says
_MORE = {
    "errors": "more errors",
    "refusals": "more refusals",
    "length": "longer",
    "p95_seconds": "slower",
    "rating_drop": "rated lower",
}
RATING_DROP = "rating_drop"


class Verdict(Model):
    """What the pairs of a comparison prove.

    Attributes:
        finding: in one word.
        promotable: whether the challenger may take the incumbent's place.
        difference, low, high: mean difference of the rewards of live requests, and the ends of its interval, where the
            tests turn: what is below ``low`` is refuted at alpha, as a promotion asks, what is above ``high`` at the
            reward's part of an alarm. So no "better" and no "worse" has an interval on both sides of 0.
        requests: live ones that both sides answered and somebody judged.
        unjudged: requests, those of suites included, that lack a judgement.
        rated: answers of the challenger and of the incumbent that users rated.
        begun: conversations that were given to the challenger and to the incumbent.
        uneven: their ratio is proven to be another than the share.
        suites: by name, what is proven of each protected suite.
        guards: those that are proven worse.
        budget: by test, its part of the chance of a false alarm.
        sentence: all of that for people.
    """

    finding: Finding
    promotable: bool
    difference: float
    low: float
    high: float
    requests: int
    unjudged: int
    rated: tuple[int, int]
    begun: tuple[int, int]
    uneven: bool
    suites: dict[str, Finding]
    guards: tuple[str, ...]
    budget: dict[str, float]
    sentence: str


class _Reward:
    """The tests of one suite's reward, or of that of live requests."""

    def __init__(self, rules: GateRules) -> None:
        self._margin = rules.margin
        #: how many differences came, and their sum in ten-thousandths: an interval needs no more digits
        self.requests, self._sum = 0, 0
        self._low, self._high = LowEnd(), LowEnd()
        self._not_worse = Wealth(-rules.margin)
        self._better, self._worse = Wealth(), Wealth()

    def add(self, difference: float) -> None:
        rounded = round(difference, 4)
        self.requests += 1
        self._sum += round(10_000 * rounded)
        self._low.add(rounded)
        self._high.add(-rounded)
        self._not_worse.add(difference)
        self._better.add(difference)
        self._worse.add(-difference)

    def finding(self, alpha: float, alarm: float) -> Finding:
        """``alarm``: the part of alpha that "worse" has. It wins over the others: of a small difference, both "below
        zero" and "above the margin" may be proven."""
        if self._worse.refutes(alarm):
            return "worse"
        if self._better.refutes(alpha):
            return "better"
        return "not_worse" if self._not_worse.refutes(alpha) else "undecided"

    def around(self, finding: Finding, alpha: float, alarm: float) -> Interval:
        """The mean difference between the ends that :meth:`finding` has proven; elsewhere they are on a grid."""
        mean = self._sum / 10_000 / max(1, self.requests)
        low, high = self._low.at(alpha), -self._high.at(alarm)
        if finding in ("better", "not_worse"):
            low = max(low, 0.0 if finding == "better" else -self._margin)
        elif finding == "worse":
            high = min(high, 0.0)
        return Interval(mean, low, high)


class _Guard:
    """The test of one guard, and the mean of what it has seen.

    Args:
        bound: of the mean, in [-1, 1].
    """

    def __init__(self, bound: float) -> None:
        self._wealth = Wealth(bound)
        self._total, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._wealth.add(value)
        self._total += value
        self._count += 1

    def exceeded(self, alpha: float) -> bool:
        return self._wealth.refutes(alpha)

    @property
    def mean(self) -> float | None:
        return self._total / self._count if self._count else None


class PairedEvidence:
    """The pairs of equal ``terms`` so far."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        rules = terms.rules
        bounds = {
            "errors": rules.max_errors,
            "refusals": rules.max_refusals,
            "length": _relative(rules.max_length),
            "p95_seconds": None if rules.max_p95_seconds is None else SLOWEST,
        }
        self._rewards = {name: _Reward(rules) for name in ("", *sorted(set(terms.suites)))}
        self._guards = {name: _Guard(bound) for name, bound in bounds.items() if bound is not None}
        #: conversations that were given to the challenger and to the incumbent
        self._begun = (0, 0)
        #: by suite, the pairs, and those that lack a judgement
        self._pairs: Counter[str] = Counter()
        self._unjudged: Counter[str] = Counter()
        self._ratings = Ratings(rules.max_rating_drop)
        #: until another pair or rating comes
        self._verdict: Verdict | None = None
        shared = [*list(self._rewards)[1:], *self._guards, RATING_DROP]
        self.budget = {REWARD: rules.alpha / 2} | {name: rules.alpha / 2 / len(shared) for name in shared}

    def add(self, pair: Pair) -> None:
        """Count one more pair, which has the terms of this comparison."""
        self._verdict = None
        self._pairs[pair.suite] += 1
        self._begun = self._begun[0] + pair.begun[0], self._begun[1] + pair.begun[1]
        if not pair.suite:
            for name, value in _differences(pair.challenger, pair.incumbent, self.terms.rules):
                if name in self._guards:
                    self._guards[name].add(value)
        difference = pair.difference
        if difference is not None and pair.suite in self._rewards:
            self._rewards[pair.suite].add(difference)
        elif difference is None and (pair.suite or pair.incumbent.failed < 1):
            # where the incumbent fails a user there is nothing to compare with: its loss, and nobody's fault here
            self._unjudged[pair.suite] += 1

    def draws(self, suite: str) -> tuple[int, int]:
        """Of a suite, and those of them that lack a judgement."""
        return self._pairs[suite], self._unjudged[suite]

    def guarded(self) -> dict[str, float]:
        """What guards have measured, in the units of their bounds: by how much the challenger's shares of errors and of
        refusals are larger, how many times as long its answers are, and the share of its groups that took longer than
        ``max_p95_seconds``."""
        means = {name: mean for name, guard in self._guards.items() if (mean := guard.mean) is not None}
        return {name: _ratio(mean) if name == "length" else mean for name, mean in means.items()}

    @property
    def tried(self) -> int:
        """Live requests, or draws of a suite on which nothing is proven yet, whichever are fewest."""
        open_ = [name for name, finding in self._findings().items() if name and finding == "undecided"]
        return min(self._pairs[name] for name in ("", *open_))

    def rate(self, rating: SideRating) -> None:
        """Count what a user said of an answer under the terms of this comparison."""
        self._ratings.add(rating)
        self._verdict = None

    def alarm(self) -> bool:
        """Whether the challenger is proven worse; as :meth:`promotable` cheaper than :meth:`verdict`."""
        return "worse" in self._findings().values() or bool(self._worse_guards())

    def promotable(self) -> bool:
        """Whether the challenger may take the incumbent's place."""
        findings, rules = self._findings(), self.terms.rules
        enough = findings[""] == "better" or (findings[""] == "not_worse" and not rules.better)
        return (
            enough
            and not self._holds("")
            and not _is_uneven(self._begun, self.terms.share)
            and not {"worse", "undecided"} & {*findings.values()}
            and not self._worse_guards()
        )

    def verdict(self) -> Verdict:
        """What is proven now."""
        if self._verdict is None:
            self._verdict = self._judged()
        return self._verdict

    def _judged(self) -> Verdict:
        rules, live = self.terms.rules, self._rewards[""]
        findings, guards = self._findings(), self._worse_guards()
        suites: dict[str, Finding] = {name: finding for name, finding in findings.items() if name}
        uneven, (ours, theirs) = _is_uneven(self._begun, self.terms.share), self._begun
        of_begun = f"{ours} of {ours + theirs} conversations went to the challenger, not {self.terms.share:g} of them"
        finding = findings[""]
        if guards or "worse" in suites.values():
            finding = "worse"
        around = live.around(findings[""], rules.alpha, self.budget[REWARD])
        sentence = "; ".join(
            part
            for part in (
                _of_reward(findings[""], around, live.requests, rules),
                _of_suites(suites),
                *(f"{_MORE[name]} than max_{name} {getattr(rules, f'max_{name}'):g} allows" for name in guards),
                *(self._held_back(name) for name in self._rewards if self._holds(name)),
                f"held back: {of_begun}" if uneven else "",
            )
            if part
        )
        return Verdict(
            finding=finding,
            promotable=self.promotable(),
            difference=around.mean,
            low=around.low,
            high=around.high,
            requests=live.requests,
            unjudged=self._unjudged.total(),
            rated=self._ratings.counts,
            begun=self._begun,
            uneven=uneven,
            suites=suites,
            guards=guards,
            budget=self.budget,
            sentence=sentence,
        )

    def _holds(self, suite: str) -> bool:
        """Whether too many requests of a suite, or live ones, lack a judgement."""
        return self._unjudged[suite] > self.terms.rules.max_unjudged * self._pairs[suite]

    def _held_back(self, suite: str) -> str:
        what = f"draws of {_short(suite)}" if suite else "requests"
        return f"held back: {self._unjudged[suite]} of {self._pairs[suite]} {what} were not judged"

    def _findings(self) -> dict[str, Finding]:
        alpha = self.terms.rules.alpha
        findings: dict[str, Finding] = {}
        for name, reward in self._rewards.items():
            finding = reward.finding(alpha, self.budget[name or REWARD])
            # of a suite that lacks judgements, those that are there may be the easy ones
            findings[name] = "undecided" if name and finding != "worse" and self._holds(name) else finding
        return findings

    def _worse_guards(self) -> tuple[str, ...]:
        worse = [name for name, guard in self._guards.items() if guard.exceeded(self.budget[name])]
        return (*worse, RATING_DROP) if self._ratings.lower(self.budget[RATING_DROP]) else tuple(worse)


def _is_uneven(begun: tuple[int, int], share: float) -> bool:
    """Whether it is hardly chance how many conversations the challenger and the incumbent were given (a sample ratio
    mismatch: Fabijan et al., "Diagnosing Sample Ratio Mismatch in Online Controlled Experiments", KDD 2019).

    Args:
        share: meant for the challenger; 0 and 1, and what no number tells from them: nothing is drawn.
    """
    # in [-1, 1], a conversation of the challenger's is 1, one of the incumbent's -1
    mean = 2 * share - 1
    for sign in (1.0, -1.0) if -1 < mean < 1 else ():
        wealth = Wealth(sign * mean)
        for side, times in zip((sign, -sign), begun, strict=True):
            wealth.add(side, times)
        if wealth.refutes(MISMATCH / 2):
            return True
    return False


def _of_reward(finding: Finding, around: Interval, requests: int, rules: GateRules) -> str:
    if not requests:
        return "nothing is compared yet"
    mean, low, high = (f"{value:.2f}" for value in around)
    where = f"[{low}, {high}] in {requests} request{'s' if requests > 1 else ''}"
    match finding:
        case "better":
            return f"better by {mean} {where}"
        case "worse":
            # 0 - x, for the negative of 0 is printed as -0
            ends = f"[{0 - around.high:.2f}, {0 - around.low:.2f}]"
            return f"worse by {-around.mean:.2f} {ends} in {requests} requests"
        case "not_worse":
            return f"not worse than {rules.margin:g}: {around.mean:+.2f} {where}"
        case "undecided":
            return f"not decided: {around.mean:+.2f} {where}"


def _of_suites(suites: Mapping[str, Finding]) -> str:
    if not suites:
        return ""
    fine = sum(finding in ("better", "not_worse") for finding in suites.values())
    sentence = f"{fine} of {len(suites)} suites not worse"
    for finding, what in (("undecided", "not proven"), ("worse", "worse")):
        if names := [_short(name) for name in sorted(suites) if suites[name] == finding]:
            sentence += f", {what}: {', '.join(names)}"
    return sentence


def _short(suite: str) -> str:
    """Its name without the digest of its prompts."""
    return suite.partition("@")[0]


def _relative(ratio: float | None) -> float | None:
    """The relative difference of two amounts whose ratio is ``ratio``; ``None``: no two amounts are that far apart."""
    relative = 1.0 if ratio is None else (ratio - 1) / (ratio + 1)
    return relative if relative < 1 else None


def _ratio(relative: float) -> float:
    """The ratio of two amounts that are that far apart; the reverse of :func:`_relative`."""
    return (1 + relative) / (1 - relative) if relative < 1 else math.inf


def _differences(ours: SideResult, theirs: SideResult, rules: GateRules) -> Iterator[tuple[str, float]]:
    """What a pair says of each guard, in [-1, 1], above zero where the challenger is worse."""
    yield "errors", ours.failed - theirs.failed
    if ours.failed < 1 and theirs.failed < 1:
        yield "refusals", ours.refused - theirs.refused
        if ours.characters is not None and theirs.characters is not None:
            both = ours.characters + theirs.characters
            yield "length", (ours.characters - theirs.characters) / both if both > 0 else 0.0
    if ours.slowest_seconds is not None and rules.max_p95_seconds is not None:
        # a user waits for the slowest; the mean of "took longer" is above 5 % just where the 95th percentile is above
        yield "p95_seconds", float(ours.slowest_seconds > rules.max_p95_seconds)
