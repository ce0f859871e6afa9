"""The study's state machine against everything that may happen to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.research.decisions import (
    Propose,
    Record,
    RunEnding,
    arm_scores,
    choose,
    ending,
    is_due,
    next_action,
    trouble,
)
from swarm.research.ledger import BASE, Run, State, fold
from swarm.research.study import Study, rehearsal
from swarm.types import StepResult
from tests.swarm.research.making import scores_of, study_of


def points(*rewards: float, **metrics: float) -> list[StepResult]:
    return [
        StepResult(step=n, batch_id=f"b{n}", metrics={"swarm/reward_mean": one, **metrics}, seconds=1.0)
        for n, one in enumerate(rewards, 1)
    ]


def test_nan_and_collapse_end_a_run() -> None:
    study = study_of()
    assert trouble(study, Run("e1"), points(0.5, 0.5, 0.5, 0.4, 0.4, 0.4)) is None
    nan = trouble(study, Run(BASE), points(0.5, **{"swarm/non_finite_metrics": 2.0}))
    assert nan is not None and nan.outcome == "failed" and "NaN" in nan.why
    fallen = points(0.5, 0.5, 0.5, 0.1, 0.1, 0.1)
    collapsed = trouble(study, Run("e1"), fallen)
    assert collapsed is not None and collapsed.outcome == "stopped" and "from 0.5 to 0.1" in collapsed.why
    # a fall that its own scatter explains is none
    assert trouble(study, Run("e1"), points(0.9, 0.1, 0.5, 0.5, 0.1, 0.0)) is None
    # what is compared at the end is not selected on the way
    assert trouble(study, Run(BASE), fallen) is None and trouble(study, Run("e1", "seed", 1), fallen) is None


def test_a_run_that_is_beaten_beyond_doubt_ends_early() -> None:
    study, driver = study_of(), Driver(study_of(), {})
    driver.events = [begun(), claimed(BASE), measured(BASE, 2, [0.5] * 6), measured(BASE, 4, [0.6] * 6), ended(BASE)]
    driver.events += [proposed("e1"), claimed("e1"), measured("e1", 2, [0.3, 0.31, 0.3, 0.29, 0.3, 0.31])]
    end = ending(study, fold(driver.events), Run("e1"))
    assert end is not None and end.outcome == "stopped" and "beaten: 0.1983 worse than the base at step 2" in end.why
    driver.events[-1] = measured("e1", 2, [0.3, 0.71, 0.3, 0.69, 0.3, 0.31])
    assert ending(study, fold(driver.events), Run("e1")) is None


def test_a_rehearsal_confirms_nothing_though_one_task_has_an_interval_without_end() -> None:
    study = study_of()
    events = [begun(), claimed(BASE), measured(BASE, 4, [0.1]), ended(BASE)]
    events += [proposed("e1"), claimed("e1"), measured("e1", 4, [0.9]), ended("e1")]
    assert choose(study, fold(events)) == ["e1"]
    assert choose(rehearsal(study), fold(events)) == []


def begun() -> dict[str, Any]:
    return {"event": "begun", "at": 0.0, "study": "s", "locked": "l", "code": "c", "revision": "r"}


def proposed(name: str, lr: float = 2e-6, refused: str = "") -> dict[str, Any]:
    told = {"hypothesis": "h", "delta": {"lr": lr}, "patch": "", "code": "c", "refused": refused}
    return {"event": "proposed", "at": 0.0, "experiment": name, **told}


def claimed(run: str, attempt: int = 1, lost: int = 0, again: bool = False) -> dict[str, Any]:
    told = {"server": "u", "attempt": attempt, "lost": lost, "again": again}
    return {"event": "claimed", "at": 0.0, "run": run, **told}


def measured(run: str, step: int, scores: list[float]) -> dict[str, Any]:
    return {"event": "measured", "at": 0.0, "run": run, "step": step, "scores": scores, "rewards": {}}


def ended(run: str, outcome: str = "done", step: int = 4) -> dict[str, Any]:
    return {"event": "ended", "at": 0.0, "run": run, "outcome": outcome, "why": "", "step": step}


class Driver:
    """Drives a study without anything real; ``fates`` are runs that end otherwise, a step takes ``pace`` seconds."""

    def __init__(
        self, study: Study, fates: dict[str, RunEnding], lrs: list[float] | None = None, pace: float = 0.0
    ) -> None:
        self.study, self.fates, self.lrs = study, fates, lrs or []
        self.pace, self.clock = pace, 0.0
        self.events: list[dict[str, Any]] = [begun()]
        self.state = fold(self.events)
        self.busy: dict[str, int] = {}

    def add(self, event: dict[str, Any]) -> None:
        event = json.loads(json.dumps({**event, "at": self.clock}))
        self.state.apply(event)
        self.events.append(event)

    def crash(self) -> None:
        self.busy.clear()
        assert fold(self.events) == self.state
        self.state = fold(self.events)

    def act(self, servers: int) -> bool:
        """Take the next action, if there is one now."""
        action = next_action(self.study, self.state, frozenset(self.busy))
        match action:
            case Record(event, values):
                self.add({"event": event, "at": 0.0, **values})
            case Propose(name):
                place = len(self.state.experiments)
                if place < len(self.lrs):
                    refused = "no" if self.lrs[place] < 0 else ""
                    self.add(proposed(name, abs(self.lrs[place]), refused))
                else:
                    self.add({"event": "exhausted", "at": 0.0, "why": "no more"})
            case Run() as run if len(self.busy) < servers:
                known = self.state.runs.get(run.name)
                self.busy[run.name] = max(known.scores, default=-1) + 1 if known else 0
                self.add(claimed(run.name))
            case _:
                return False
        return True

    def work(self, name: str) -> None:
        """Let a busy run take a step."""
        run, step = Run.named(name), self.busy[name]
        self.clock += self.pace
        end = self.fates.get(name) if step == 2 else None
        if end is None and is_due(self.study, run, step) and step not in self.state.runs[name].scores:
            experiment = self.state.experiments.get(run.experiment)
            lr = experiment.delta["lr"] if experiment else 1e-6
            shuffle = run.arm == "control" or self.study.control == "shuffle"
            self.add(measured(name, step, scores_of(lr, run.seed, shuffle, step)))
        if end is None:
            end = ending(self.study, self.state, run)
        self.busy[name] = step + 1
        if end is not None:
            self.add({**ended(name, end.outcome, step), "why": end.why})
            del self.busy[name]


def verdicts(state: State) -> dict[str, str]:
    return {one.name: one.verdict for one in state.experiments.values()}


def driven(driver: Driver, servers: int = 1) -> State:
    while driver.state.finished is None:
        while driver.act(servers):
            pass
        for name in list(driver.busy):
            driver.work(name)
    return driver.state


def test_the_best_is_confirmed_and_kept() -> None:
    state = driven(Driver(study_of(), {}, [2e-6, 3e-5, 1e-5]))
    assert verdicts(state) == {"e1": "inconclusive", "e2": "kept", "e3": "inconclusive"}
    assert state.chosen == ["e2"] and state.finished == "kept e2; no more"
    assert len(arm_scores(study_of(), state, "e2", "control")) == 3
    assert all(one.outcome == "done" for one in state.runs.values()) and len(state.runs) == 4 + 9


@pytest.mark.parametrize(
    ("base", "gained", "verdict"),
    [
        ([0.0, 1.0, 1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0, 1.0], "inconclusive"),
        ([0.0] * 6, [1.0] * 6, "kept"),
        # no task but this one tells anything of the scatter
        ([0.0], [1.0], "inconclusive"),
    ],
)
def test_seeds_that_all_score_equally_prove_no_more_than_the_tasks_do(
    base: list[float], gained: list[float], verdict: str
) -> None:
    driver = Driver(study_of(), {})
    for event in (claimed(BASE), measured(BASE, 4, base), ended(BASE), proposed("e1"), claimed("e1")):
        driver.add(event)
    for event in (measured("e1", 4, gained), ended("e1"), {"event": "exhausted", "why": "no more"}):
        driver.add(event)
    driver.add({"event": "chosen", "experiments": ["e1"]})
    for seed in (1, 2, 3):
        for run, scores in ((f"base.seed{seed}", base), (f"e1.seed{seed}", gained), (f"e1.control{seed}", base)):
            for event in (claimed(run), measured(run, 4, scores), ended(run)):
                driver.add(event)
    assert verdicts(driven(driver)) == {"e1": verdict}


@pytest.mark.parametrize("fate", [RunEnding("failed", "NaN"), RunEnding("stopped", "x")])
def test_a_winner_that_fails_with_one_seed_is_not_kept(fate: RunEnding) -> None:
    state = driven(Driver(study_of(), {"e1.seed2": fate}, [3e-5]))
    assert verdicts(state) == {"e1": "dropped"}
    state = driven(Driver(study_of(), {"e1.control2": fate}, [3e-5]))
    assert verdicts(state) == {"e1": "inconclusive"}


def test_a_base_that_fails_ends_the_study() -> None:
    state = driven(Driver(study_of(), {BASE: RunEnding("failed", "NaN")}, [3e-5]))
    assert state.finished == "nothing was found that beats the base; the base run failed: NaN" and not state.experiments


def test_the_stop_rule_and_the_budget_end_exploring() -> None:
    lrs = [3e-5, 2e-6, 3e-6, 4e-6, 5e-6]
    state = driven(Driver(study_of(stop={"patience": 2}), {}, lrs))
    assert len(state.experiments) == 3 and "no new best in 2" in (state.exhausted or "")
    # an experiment that runs is none without a gain: each of the first two is a new best
    state = driven(Driver(study_of(stop={"patience": 1}), {}, [2e-6, 3e-5, 3e-6, 4e-6]))
    assert len(state.experiments) == 3
    state = driven(Driver(study_of(stop={"experiments": 1}), {}, lrs))
    assert len(state.experiments) == 1
    state = driven(Driver(study_of(budget={"runs": 12}), {}, lrs))
    assert len(state.experiments) == 2 and len(state.runs) == 12 and verdicts(state)["e1"] == "kept"
    state = driven(Driver(study_of(budget={"runs": 40, "steps": 4 * 11}), {}, lrs))
    assert len(state.experiments) == 1


def test_hours_are_reserved_for_the_confirmation() -> None:
    # five evaluations and steps of twelve minutes: an hour for each run
    study = study_of(budget={"runs": 40, "hours": 12.01})
    state = driven(Driver(study, {}, [3e-5, 2e-6, 3e-6, 4e-6], pace=720.0))
    assert state.exhausted == "the budget for first runs is used: no more hours" and len(state.experiments) == 2
    assert verdicts(state)["e1"] == "kept" and state.hours == pytest.approx(12.0)


def test_what_lost_attempts_cost_is_in_the_budget() -> None:
    base = [begun(), claimed(BASE), measured(BASE, 2, [0.5] * 6), claimed(BASE, 2, lost=3, again=True)]
    events = [*base, measured(BASE, 4, [0.6] * 6), ended(BASE)]
    events = [{**event, "at": 100.0 * place} for place, event in enumerate(events)]
    state = fold(events)
    # begun at 100 s; it failed at 300 s, and was made again at once
    assert (state.runs[BASE].steps, state.hours) == (7, pytest.approx(400 / 3600))
    assert next_action(study_of(budget={"runs": 40, "steps": 47}), state) == Propose("e1")
    exhausted = next_action(study_of(budget={"runs": 40, "steps": 46}), state)
    assert isinstance(exhausted, Record) and "no more steps" in exhausted.values["why"]
    # nobody ran the study between a kill and this claim
    events[3] = {**claimed(BASE, 2, lost=2), "at": 300.0}
    assert fold(events).hours == pytest.approx(300 / 3600)


@pytest.mark.slow
def test_shuffled_rewards_give_no_win() -> None:
    study = study_of(control="shuffle")
    wins = 0
    for shift in range(40):
        lrs = [(2 + place + 13 * shift) * 1e-7 for place in range(12)]
        wins += "kept" in verdicts(driven(Driver(study, {}, lrs))).values()
    # at a confidence of 95 % twice, over the base and over the control
    assert wins <= 2


FATES = st.dictionaries(
    st.sampled_from(["e1", "e2", "e3", "e1.seed1", "e2.seed3", "e1.control2", "base.seed1"]),
    st.sampled_from([RunEnding("failed", "NaN"), RunEnding("stopped", "collapsed")]),
    max_size=3,
)


@pytest.mark.property
@settings(deadline=None)
@given(
    lrs=st.lists(st.sampled_from([-1e-6, 2e-6, 1e-5, 2e-5, 3e-5]), max_size=6),
    fates=FATES,
    winners=st.integers(1, 2),
    servers=st.integers(1, 3),
    draws=st.lists(st.integers(0, 9), max_size=120),
)
def test_whatever_happens_no_run_is_done_twice_and_every_experiment_is_judged(
    lrs: list[float], fates: dict[str, RunEnding], winners: int, servers: int, draws: list[int]
) -> None:
    study = study_of(budget={"runs": 22}, decision={"winners": winners})
    driver = Driver(study, fates, lrs)
    for draw in draws:
        if driver.state.finished is not None:
            break
        if draw == 0:
            driver.crash()
        elif draw > 4 and driver.busy:
            driver.work(sorted(driver.busy)[draw % len(driver.busy)])
        else:
            driver.act(servers)
    state = driven(driver, servers)
    driver.crash()
    ends = [one["run"] for one in driver.events if one["event"] == "ended"]
    assert len(ends) == len(set(ends)) == len(state.runs) <= 22
    assert len(state.experiments) == len(lrs) or "budget" in (state.exhausted or "")
    for one in state.experiments.values():
        assert one.verdict in ("kept", "dropped", "inconclusive")
        if one.verdict == "kept":
            arms = [(one.name, "seed"), (BASE, "seed"), (one.name, "control")]
            assert all(len(arm_scores(study, state, *arm)) >= 3 for arm in arms)
            assert one.interval is not None and one.interval[0] > 0
    # without crashes, and one run at a time, it comes to the same
    assert verdicts(driven(Driver(study, fates, lrs))) == verdicts(state)
    assert next_action(study, state) is None
