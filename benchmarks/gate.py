"""What the gate's evidence is worth, by simulation: false alarms among equals, and how soon a worse policy is found.

``python -m benchmarks gate``: every figure is of :mod:`swarm.evidence` as the product uses it, fed one request at a
time and asked after each. A prompt has a chance of success that is drawn from Beta(0.5, 0.5), as of prompts that are
mostly easy or mostly hard; answers are right or wrong, and a worse policy has each chance scaled down, so that its mean
is lower by the drop. On one prompt the incumbent answers once and the challenger seven times (``1 + 7``).

* ``equal``: comparisons of equal sides: the share in which the gate, the e-process of the reward alone, and a one-sided
  z test at 5 % from the tenth request on give an alarm.
* ``drops``: requests until the gate proves that the challenger is worse, median over the runs, in the shadow, and for a
  plain canary: a tenth of the requests goes to the challenger, each is compared with the mean of the nine beside it,
  by the same e-process at the whole of 5 %.
* ``gains``: requests until the gate lets the challenger be promoted, equal (0), or better by a gain.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarm.evidence.betting import Wealth
from swarm.evidence.pairs import GateRules, Pair, SideResult, Terms
from swarm.evidence.verdict import PairedEvidence

ALPHA = 0.05
CHALLENGERS = 7
DROPS, GAINS = (0.05, 0.1, 0.2), (0.0, 0.05, 0.1)
_CANARY_BLOCK = 10
_Z, _Z_FROM = 1.645, 10


def right(chance: random.Random, probability: float, answers: int) -> float:
    """The share of right ones among so many answers."""
    return sum(chance.random() < probability for _ in range(answers)) / answers


def easier(probability: float, change: float) -> float:
    """Another policy's chance of success on the same prompt, so that the mean over prompts differs by ``change``."""
    if change < 0:
        return probability * (1 + 2 * change)
    return min(1.0, probability + 2 * change * (1 - probability))


def pairs(chance: random.Random, change: float, terms: Terms) -> Iterator[Pair]:
    """One request after another with 1 + 7 answers; lengths and errors are alike on both sides."""
    number = 0
    while True:
        number += 1
        probability = chance.betavariate(0.5, 0.5)
        other = easier(probability, change)

        def side(answers: int, success: float) -> SideResult:
            return SideResult(
                answers=answers,
                reward=right(chance, success, answers),
                characters=chance.lognormvariate(4, 0.5),
            )

        yield Pair(
            group_id=str(number), terms=terms, challenger=side(CHALLENGERS, other), incumbent=side(1, probability)
        )


def first(values: Iterator[Any], most: int, happens: Callable[[Any], bool]) -> float:
    """After how many of ``values`` something happens; infinite where it does not within ``most``."""
    for number in range(1, most + 1):
        if happens(next(values)):
            return number
    return math.inf


class ZTest:
    """A one-sided z test that is done again after each value, as people do."""

    def __init__(self) -> None:
        self._count, self._total, self._squares = 0, 0.0, 0.0

    def refutes(self, value: float) -> bool:
        self._count, self._total, self._squares = self._count + 1, self._total + value, self._squares + value * value
        mean = self._total / self._count
        deviation = math.sqrt(max(self._squares / self._count - mean * mean, 1e-12))
        return self._count >= _Z_FROM and mean / deviation * math.sqrt(self._count) < -_Z


def looks(seed: int, requests: int) -> dict[str, bool]:
    """Which tests raise an alarm in one comparison of equal sides."""
    terms = Terms(num_repeat=CHALLENGERS)
    comparison, wealth, z_test = PairedEvidence(terms), Wealth(), ZTest()
    alarms = {"gate": False, "e_process": False, "z_test": False}
    source = pairs(random.Random(seed), 0.0, terms)
    for _ in range(requests):
        pair = next(source)
        difference = pair.difference
        assert difference is not None, "everything is judged here"
        comparison.add(pair)
        wealth.add(-difference)
        alarms["gate"] = alarms["gate"] or comparison.alarm()
        alarms["e_process"] = alarms["e_process"] or wealth.refutes(ALPHA)
        alarms["z_test"] = z_test.refutes(difference) or alarms["z_test"]
    return alarms


def shadow(seed: int, change: float, most: int, rules: GateRules, *, promotes: bool) -> float:
    """Requests until the gate gives an alarm, or lets the challenger be promoted."""
    terms = Terms(num_repeat=CHALLENGERS, rules=rules)
    comparison = PairedEvidence(terms)

    def happens(pair: Pair) -> bool:
        comparison.add(pair)
        return comparison.promotable() if promotes else comparison.alarm()

    return first(pairs(random.Random(seed), change, terms), most, happens)


def canary(seed: int, change: float, most: int) -> float:
    """Requests until a plain canary of a tenth finds the same."""
    chance, wealth = random.Random(seed), Wealth()

    def blocks() -> Iterator[float]:
        while True:
            ours = right(chance, easier(chance.betavariate(0.5, 0.5), change), 1)
            others = [right(chance, chance.betavariate(0.5, 0.5), 1) for _ in range(_CANARY_BLOCK - 1)]
            yield statistics.fmean(others) - ours

    def happens(value: float) -> bool:
        wealth.add(value)
        return wealth.refutes(ALPHA)

    return _CANARY_BLOCK * first(blocks(), most // _CANARY_BLOCK, happens)


def summary(requests: list[float], most: int) -> dict[str, Any]:
    """Median and 95th percentile; ``None`` where that many did not get there within ``most`` requests."""
    ordered = sorted(requests)
    middle, late = statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1]
    return {
        "median": None if math.isinf(middle) else middle,
        "p95": None if math.isinf(late) else late,
        "found": round(sum(one <= most for one in ordered) / len(ordered), 4),
    }


def measure(runs: int, comparisons: int, requests: int, seed: int) -> dict[str, Any]:
    """All figures; a picture needs the requests of each run too (``requests``)."""
    alarms = [looks(seed + number, requests) for number in range(comparisons)]
    equal = {name: round(sum(one[name] for one in alarms) / comparisons, 4) for name in alarms[0]}
    most = 10 * requests
    arms: dict[str, list[float]] = {}
    for drop in DROPS:
        # the next seeds: no run is one of the above
        seeds = range(seed + comparisons, seed + comparisons + runs)
        arms[f"drop {drop:g} shadow"] = [shadow(one, -drop, most, GateRules(), promotes=False) for one in seeds]
        arms[f"drop {drop:g} canary"] = [canary(one, -drop, most) for one in seeds]
    for gain in GAINS:
        rules = GateRules(better=gain > 0)
        seeds = range(seed + comparisons, seed + comparisons + runs)
        arms[f"gain {gain:g} shadow"] = [shadow(one, gain, most, rules, promotes=True) for one in seeds]
    drops = {
        f"{drop:g}": {
            "shadow": summary(arms[f"drop {drop:g} shadow"], most),
            "canary": summary(arms[f"drop {drop:g} canary"], most),
        }
        for drop in DROPS
    }
    gains = {f"{gain:g}": summary(arms[f"gain {gain:g} shadow"], most) for gain in GAINS}
    return {
        "comparisons": comparisons,
        "requests_of_each": requests,
        "runs": runs,
        "false_alarms": equal,
        "drops": drops,
        "gains": gains,
        "requests": arms,
    }


def table(report: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    equal = report["false_alarms"]
    lines = [
        f"| false alarms among {report['comparisons']} equals, {report['requests_of_each']} requests each | share |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {share:.1%} |" for name, share in equal.items()),
        "",
        "| requests until a drop is proven (median) | 1 + 7 in the shadow | canary of 10 % | ratio |",
        "|---|---|---|---|",
    ]
    for drop, row in report["drops"].items():
        ours, plain = row["shadow"]["median"], row["canary"]["median"]
        ratio = f"{plain / ours:.0f}" if ours and plain else ""
        lines.append(f"| {drop} | {_or_more(ours)} | {_or_more(plain)} | {ratio} |")
    lines += ["", "| requests until it may be promoted (median) | |", "|---|---|"]
    for gain, row in report["gains"].items():
        what = "equal: not worse than 0.05" if gain == "0" else f"better by {gain}"
        lines.append(f"| {what} | {_or_more(row['median'])} |")
    return "\n".join(lines)


def _or_more(requests: float | None) -> str:
    return "not found" if requests is None else f"{requests:,.0f}"


def plot(report: dict[str, Any], path: Path) -> None:
    """Of each arm, the share of runs that are decided after so many requests; and the false alarms."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right_) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained")
    for number, drop in enumerate(DROPS):
        for arm, style in (("shadow", "-"), ("canary", "--")):
            found = sorted(report["requests"][f"drop {drop:g} {arm}"])
            shares = [(place + 1) / len(found) for place in range(len(found))]
            left.plot(found, shares, style, color=f"C{number}", label=f"{drop:g}, {arm}")
    left.set_xscale("log")
    left.set_xlabel("requests")
    left.set_ylabel("share of runs in which the drop is proven")
    left.legend(fontsize="small")
    names = list(report["false_alarms"])
    right_.bar([name.replace("_", " ") for name in names], [100 * report["false_alarms"][name] for name in names])
    right_.axhline(100 * ALPHA, color="black", linestyle=":")
    right_.set_ylabel("false alarms among equals, %")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--comparisons", type=int, default=400, help="of equal sides")
    parser.add_argument("--requests", type=int, default=2000, help="of each of these; ten times as many for the others")
    parser.add_argument("--runs", type=int, default=200, help="of each drop and gain")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report, with the requests of each run, there")
    parser.add_argument("--table", type=Path, help="write the figures as a table in Markdown there")
    parser.add_argument("--plot", type=Path, help="write a picture (.png, .svg) there")


def run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    report = measure(options.runs, options.comparisons, options.requests, options.seed)
    report["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps({name: value for name, value in report.items() if name != "requests"}, indent=2))
    if options.json is not None:
        # JSON knows no infinity
        arms = {
            name: [None if math.isinf(one) else one for one in values] for name, values in report["requests"].items()
        }
        options.json.write_text(json.dumps(report | {"requests": arms}, allow_nan=False) + "\n")
    if options.table is not None:
        options.table.write_text(table(report) + "\n")
    if options.plot is not None:
        plot(report, options.plot)
