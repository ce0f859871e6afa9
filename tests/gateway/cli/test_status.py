from gateway.cli.status import status_lines, step_line
from swarm.protocol import (
    ClientRow,
    EngineFailure,
    EngineStatus,
    JournalStatus,
    LogEntry,
    PoolInformation,
    Rates,
    ReplicaStatus,
    RunningEpisode,
    ServerStatus,
)
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


def test_an_engine_that_boots_again_still_tells_what_it_died_of() -> None:
    engine = EngineStatus(engine_status=EngineState.BOOTING, engine_status_detail="starting Ray")
    died = EngineFailure(reason="killed by SIGKILL", count=2)
    lines = status_lines(ServerStatus(engine=engine, engine_failure=died))
    assert "died    killed by SIGKILL (2 in a row without a step)" in lines


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


def test_what_a_monitor_needs_is_there_and_nothing_else() -> None:
    engine = EngineStatus(engine_status=EngineState.ROLLING)
    clients = [ClientRow(client_uuid=f"c{n}", active=n < 6, idle_seconds=9, running=n) for n in range(7)]
    running = [
        RunningEpisode(
            episode_uuid="0123456789abcdef",
            client_uuid="c1",
            episode_type="train",
            seconds=90,
            seconds_left=10,
            idle_seconds=idle,
            idle_timeout=100,
            in_flight=0,
            calls=1,
        )
        for idle in (80, 20)
    ]
    rates = Rates(
        window=60,
        claims_per_minute=1,
        episodes_per_minute=42,
        sampled_tokens_per_second=900,
        trained_tokens_per_second=0,
    )
    journal = JournalStatus(
        pending=3,
        oldest_pending_seconds=9,
        last_commit_seconds=0,
        commits=1,
        records=1,
        bytes=1,
        error="disk full",
    )
    lines = status_lines(
        ServerStatus(
            engine=engine,
            clients=clients,
            running=running,
            rates=rates,
            journal=journal,
            waiting_claims=2,
            longest_wait_seconds=7,
            replicas=[
                ReplicaStatus(address="a:1", healthy=True, in_flight=0, calls=1, failures=0),
                ReplicaStatus(address="a:2", healthy=False, in_flight=0, calls=9, failures=4),
            ],
            quarantined={"N token ids": 2},
            dropped={"stale": 5},
            log=[LogEntry(timestamp=0, tag="vllm", message="hello")],
        )
    )
    assert lines[1:] == [
        "pace    42 episodes/min, 900 tokens/s",
        "waits   2 claims, the longest for 7 s",
        "client  c5: 5 running, 0 ended, 0 trained",
        "client  c4: 4 running, 0 ended, 0 trained",
        "client  c3: 3 running, 0 ended, 0 trained",
        "client  c2: 2 running, 0 ended, 0 trained",
        "client  c1: 1 running, 0 ended, 0 trained",
        "        and 2 more clients",
        "idle    episode 89abcdef of c1 for 80 of 100 s",
        "replica a:2 is set aside, 4 failed calls",
        "bad     2 episodes: N token ids",
        "drop    5 episodes: stale",
        "DISK    3 records wait for the disk: disk full",
        "log     vllm: hello",
    ]
    assert len(status_lines(ServerStatus(engine=engine))) == 1


def test_a_clients_name_commands_no_terminal() -> None:
    engine = EngineStatus(engine_status=EngineState.ROLLING, engine_status_detail="", global_step=4)
    status = ServerStatus(
        engine=engine,
        clients=[ClientRow(client_uuid="\x1b]0;owned\x07\r\n\u202e", active=True, idle_seconds=0.0)],
        dropped={"\x1b[2Jgone": 1},
    )
    text = "".join(status_lines(status))
    assert "owned" in text and "gone" in text
    assert text.isprintable()
