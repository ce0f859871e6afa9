"""``swarm status`` as text: what the monitor's view shows, shortened."""

from __future__ import annotations

from gateway.cli.swarm import status_lines
from swarm.states import EngineState
from swarm.status import ClientRow, EngineStatus, LogEntry, ServerStatus
from swarm.types import StepResult


def test_a_dead_engine_shows_why_and_its_last_lines() -> None:
    engine = EngineStatus(engine_status=EngineState.OFFLINE, engine_status_detail="exit code 1", global_step=4)
    lines = status_lines(ServerStatus(engine=engine, last_lines=["boom"]))
    assert lines[0].startswith("○ OFFLINE for 0.0 s") and "policy version 4" in lines[0]
    assert "why    exit code 1" in lines and lines[-1] == "  | boom"


def test_the_busiest_clients_what_was_lost_and_the_latest_steps() -> None:
    clients = [ClientRow(client_uuid=f"c{n}", active=n < 6, idle_seconds=9, running=n) for n in range(7)]
    steps = [StepResult(step=n, batch_id=f"b{n}", metrics={}, seconds=1.0) for n in range(1, 10)]
    lines = status_lines(
        ServerStatus(
            engine=EngineStatus(engine_status=EngineState.ROLLING),
            clients=clients,
            steps=steps,
            dropped={"stale": 5},
            log=[LogEntry(timestamp=0, tag="vllm", message="hello")],
        )
    )
    assert [line.split()[0] for line in lines if line.startswith("c")] == ["client", "c5", "c4", "c3", "c2", "c1"]
    assert {"... and 2 more", "       5  stale", "vllm: hello"} <= set(lines)
    assert [line for line in lines if line.startswith("step")] == [f"step    {n}  1.0 s" for n in range(5, 10)]


def test_a_clients_name_commands_no_terminal() -> None:
    status = ServerStatus(
        engine=EngineStatus(engine_status=EngineState.ROLLING),
        clients=[ClientRow(client_uuid="\x1b]0;owned\x07\r\n\u202e", active=True, idle_seconds=0.0)],
        dropped={"\x1b[2Jgone": 1},
    )
    text = "".join(status_lines(status))
    assert "owned" in text and "gone" in text and text.isprintable()
