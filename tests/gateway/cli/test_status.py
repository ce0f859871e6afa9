from gateway.cli.status import status_lines, step_line
from swarm.protocol import EngineStatus, PoolInformation, ServerStatus
from swarm.states import EngineState
from swarm.types import StepResult


def test_what_the_engine_did_not_report_is_left_out() -> None:
    assert step_line(StepResult(step=1, batch_id="b", metrics={}, seconds=2.0)) == "step    1  2.0 s"


def test_a_dead_engine_shows_its_last_lines() -> None:
    engine = EngineStatus(engine_status=EngineState.OFFLINE, engine_status_detail="exit code 1", global_step=4)
    lines = status_lines(ServerStatus(engine=engine, last_lines=["boom"]))
    assert lines[0].startswith("engine  ENGINE.OFFLINE")
    assert "detail  exit code 1" in lines
    assert lines[-1] == "  | boom"


def test_the_batch_and_only_the_latest_steps() -> None:
    pool = PoolInformation(
        batch_size=4,
        num_repeat=8,
        slots=32,
        completed_tasks=1,
        completed_episodes=8,
        running_episodes=16,
        quarantined_episodes=0,
        dropped_episodes=2,
    )
    steps = [StepResult(step=n, batch_id="b", metrics={}, seconds=1.0) for n in range(1, 10)]
    engine = EngineStatus(engine_status=EngineState.ROLLING)
    lines = status_lines(ServerStatus(engine=engine, pool=pool, steps=steps, model="tiny"), steps=2)
    assert "batch   1/4 tasks, 16 episodes running, 0 quarantined, 2 dropped" in lines
    assert [line for line in lines if line.startswith("step")] == ["step    8  1.0 s", "step    9  1.0 s"]
