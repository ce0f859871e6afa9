"""What is remembered between two looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.tui.history import FEW_STEPS, STEPS, Chronicle, Growth, StepHistory
from swarm.protocol import LogEntry
from swarm.types import StepResult


def step(number: int, run: str = "a") -> StepResult:
    return StepResult(step=number, batch_id=f"{run}{number}", metrics={}, seconds=1.0)


def test_steps_are_asked_for_in_full_once() -> None:
    history = StepHistory()
    assert history.wanted == STEPS
    assert history.see([step(1), step(2)], history.wanted) == [step(1), step(2)]
    assert history.wanted == FEW_STEPS
    assert history.see([step(2), step(3)], history.wanted) == [step(3)]
    assert history.steps == [step(1), step(2), step(3)]


def test_steps_that_do_not_join_are_of_another_run_or_were_missed() -> None:
    history = StepHistory()
    history.see([step(1)], history.wanted)
    history.see([step(1, "b")], history.wanted)
    assert history.steps == [step(1, "b")] and history.wanted == STEPS
    history.see([], history.wanted)
    assert history.steps == []


def test_after_an_absence_all_are_asked_for_again() -> None:
    history = StepHistory()
    history.see([step(1)], history.wanted)
    history.forget()
    assert history.wanted == STEPS and history.steps == [step(1)]


@given(st.lists(st.integers(1, 2 * FEW_STEPS), min_size=1, max_size=30))
def test_what_is_known_is_what_the_server_has(growths: list[int]) -> None:
    history, server = StepHistory(), list[StepResult]()
    for growth in growths:
        server += [step(len(server) + number) for number in range(1, growth + 1)]
        # looks again at once where it missed some, as the follower does at its next look
        for _ in range(2):
            asked = history.wanted
            history.see(server[-asked:], asked)
    assert history.steps == server[-STEPS:]


def test_a_pushed_line_is_kept_once_and_longer_than_by_the_server() -> None:
    chronicle = Chronicle()
    one, two = LogEntry(timestamp=1.0, message="one"), LogEntry(timestamp=3.0, tag="vllm", message="two")
    chronicle.see([one])
    chronicle.note(2.0, "a step")
    chronicle.see([one, two])
    chronicle.see([two])
    chronicle.see([])
    assert [(line.tag, line.text) for line in chronicle.lines] == [("log", "one"), ("", "a step"), ("vllm", "two")]


def test_growth_is_of_the_last_seconds_and_begins_anew_with_its_server() -> None:
    growth = Growth(span=10.0)
    assert growth.see(0.0, 100) and growth.per_second == 0.0
    assert growth.see(5.0, 150) and growth.per_second == 10.0
    for second in range(6, 30):
        growth.see(float(second), 150)
    assert growth.per_second == 0.0
    assert not growth.see(31.0, 3)
    assert growth.per_second == 0.0
