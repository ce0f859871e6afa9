"""The head and the tables of a swarm server, from statuses."""

from __future__ import annotations

import pytest

from gateway.views.format import Table
from gateway.views.swarm_view import view
from swarm.evidence.alarms import Alarm
from swarm.job import TrainJob
from swarm.states import EngineState
from swarm.status import (
    ClientRow,
    EngineStatus,
    JournalStatus,
    PoolInformation,
    ReplicaStatus,
    RunningEpisode,
    ServerStatus,
)
from swarm.types import StepResult

POOL = PoolInformation(
    batch_size=4,
    num_repeat=8,
    slots=32,
    completed_tasks=1,
    completed_episodes=11,
    running_episodes=16,
    quarantined_episodes=1,
    dropped_episodes=2,
    tasks={"whole": 8, "one": 1, "two": 2},
)


def status(state: EngineState = EngineState.ROLLING, detail: str = "", **more: object) -> ServerStatus:
    engine = EngineStatus(engine_status=state, engine_status_detail=detail, global_step=4)
    return ServerStatus.model_validate({"engine": engine, **more})


def head(told: ServerStatus, brief: bool = False) -> str:
    return "\n".join(f"{line.label} {line.text}" for line in view(told, []).head if not (brief and line.minor))


def table(told: ServerStatus, key: str) -> Table:
    return view(told, []).tables[key]


def episode(**more: object) -> RunningEpisode:
    fields = {
        "episode_uuid": "0" * 24 + "89abcdef",
        "client_uuid": "me",
        "episode_type": "train",
        "seconds": 90,
        "seconds_left": 10,
        "idle_seconds": 20,
        "idle_timeout": 100,
        "in_flight": 0,
        "calls": 1,
    }
    return RunningEpisode.model_validate(fields | more)


def test_agreement_tells_who_agrees() -> None:
    clients = [
        ClientRow(client_uuid=f"c{n}", active=n != 2, idle_seconds=1, takes_part=n != 3, agreed=n == 0)
        for n in range(4)
    ]
    told = status(pool=POOL.model_copy(update={"by_agreement": True}), clients=clients)
    assert "3 tasks wait for the clients' agreement: 1 of 2 clients agree; 11 episodes wait" in head(told)


def test_a_study_is_named_with_its_run() -> None:
    trained = TrainJob(model="m", project="study-rates-ab12cd", experiment="e3.seed1.1")
    assert "study rates-ab12cd, run e3.seed1.1" in head(status(job=trained), brief=True)
    assert "study" not in head(status(job=TrainJob(model="m")))


@pytest.mark.parametrize("state", list(EngineState))
def test_every_state_has_a_word_and_a_sign_of_its_own(state: EngineState) -> None:
    first = head(status(state)).splitlines()[0]
    sign, word = first.split()[:2]
    assert word == state.removeprefix("ENGINE.") and not sign.isascii()
    others = {head(status(other))[0] for other in EngineState if other is not state}
    assert sign not in others


def test_what_stands_in_the_way_is_told_also_where_there_is_little_room() -> None:
    journal = JournalStatus(
        pending=3, oldest_pending_seconds=9, last_commit_seconds=0, commits=1, records=1, bytes=1, error="disk full"
    )
    replicas = [
        ReplicaStatus(address="a:1", healthy=True, in_flight=0, calls=1, failures=0),
        ReplicaStatus(address="a:2", healthy=False, in_flight=0, calls=9, failures=4),
    ]
    ill = status(pool=POOL, journal=journal, replicas=replicas, waiting_claims=2, longest_wait_seconds=70)
    text = head(ill, brief=True)
    assert "! 3 records wait: disk full" in text and "! 1 of 2 replicas answer" in text and "set aside: a:2" in text
    assert "2 claims wait, the longest for 1m 10s" in text and "2 dropped, 1 quarantined" in text
    well = status(pool=POOL, journal=journal.model_copy(update={"error": "", "oldest_pending_seconds": 0.0}))
    assert "records" not in head(well, brief=True) and "3 records wait" in head(well)


def test_an_episode_that_has_been_idle_for_long_is_marked() -> None:
    told = table(status(running=[episode(idle_seconds=60, calls=3), episode(seconds=500)]), "e")
    assert {"! 1m 00s", "89abcdef"} <= set(told.rows[0].cells) and not told.note
    assert not any(cell.startswith("!") for cell in told.rows[1].cells)


def test_a_part_of_the_episodes_is_said_to_be_one() -> None:
    told = table(status(pool=POOL, running=[episode()]), "e")
    assert told.note == "of 16 the 1 that have been idle for longest"
    assert table(status(), "e").note == "no episode runs"


def test_tasks_that_lack_least_come_first_and_complete_ones_last() -> None:
    running = [episode(task_id="new"), episode(task_id="two"), episode(task_id="eval", episode_type="eval")]
    tasks = table(status(pool=POOL, running=running), "t")
    assert tasks.note == "1 complete, 3 begun; a batch takes 4"
    assert [row.cells[0] for row in tasks.rows] == ["two", "one", "new", "whole"]
    assert list(tasks.rows[0].cells[2:]) == ["1", "6 to come"]


def test_no_curve_hides_another_whose_name_begins_alike_or_is_ours() -> None:
    logged = {"pairwise_helpfulness.comparisons": 3.0, "pairwise_helpfulness.contradicted": 0.25, "reward": 7.0}
    metrics = {"swarm/reward_mean": 0.5} | {f"swarm/log/{name}": value for name, value in logged.items()}
    step = StepResult(step=1, batch_id="1", metrics=metrics, seconds=2.0)
    rows = [(row.cells[0], row.cells[1]) for row in view(status(), [step]).tables["curves"].rows]
    assert rows[:4] == [
        ("reward", "0.500"),
        ("…helpfulness.comparisons", "3"),
        ("…elpfulness.contradicted", "0.25"),
        ("reward", "7.000"),
    ]


def test_curves_are_of_the_metrics_that_the_steps_have() -> None:
    steps = [
        StepResult(step=n, batch_id=str(n), metrics={"swarm/reward_mean": value}, seconds=2.0)
        for n, value in enumerate((0.1, 0.9, 1e308, 0.5), 1)
    ]
    rows = view(status(), steps, [6.0, 12.0]).tables["curves"].rows
    assert [tuple(row.cells) for row in rows] == [
        ("reward", "0.500", "0.100", "0.900", "▁█▅"),
        ("seconds/step", "2", "2", "2", "▁▁▁▁"),
        ("episodes/min", "12", "6", "12", "▁█"),
    ]


def stepped(number: int, with_signal: float) -> StepResult:
    metrics = {"swarm/reward_mean": 0.00625, "swarm/reward_std": 0.01}
    metrics |= {"swarm/tasks": 4.0, "swarm/tasks_with_signal": with_signal, "swarm/lost_history": 0.25}
    return StepResult(step=number, batch_id=str(number), metrics=metrics, seconds=2.0)


def test_the_last_step_and_whether_the_run_learns() -> None:
    sentence = "learning: reward rose by 0.12 [0.05, 0.19] over 20 steps"
    told = view(status(learning=sentence), [stepped(1, 4)])
    assert told.reward == "0.006, 4 of 4 differ"
    assert [line.text for line in told.head if line.label == "trend"] == [sentence]
    assert not [line for line in view(status(), []).head if line.label == "trend"]
    alarm = Alarm(kind="signal", text="nothing was learned", since=2, action="warn")
    told = view(status(alarms=[alarm]), [stepped(1, 3)])
    assert told.reward.startswith("! ")
    assert [line.text for line in told.head if line.label == "alarm"] == [f"! {alarm.sentence}"]
    steps = view(status(), [stepped(1, 3)]).tables["steps"]
    cells = dict(zip(steps.columns, steps.rows[0].cells, strict=True))
    assert (cells[">reward"], cells[">groups differ"], cells[">history lost"]) == ("0.006", "3 of 4", "25%")


def test_what_the_engine_warns_of_is_told_where_people_look() -> None:
    assert "warns ! the checkpoint of step 10 is not written" in head(
        status(warnings=["the checkpoint of step 10 is not written"]), brief=True
    )


def test_losses_are_counted_under_their_titles() -> None:
    told = status(dropped={"stale": 5, "late": 7}, outcomes={"trainable": 12345})
    losses = table(told, "d")
    assert [row.cells for row in losses.rows if row.cells[0]] == [("7", "late"), ("5", "stale"), ("12.3k", "trainable")]
    assert len([row for row in losses.rows if not row.cells[0]]) == 2
    assert table(status(), "d") == Table(losses.columns, [], "nothing was dropped")
