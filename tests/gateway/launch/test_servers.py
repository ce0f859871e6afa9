"""What ``up`` reads of a gateway's log: failures of its hooks while it runs, and why it died."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.cli.up import event_printer
from gateway.launch import servers
from gateway.launch.children import Child
from gateway.launch.disk import DiskWatch
from gateway.launch.plan import ServerPlan, UpPlan
from gateway.launch.servers import LastingProcess, Server, check_earlier, ended
from gateway.launch.watch import UpFailedError
from swarm.errors import ConfigError
from swarm.job import TrainJob
from tests.gateway.launch.test_up import server_plan
from tests.swarm.client.scripted import Answer, ScriptedServer
from tests.swarm.client.test_training import at

TEXT = "2026-01-02 03:04:05,678 {} gateway.stats: {}"
TOLD = "the hook fails: hook_result: on_compute_relative_reward returned 3 rewards for 8 candidates"
CLAUDE = TEXT.format("WARNING", "the job takes 512 tokens: too few for the first prompt of Claude Code (27,000)")


class Printed:
    """A child that has printed some lines; ``exit_code`` None: it runs."""

    def __init__(self, *lines: str, exit_code: int | None = None) -> None:
        self.name, self.log = "gateway", Path("gateway.log")
        self.lines, self.fresh, self.exit_code = list(lines), list(lines), exit_code

    def new_lines(self) -> list[str]:
        lines, self.fresh = self.fresh, []
        return lines

    def last_lines(self) -> list[str]:
        return self.lines

    def find(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, "\n".join(self.lines))

    def stop(self, grace: float) -> bool:
        self.exit_code = -15 if self.exit_code is None else self.exit_code
        return True


def watched(child: Printed) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    gateway = LastingProcess(lambda: cast(Child, child), lambda kind, values: events.append((kind, values)), 1.0)
    gateway.look()
    if child.exit_code is None:
        gateway.look()
    return events


@pytest.mark.parametrize(
    "line", [TEXT.format("ERROR", TOLD), json.dumps({"level": "error", "message": TOLD}), "{" + TOLD]
)
def test_the_first_failure_of_a_kind_is_told_in_the_terminal_once(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    again = TEXT.format("ERROR", TOLD.replace("fails:", "fails (10 times):"))
    [(kind, values)] = watched(Printed(CLAUDE, line, again))
    with event_printer(as_json=False) as on_event:
        on_event(kind, values)
    out = capsys.readouterr().out
    assert (
        "WARNING: the hook fails (hook_result): on_compute_relative_reward returned 3 rewards for 8 candidates\n" in out
    )
    assert "such groups are not trained" in out and "groups list --reason hook_failed" in out


def test_a_hook_of_sessions_that_fails_keeps_no_group_from_training(capsys: pytest.CaptureFixture[str]) -> None:
    told = "the hook fails: hook_raised: on_session_end raised KeyError (on_session_end.py, line 3)"
    [(kind, values)] = watched(Printed(TEXT.format("ERROR", told)))
    with event_printer(as_json=False) as on_event:
        on_event(kind, values)
    out = capsys.readouterr().out
    assert "WARNING: the hook fails (hook_raised): on_session_end raised KeyError" in out
    assert "such sessions earn nothing as a whole" in out and "not trained" not in out


@pytest.mark.parametrize("warning", [CLAUDE, json.dumps({"time": "t", "level": "warning", "message": "Claude Code"})])
def test_a_warning_is_not_shown_as_the_cause_of_a_death(warning: str) -> None:
    died = ended(cast(Child, Printed("Traceback (most recent call last):", "OSError: x", warning, exit_code=1)))
    assert died.message == "the gateway ended with exit code 1"
    assert died.last_lines == ["Traceback (most recent call last):", "OSError: x"]
    killed = ended(cast(Child, Printed(warning, exit_code=-9)))
    assert (killed.message, killed.last_lines) == ("the gateway was killed by SIGKILL", [])


def test_a_dead_gateway_says_what_killed_it() -> None:
    [(kind, values)] = watched(Printed(CLAUDE, exit_code=-9))
    assert (kind, values["reason"], values["last_lines"]) == (
        "gateway_restarting",
        "the gateway was killed by SIGKILL",
        [],
    )


def test_a_gateway_that_never_listens_again_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    events: list[tuple[str, dict[str, Any]]] = []
    children = [Printed(exit_code=-9), Printed(), Printed()]
    starts = iter(children)
    # nobody listens there
    gateway = LastingProcess(lambda: cast(Child, next(starts)), lambda kind, values: events.append((kind, values)), 1.0)
    for _ in range(100):
        gateway.look()
        now += 1.0
    assert [one.exit_code for one in children] == [-9, -15, None]
    told = [(kind, values.get("attempt")) for kind, values in events]
    assert told == [("gateway_restarting", 1), ("warning", None), ("gateway_restarting", 2)], events
    assert "has not listened for 60 s" in events[1][1]["message"]


@pytest.mark.parametrize(("blocks", "is_full"), [(0, False), (1000, True)])
def test_a_disk_without_a_limit_is_never_full(
    blocks: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_blocks=blocks, f_bavail=0, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    watch = DiskWatch(UpPlan((server_plan(tmp_path),), None), lambda *_: None)
    with pytest.raises(ConfigError, match="is full") if is_full else nullcontext():
        watch.check()


def test_one_error_of_the_swarm_server_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    broken = Answer({"error": {"message": "internal error"}}, 500)
    with ScriptedServer() as scripted:
        scripted.script("/status", broken, {}, at(0), broken)
        server = Server(server_plan(tmp_path), cast(Child, Printed()), lambda kind, values: states.append(kind), 1.0)
        server.connect(scripted.url, "", "up")
        for _ in range(3):
            server.look(restarts=True)
        assert "state" in states
        server.look(restarts=True)
        monkeypatch.setattr(servers, "START_DEADLINE", 0.0)
        with pytest.raises(UpFailedError, match="has given no answer for 0 s: /status: internal error"):
            server.look(restarts=True)
        # it looks twice a second, and the whole history is megabytes
        assert {request.query for request in scripted.requests} <= {"episodes=0&steps=0", "episodes=0&steps=100"}
        assert server.client is not None
        server.client.close()


def test_steps_are_asked_for_where_the_engine_has_changed(tmp_path: Path) -> None:
    told: list[str] = []
    done = {"steps": [{"step": 1, "batch_id": "b", "metrics": {}, "seconds": 1.0}]}
    with ScriptedServer() as scripted:
        scripted.script("/status", at(0, 7), at(0, 7), at(1, 8), at(1, 8) | done, at(1, 8))
        server = Server(server_plan(tmp_path), cast(Child, Printed()), lambda kind, values: told.append(kind), 1.0)
        server.connect(scripted.url, "", "up")
        for _ in range(4):
            server.look(restarts=True)
        steps = [request.query.partition("steps=")[2] for request in scripted.requests]
        assert server.client is not None
        server.client.close()
    assert steps == ["100", "0", "0", "100", "0"]
    assert told.count("step") == 1


@pytest.mark.parametrize("changed", [{"lora": {"rank": 8, "alpha": 32}}, {"n_gpu": 2}, {"nnodes": 2}])
def test_resume_refuses_a_job_that_its_checkpoint_does_not_go_with(tmp_path: Path, changed: dict[str, Any]) -> None:
    ran = TrainJob.model_validate({"model": "tiny", "lora": {"rank": 8}})
    plan = ServerPlan(TrainJob.model_validate(ran.model_dump() | changed), {}, tmp_path)
    [name] = changed
    with pytest.raises(ConfigError, match=rf"checkpoint goes on with the same job\.{name} only: --fresh begins anew"):
        check_earlier(plan, ran, 2, 2, changes_allowed=True)
    check_earlier(plan, ran, 2, 0, changes_allowed=True)
