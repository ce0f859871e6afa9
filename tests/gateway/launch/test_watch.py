from pathlib import Path
from typing import Any

import pytest

from gateway.launch.plan import ServerPlan
from gateway.launch.watch import EngineWatch, UpFailedError
from swarm.evidence.alarms import Alarm
from swarm.evidence.stages import ServingStage, StageRules
from swarm.job import TrainJob
from swarm.states import EngineState
from swarm.status import MAX_RESTARTS, EngineFailure, EngineStatus, JournalStatus, PoolInformation, ServerStatus
from swarm.types import StepResult


class Watched:
    def __init__(
        self,
        run_dir: Path,
        total_steps: int = 2,
        save_freq: int = 1,
        *,
        saves: bool = True,
        is_spared: bool = False,
        **job: Any,
    ) -> None:
        self.now = 0.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        if saves:
            (run_dir / "checkpoints" / "global_step_1").mkdir(parents=True, exist_ok=True)
            (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
        job = TrainJob(model="m", total_training_steps=total_steps, save_freq=save_freq, **job)
        self.watch = EngineWatch(
            ServerPlan(job, {}, run_dir, boot_timeout=100.0, is_spared=is_spared),
            lambda kind, values: self.events.append((kind, values)),
            clock=lambda: self.now,
        )

    def see(self, state: EngineState, detail: str = "", **fields: Any) -> list[str]:
        """The kinds of the events that this status brings."""
        before = len(self.events)
        engine = EngineStatus(engine_status=state, engine_status_detail=detail)
        self.watch.see(ServerStatus(engine=engine, **fields))
        return [kind for kind, _ in self.events[before:]]


def step(number: int) -> StepResult:
    return StepResult(step=number, batch_id=f"b{number}", metrics={"swarm/reward_mean": 0.5}, seconds=1.0)


def test_each_thing_is_told_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.see(EngineState.BOOTING, "loading", boot_stage="model") == ["boot", "state"]
    assert watched.see(EngineState.BOOTING, "loading", boot_stage="model") == []
    assert watched.see(EngineState.BOOTING, "vLLM", boot_stage="vllm") == ["boot"]
    watched.now = 42.0
    assert watched.see(EngineState.ROLLING, model="tiny") == ["ready", "state"]
    assert watched.events[-2] == ("ready", {"model": "tiny", "seconds": 42.0})
    assert watched.see(EngineState.WEIGHT_SYNCING, steps=[step(1)]) == ["state", "step"]
    assert watched.see(EngineState.ROLLING, steps=[step(1)]) == ["state"]


def test_it_says_whether_the_run_learns_when_the_answer_changes_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path, total_steps=25)
    words = ["not proven: a"] * 4 + ["learning: b"] * 7 + ["no: c", "learning: d"] + ["learning: e"] * 12
    told: list[int] = []
    for number, sentence in enumerate(words, 1):
        if "learning" in watched.see(EngineState.ROLLING, steps=[step(number)], learning=sentence):
            assert ("learning", {"sentence": sentence}) in watched.events
            told.append(number)
    assert told == [5, 10, 12, 13, 20, 25]


def died(count: int, reason: str = "out of memory") -> dict[str, Any]:
    return {
        "detail": f"{reason}; its processes are being ended",
        "engine_failure": EngineFailure(reason=reason, count=count),
    }


def test_an_engine_that_never_came_up_raises_with_its_reason_and_last_lines(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.BOOTING)
    with pytest.raises(UpFailedError, match=r"went offline: out of memory$") as caught:
        watched.see(EngineState.OFFLINE, **died(1), last_lines=["Killed"])
    assert caught.value.last_lines == ["Killed"]
    assert caught.value.log == tmp_path / "engine.log"


def test_restarts_wait_twice_as_long_each_until_there_was_a_step(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    for count, longest in ((1, 2.0), (2, 4.0), (3, 8.0), (1, 2.0)):
        assert watched.see(EngineState.OFFLINE, **died(count)) == ["state", "restarting"]
        values = watched.events[-1][1]
        assert longest / 2 <= values["in_seconds"] <= longest and values["reason"] == "out of memory"
        assert not watched.watch.restart_due
        watched.now += longest
        assert watched.watch.restart_due
        assert watched.see(EngineState.OFFLINE, **died(count)) == []
        watched.see(EngineState.BOOTING, **died(count))
        assert not watched.watch.restart_due
        watched.now += 50.0
        assert watched.see(EngineState.ROLLING, **died(count)) == ["recovered", "state"]
        assert watched.events[-2][1]["seconds"] == 50.0, "counted from this boot"


def test_deaths_that_a_refused_request_explains_do_not_use_up_the_restarts(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    for count in range(2, 2 * MAX_RESTARTS, 2):
        failure = EngineFailure(reason="out of memory", count=count, explained=count)
        assert watched.see(EngineState.OFFLINE, engine_failure=failure) == ["state", "restarting"]
        assert watched.events[-1][1]["attempt"] == 0 and watched.events[-1][1]["in_seconds"] <= 2.0
        watched.see(EngineState.ROLLING, engine_failure=failure)
    failure = EngineFailure(reason="out of memory", count=20, explained=19 - MAX_RESTARTS)
    with pytest.raises(UpFailedError, match="started again 5 times"):
        watched.see(EngineState.OFFLINE, engine_failure=failure)


def test_the_same_death_without_an_answer_in_between_ends_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    reason = "the engine failed: vLLM died: RuntimeError: no such kernel"
    failure = EngineFailure(reason=reason, count=2, cause="RuntimeError: no such kernel", repeated=True)
    with pytest.raises(
        UpFailedError, match=r"RuntimeError: no such kernel \(again, and it answered nothing in between"
    ):
        watched.see(EngineState.OFFLINE, engine_failure=failure)


def test_the_death_of_a_trainer_beside_its_vllm_is_told_once_and_starts_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, total_steps=9)
    watched.see(EngineState.ROLLING, serving="always", steps=[step(1)])
    serving = {"serving": "always", "steps": [step(1)]}
    assert watched.see(EngineState.BOOTING, **died(1), **serving) == ["boot", "state", "trainer_restarting"]
    assert watched.events[-1][1] == {"reason": "out of memory", "attempt": 1, "of": MAX_RESTARTS}
    assert watched.see(EngineState.BOOTING, **died(1), **serving) == []
    assert watched.see(EngineState.BOOTING, **died(2), **serving) == ["trainer_restarting"]
    assert not watched.watch.restart_due
    assert watched.see(EngineState.ROLLING, **died(2), **serving) == ["recovered", "state"]


def test_where_training_went_on_is_told_also_when_it_has_done_steps_since(tmp_path: Path) -> None:
    watched = Watched(tmp_path, total_steps=9)
    watched.see(EngineState.ROLLING, steps=[step(1), step(2), step(3)])
    watched.see(EngineState.OFFLINE, **died(1), steps=[step(1), step(2), step(3)])
    again = step(3).model_copy(update={"batch_id": "after the checkpoint of step 2"})
    told = watched.see(EngineState.WEIGHT_SYNCING, steps=[step(1), step(2), step(3), again])
    assert told == ["recovered", "state", "step"]
    assert watched.events[-3][1]["step"] == 2


@pytest.mark.parametrize(
    ("save_freq", "why"),
    [(-1, "job.save_freq says so"), (3, "is due at step 3"), (1, "none could be written"), (2, "")],
)
def test_a_start_without_a_checkpoint_warns_that_steps_are_lost(tmp_path: Path, save_freq: int, why: str) -> None:
    steps, warning = [step(1), step(2)], ["warning"] if why else []
    watched = Watched(tmp_path, 9, save_freq, saves=not why)
    # `up` is started again in the folder of a run, and its engine dies then
    assert watched.see(EngineState.BOOTING, steps=steps) == [*warning, "boot", "state"]
    watched.see(EngineState.ROLLING, steps=steps)
    assert watched.see(EngineState.OFFLINE, **died(1), steps=steps) == ["state", "restarting", *warning]
    messages = [values["message"] for kind, values in watched.events if kind == "warning"]
    assert all(why in one and "the job's model again, 2 steps are lost" in one for one in messages)


def test_an_engine_without_which_users_are_answered_is_started_again_before_it_was_ever_ready(tmp_path: Path) -> None:
    watched = Watched(tmp_path, is_spared=True)
    watched.see(EngineState.BOOTING)
    watched.now = 101.0
    assert watched.see(EngineState.BOOTING) == [], "the server ends a boot that takes too long"
    assert watched.see(EngineState.OFFLINE, **died(1)) == ["state", "restarting"]
    watched.now += 10.0
    assert watched.watch.restart_due
    watched.see(EngineState.BOOTING)
    # of the same cause: it is left dead, and nothing else ends
    failure = EngineFailure(reason="no such target", count=2, repeated=True)
    again: dict[str, Any] = {"engine_failure": failure, "last_lines": ["why"]}
    assert watched.see(EngineState.OFFLINE, **again) == ["state", "engine_given_up"]
    _, values = watched.events[-1]
    assert "no such target (again" in values["message"] and values["last_lines"] == ["why"]
    watched.now += 100.0
    assert watched.see(EngineState.OFFLINE, **again) == [] and not watched.watch.restart_due
    # a person starts it once more
    watched.see(EngineState.BOOTING)
    assert "recovered" in watched.see(EngineState.ROLLING)


def test_moves_of_a_challenger_and_waits_for_a_person_are_told(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    stage = ServingStage.begun("default", "big", StageRules(mode="manual", trial_every=1), 0.0, "salt")
    assert "stage" not in watched.see(EngineState.ROLLING, stages=[stage])
    canary = stage.model_copy(update={"share": 0.05, "by": "ann", "why": "looks good", "challenger": 4})
    assert watched.see(EngineState.ROLLING, stages=[canary]) == ["stage"]
    told = {"route": "default", "stage": "canary 0.05", "challenger": 4, "by": "ann", "why": "looks good"}
    assert watched.events[-1] == ("stage", told | {"waits": False})
    waits = canary.model_copy(update={"trial": True, "until": None})
    assert watched.see(EngineState.ROLLING, stages=[waits]) == ["stage"]
    assert watched.events[-1] == ("stage", told | {"waits": True})
    assert watched.see(EngineState.ROLLING, stages=[waits]) == []
    on = canary.model_copy(update={"trial": True, "until": 3600.0})
    assert watched.see(EngineState.ROLLING, stages=[on]) == []
    # nobody else moves it
    assert watched.see(EngineState.ROLLING, stages=[on.set_pinned(True, "ann", "demo", 1.0)]) == ["stage"]
    assert watched.events[-1] == ("stage", told | {"waits": True})


def test_an_engine_that_is_stopped_while_it_waits_for_its_restart_stays_stopped(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    watched.see(EngineState.OFFLINE, **died(1))
    assert watched.see(EngineState.OFFLINE, "stopped") == ["engine_stopped"]
    watched.now = 100.0
    assert watched.see(EngineState.OFFLINE, "stopped") == []
    assert not watched.watch.restart_due
    watched.see(EngineState.BOOTING)
    assert watched.see(EngineState.ROLLING) == ["ready", "state"]


def test_an_engine_that_has_done_its_last_step_is_finished(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    assert watched.see(EngineState.OFFLINE, steps=[step(1), step(2)]) == ["state", "step", "step", "finished"]
    assert watched.watch.finished


def test_an_engine_that_serves_after_its_last_step_is_started_again_when_it_dies(tmp_path: Path) -> None:
    watched = Watched(tmp_path, serve_after_training=True)
    watched.see(EngineState.ROLLING, steps=[step(1), step(2)])
    assert watched.see(EngineState.OFFLINE, steps=[step(1), step(2)], **died(1)) == ["state", "restarting"]
    assert not watched.watch.finished


@pytest.mark.parametrize(("save_freq", "saves"), [(-1, False), (1, True)])
def test_a_run_that_does_its_last_steps_again_is_not_finished_before_them(
    tmp_path: Path, save_freq: int, saves: bool
) -> None:
    """The folder's run had done its last step, and that step was not saved."""
    watched = Watched(tmp_path, save_freq=save_freq, saves=saves)
    before = [step(1), step(2)]
    watched.see(EngineState.BOOTING, steps=before)
    watched.see(EngineState.ROLLING, steps=before)
    assert "restarting" in watched.see(EngineState.OFFLINE, steps=before, **died(1))
    again = step(2).model_copy(update={"batch_id": "again"})
    watched.see(EngineState.ROLLING, steps=[*before, again])
    assert watched.see(EngineState.OFFLINE, steps=[*before, again])[-1] == "finished"


def test_a_boot_that_never_ends_raises(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.BOOTING, "loading")
    watched.now = 101.0
    with pytest.raises(UpFailedError, match="not ready after 101 s, last: loading"):
        watched.see(EngineState.BOOTING, "loading")


def test_a_start_that_fails_at_once_or_takes_too_long_is_one_more_death(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    watched.see(EngineState.OFFLINE, **died(1))
    watched.now = 2.0
    assert watched.watch.restart_due
    assert watched.see(EngineState.OFFLINE, **died(2, "the disk is full")) == ["restarting"]
    assert not watched.watch.restart_due
    watched.see(EngineState.BOOTING, **died(2))
    watched.now = 150.0
    assert watched.see(EngineState.BOOTING, **died(2)) == []
    assert watched.see(EngineState.OFFLINE, **died(3, "not ready within 100 s")) == ["state", "restarting"]
    assert watched.events[-1][1]["attempt"] == 3


def test_a_run_that_goes_on_tells_no_step_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, total_steps=3)
    before = [step(1), step(2)]
    assert watched.see(EngineState.BOOTING, steps=before) == ["boot", "state"]
    assert watched.watch.last_step == 1, "it goes on from what is saved"
    assert watched.see(EngineState.ROLLING, steps=before) == ["ready", "state"]
    assert watched.see(EngineState.ROLLING, steps=[*before, step(3)]) == ["step"]
    # the first look may come late
    late = Watched(tmp_path, total_steps=3)
    assert late.see(EngineState.ROLLING, steps=before) == ["ready", "state"]


def test_an_engine_that_goes_on_without_a_checkpoint_counts_from_one(tmp_path: Path) -> None:
    watched = Watched(tmp_path, total_steps=3)
    before = [step(1), step(2)]
    watched.see(EngineState.BOOTING, steps=before)
    again = step(1).model_copy(update={"batch_id": "another"})
    assert "step" in watched.see(EngineState.ROLLING, steps=[*before, again])
    assert "restarting" in watched.see(EngineState.OFFLINE, **died(1), steps=[*before, again])


def test_an_alarm_is_a_warning_when_it_begins(tmp_path: Path) -> None:
    watched = Watched(tmp_path, total_steps=99)
    alarm = Alarm(kind="signal", text="nothing was learned", since=2, action="pause", pauses=True)
    told = [watched.see(EngineState.ROLLING, alarms=alarms) for alarms in ([], [alarm], [alarm], [], [alarm])]
    assert ["warning" in kinds for kinds in told] == [False, True, False, False, True]
    message = next(values["message"] for kind, values in watched.events if kind == "warning")
    assert message == (
        "alarm: signal, since step 2: nothing was learned; training waits: `swarm-gateway policies resume --reason WHY`"
    )


def test_what_the_engine_warns_of_is_told_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    full = "the checkpoint of step 10 is not written: 0.1 GB are free"
    assert "warning" in watched.see(EngineState.ROLLING, warnings=[full])
    assert watched.events[-1] == ("warning", {"message": full})
    assert watched.see(EngineState.ROLLING, warnings=[full]) == []


def test_the_progress_of_a_batch_is_told_again_after_the_words_of_a_state(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for state in (EngineState.ROLLING, EngineState.WEIGHT_SYNCING, EngineState.ROLLING):
        kinds = watched.see(state, pool=PoolInformation(completed_tasks=0))
    assert kinds[-1] == "batch"


def test_how_much_of_the_batch_there_is_is_told_when_it_changes(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.BOOTING)
    for tasks, told in ((0, True), (0, False), (3, True)):
        kinds = watched.see(
            EngineState.ROLLING, pool=PoolInformation(batch_size=32, num_repeat=8, completed_tasks=tasks)
        )
        assert ("batch" in kinds) == told
    assert watched.events[-1] == ("batch", {"tasks": 3, "of": 32, "words": "3 of 32 tasks, 29 requests to go"})


def test_what_the_disk_does_to_the_journal_is_told_once_each_way(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(EngineState.ROLLING)
    full = JournalStatus(
        pending=3,
        oldest_pending_seconds=1.0,
        last_commit_seconds=0.0,
        commits=1,
        records=1,
        bytes=1,
        error="OperationalError: database or disk is full",
    )
    assert watched.see(EngineState.ROLLING, journal=full) == ["warning"]
    assert watched.see(EngineState.ROLLING, journal=full) == []
    assert watched.see(EngineState.ROLLING, journal=full.model_copy(update={"error": ""})) == ["warning"]
    began, ended = [values["message"] for kind, values in watched.events if kind == "warning"]
    assert f"{tmp_path / 'journal.db'} cannot be written (OperationalError: database or disk is full)" in began
    assert ended == "the journal is written again"
