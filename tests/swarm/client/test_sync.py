"""``SwarmClient`` over real sockets: retries, aborts, waiting, and the engine's states."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from swarm.client import RetryPolicy, SwarmClient
from swarm.errors import (
    AuthenticationError,
    ConflictError,
    EngineError,
    NotFoundError,
    RequestError,
    StateError,
    UnavailableError,
)
from swarm.job import TrainJob, parse_job
from swarm.protocol import NO_EPISODES, SYNCING
from swarm.states import EngineState
from swarm.types import Task, WorkflowOutput
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer

TASK = Task(task_id="t")
OUTPUT = WorkflowOutput(reward=0.5)
JOB = TrainJob(model="tiny", batch_size=4)


def claimed(uuid: str = "e1") -> dict[str, Any]:
    return {
        "success": True,
        "client_uuid": "me",
        "episode_uuid": uuid,
        "openai_base_url": f"http://10.9.8.7:1/episodes/{uuid}/v1",
        "openai_api_key": "key",
    }


def not_yet(cause: str) -> dict[str, Any]:
    return {"success": False, "client_uuid": "me", "fail_cause": cause}


def engine(state: EngineState, detail: str = "", step: int = 0) -> dict[str, Any]:
    return {"engine_status": state, "engine_status_detail": detail, "global_step": step}


def status(state: EngineState, job: TrainJob | None = None, **fields: Any) -> dict[str, Any]:
    return {"engine": engine(state, "because"), "job": job.model_dump(mode="json") if job else None, **fields}


# -- episodes


def test_begin_claims_and_rewrites_the_host(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_episode", claimed())
    uuid, api = client.begin_episode(discard_episode_timeout=60, episode_type="eval", throttle_policy={"ratio": 2})
    assert (uuid, api.episode_uuid, api.api_key) == ("e1", "e1", "key")
    assert api.base_url == f"{server.url}/episodes/e1/v1"
    [body] = server.bodies("/claim_episode")
    assert body["wait_seconds"] > 0
    assert {key: body[key] for key in ("client_uuid", "episode_type", "discard_episode_timeout")} == {
        "client_uuid": "me",
        "episode_type": "eval",
        "discard_episode_timeout": 60,
    }
    assert body["throttle_policy"]["ratio"] == 2
    assert body["max_episode_seconds"] == 8 * 60


def test_begin_waits_through_refusals_and_failures(server: ScriptedServer, client: SwarmClient) -> None:
    server.script(
        "/claim_episode",
        not_yet(SYNCING),
        DROP,
        Answer({}, 503),
        not_yet(NO_EPISODES),
        not_yet("Engine is booting"),
        claimed(),
    )
    server.script("/get_engine_status", engine(EngineState.BOOTING))
    assert client.begin_episode()[0] == "e1"
    assert len(server.bodies("/claim_episode")) == 6


def test_what_many_claims_wait_for_is_logged_once(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="swarm.client")
    server.script("/claim_episode", not_yet(NO_EPISODES))
    with SwarmClient(server.url, begin_timeout=0.01, policy=QUICK) as client:
        for _ in range(3):
            with pytest.raises(UnavailableError):
                client.begin_episode()
    assert caplog.text.count("waiting for episodes") == 1


def test_begin_ends_at_its_bound(server: ScriptedServer) -> None:
    server.script("/claim_episode", not_yet(NO_EPISODES))
    with (
        SwarmClient(server.url, begin_timeout=0.05, policy=QUICK) as client,
        pytest.raises(UnavailableError, match=r"could not claim an episode within 0.05 s: No available") as caught,
    ):
        client.begin_episode()
    assert caught.value.code == "no_episodes"


def test_begin_does_not_wait_for_an_offline_engine(
    server: ScriptedServer, client: SwarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.client.calls.OFFLINE_GRACE", 0.0)
    server.script("/claim_episode", not_yet("Engine is offline (crashed)"))
    server.script("/get_engine_status", engine(EngineState.OFFLINE))
    with pytest.raises(UnavailableError, match="crashed") as caught:
        client.begin_episode()
    assert caught.value.code == "engine_offline"


def test_an_end_whose_reply_is_lost_is_repeated_as_it_was(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/end_episode", DROP, Answer({}, 502), {"success": True})
    assert client.end_episode(TASK, "e1", OUTPUT) == ""
    first, *others = server.bodies("/end_episode")
    assert first["workflow_output"]["reward"] == 0.5
    assert others == [first, first]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer({"error": {"message": "gone"}}, 404), NotFoundError),
        (Answer({"error": {"message": "too late"}}, 409), ConflictError),
        (Answer({"error": {"message": "no"}}, 503, {"x-should-retry": "false"}), UnavailableError),
        (Answer({"success": False, "error": "no"}), ConflictError),
    ],
)
def test_a_refused_end_is_not_repeated(
    server: ScriptedServer, client: SwarmClient, answer: Answer, kind: type[Exception]
) -> None:
    server.script("/end_episode", answer)
    with pytest.raises(kind):
        client.end_episode(TASK, "e1", OUTPUT)
    assert len(server.requests) == 1


def test_retries_are_bounded(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/end_episode", DROP)
    with pytest.raises(UnavailableError, match=r"no swarm server answers at .* \(5 tries .*swarm start"):
        client.end_episode(TASK, "e1", OUTPUT)
    assert len(server.requests) == 5


def test_behind_a_gateway_it_is_the_gateway_that_is_away_or_wants_a_key(server: ScriptedServer) -> None:
    with SwarmClient(f"{server.url}/admin?route=chat", policy=QUICK) as client:
        server.script("/admin/policies", DROP)
        with pytest.raises(UnavailableError, match=rf"no gateway answers at {server.url} \(5 tries .*-gateway serve`"):
            client.policies()
        server.script("/admin/policies", Answer({"error": {"message": "wrong or missing API key"}}, 401))
        with pytest.raises(AuthenticationError, match=r"API key; pass an admin key .*--api-key or SWARM_GATEWAY_KEY"):
            client.policies()


def test_retry_after_beyond_the_bound_is_not_waited_for(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/end_episode", Answer({"error": {"message": "later"}}, 503, {"retry-after": "3600"}))
    with pytest.raises(UnavailableError, match="later") as caught:
        client.end_episode(TASK, "e1", OUTPUT)
    assert caught.value.retry_after == 3600
    assert len(server.requests) == 1


def test_the_token_is_sent_and_a_wrong_one_told(
    server: ScriptedServer, client: SwarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script("/get_engine_status", Answer({"error": {"message": "wrong key"}}, 401), engine(EngineState.ROLLING))
    with pytest.raises(AuthenticationError, match="SWARM_TOKEN"):
        client.get_engine_status()
    monkeypatch.setenv("SWARM_TOKEN", "secret")
    with SwarmClient(server.url) as other:
        other.get_engine_status()
    assert [one.headers.get("authorization") for one in server.requests] == [None, "Bearer secret"]


# -- the context manager


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_episode_that_fails_is_aborted(server: ScriptedServer, client: SwarmClient, error: BaseException) -> None:
    server.script("/claim_episode", claimed())
    server.script("/abort_episode", {"success": True})
    with pytest.raises(type(error)), client.episode():
        raise error
    [aborted] = server.bodies("/abort_episode")
    assert (aborted["client_uuid"], aborted["episode_uuid"]) == ("me", "e1")


# -- many episodes


def test_runs_use_at_most_max_workers(client: SwarmClient) -> None:
    running: list[int] = []
    barrier = threading.Barrier(3, timeout=30)

    def func(_: int) -> int:
        running.append(1)
        barrier.wait()  # opens only when three run at once
        most = len(running)
        barrier.wait()
        running.pop()
        return most

    assert client.run_episodes_until_all_complete(range(6), func, max_workers=3) == [3] * 6


@pytest.mark.parametrize(("auto_retry", "tries"), [(True, 3), (False, 1), (2, 2)])
def test_a_failing_task_is_tried_so_often_and_its_episodes_aborted(
    server: ScriptedServer, client: SwarmClient, auto_retry: bool | int, tries: int
) -> None:
    server.script("/claim_episode", *(claimed(f"e{number}") for number in range(9)))
    server.script("/abort_episode", {"success": True})

    def func(task: str) -> str:
        if task == "bad":
            client.begin_episode()
            raise ValueError("broken")
        return task

    results = client.run_episodes_until_all_complete(["good", "bad"], func, max_workers=1, auto_retry=auto_retry)
    assert results == ["good", None]
    assert [body["episode_uuid"] for body in server.bodies("/abort_episode")] == [f"e{n}" for n in range(tries)]


def test_forgotten_episodes_are_aborted_and_ended_ones_are_not(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_episode", claimed("kept"), claimed("forgotten"))
    server.script("/end_episode", {"success": True})
    server.script("/abort_episode", {"success": True})

    def func(task: str) -> None:
        uuid, _ = client.begin_episode()
        if task == "end":
            client.end_episode(TASK, uuid, OUTPUT)

    client.run_episodes_until_all_complete(["end", "forget"], func, max_workers=1)
    assert [body["episode_uuid"] for body in server.bodies("/abort_episode")] == ["forgotten"]


def test_all_tasks_failing_is_an_error(client: SwarmClient) -> None:
    def func(task: int) -> None:
        raise ValueError(task)

    with pytest.raises(ExceptionGroup, match="all 2 tasks failed") as caught:
        client.run_episodes_until_all_complete([1, 2], func, auto_retry=False)
    assert sorted(str(error) for error in caught.value.exceptions) == ["1", "2"]


def test_an_error_that_no_retry_helps_is_final(client: SwarmClient) -> None:
    tries: list[int] = []

    def func(task: int) -> None:
        tries.append(task)
        raise AuthenticationError("wrong key")

    with pytest.raises(ExceptionGroup):
        client.run_episodes_until_all_complete([1], func)
    assert tries == [1]


def test_a_broken_task_source_ends_the_run_and_an_exit_its_task(client: SwarmClient) -> None:
    def source() -> Any:
        yield 1
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        client.run_episodes_until_all_complete(source(), lambda task: task, max_workers=2)

    done: list[int] = []

    def leave(task: int) -> None:
        done.append(task)
        raise SystemExit(3)

    with pytest.raises(ExceptionGroup, match="all 2 tasks failed"):
        client.run_episodes_until_all_complete(range(2), leave, max_workers=1, auto_retry=False)
    assert done == [0, 1]


def test_an_end_of_the_run_ends_begins_that_wait(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    held = threading.Event()
    server.script("/claim_episode", not_yet(NO_EPISODES), Answer(claimed("late"), wait=held))
    server.script("/withdraw_claim", {"success": True})

    def func(_: int) -> None:
        client.begin_episode()

    with SwarmClient(server.url, policy=QUICK, begin_timeout=1000.0) as client, pytest.raises(KeyboardInterrupt):
        client.run_episodes_until_all_complete(interrupted_after(server, claims=2), func, max_workers=2)
    held.set()
    polled, [withdrawn] = server.bodies("/claim_episode"), server.bodies("/withdraw_claim")
    assert {body["idempotency_key"] for body in polled} == {withdrawn["idempotency_key"]}

    server.script("/claim_episode", not_yet(NO_EPISODES))
    server.requests.clear()
    slow = RetryPolicy(attempts=5, base=1000.0, cap=1000.0)
    with SwarmClient(server.url, policy=slow, begin_timeout=1000.0) as client, pytest.raises(KeyboardInterrupt):
        # waits between its polls, and would for minutes
        client.run_episodes_until_all_complete(interrupted_after(server, claims=1), func, max_workers=2)
    assert "never retrieved" not in caplog.text


def interrupted_after(server: ScriptedServer, claims: int) -> Iterator[int]:
    yield 1
    while len(server.bodies("/claim_episode")) < claims:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)


# -- engine


def test_an_offline_engine_is_started_with_the_job(server: ScriptedServer, client: SwarmClient) -> None:
    server.script(
        "/status",
        status(EngineState.OFFLINE),
        status(EngineState.BOOTING, boot_stage="loading"),
        status(EngineState.ROLLING),
    )
    server.script("/sync_train_config", {"success": True})
    server.script("/start_engine", {"success": True, "pid": 42})
    client.auto_sync_train_config_and_start_engine(JOB)
    paths = [one.path for one in server.requests]
    assert paths == ["/status", "/sync_train_config", "/start_engine", "/status", "/status"]
    [body] = server.bodies("/sync_train_config")
    assert parse_job(body["yaml_as_string"]) == JOB


@pytest.mark.parametrize("state", [EngineState.BOOTING, EngineState.WEIGHT_SYNCING, EngineState.ROLLING_POST])
def test_a_busy_engine_is_waited_for(server: ScriptedServer, client: SwarmClient, state: EngineState) -> None:
    server.script("/status", status(state, JOB), status(state, JOB), status(EngineState.ROLLING, JOB))
    client.auto_sync_train_config_and_start_engine(JOB)
    assert {one.path for one in server.requests} == {"/status"}


def test_a_rolling_engine_with_another_job_is_left_alone_unless_forced(
    server: ScriptedServer, client: SwarmClient
) -> None:
    other = JOB.model_copy(update={"lr": 1e-3, "seed": 9})
    server.script("/status", status(EngineState.ROLLING, other))
    with pytest.raises(ConflictError, match=r"differs in lr, seed.*force_restart=True"):
        client.auto_sync_train_config_and_start_engine(JOB)
    server.script(
        "/status", status(EngineState.ROLLING, other), status(EngineState.OFFLINE), status(EngineState.ROLLING, JOB)
    )
    for path in ("/stop_engine", "/sync_train_config", "/start_engine"):
        server.script(path, {"success": True})
    server.requests.clear()
    client.auto_sync_train_config_and_start_engine(JOB, force_restart=True)
    commands = [one.path for one in server.requests if one.path != "/status"]
    assert commands == ["/stop_engine", "/sync_train_config", "/start_engine"]


def test_two_clients_may_start_the_engine_at_once(server: ScriptedServer, client: SwarmClient) -> None:
    server.script(
        "/status", status(EngineState.OFFLINE), status(EngineState.BOOTING, JOB), status(EngineState.ROLLING, JOB)
    )
    server.script("/sync_train_config", Answer({"error": {"message": "not offline"}}, 409))
    client.auto_sync_train_config_and_start_engine(JOB)


def test_a_refused_job_is_told(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/status", status(EngineState.OFFLINE))
    server.script("/sync_train_config", Answer({"error": {"message": "no such model"}}, 400))
    with pytest.raises(RequestError, match="no such model"):
        client.auto_sync_train_config_and_start_engine(JOB)


def test_an_engine_that_dies_while_booting_shows_its_last_lines(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/status", status(EngineState.BOOTING), status(EngineState.OFFLINE, last_lines=["Traceback", "OOM"]))
    server.script("/start_engine", {"success": True, "pid": 1})
    with pytest.raises(EngineError, match="because\nTraceback\nOOM") as died:
        client.start_engine()
    assert died.value.code != "wrong_config"


def test_an_engine_that_dies_of_its_job_says_so(server: ScriptedServer, client: SwarmClient) -> None:
    failure = {"reason": "verl refuses it", "count": 1, "wrong_config": True}
    server.script("/status", status(EngineState.OFFLINE, engine_failure=failure))
    server.script("/start_engine", {"success": True, "pid": 1})
    with pytest.raises(EngineError) as died:
        client.start_engine()
    assert died.value.code == "wrong_config"


def test_a_start_whose_reply_is_lost_has_started_the_engine(server: ScriptedServer, client: SwarmClient) -> None:
    refused = Answer({"error": {"message": "it is booting"}}, 409)
    server.script("/start_engine", DROP, refused)
    server.script("/status", status(EngineState.BOOTING, engine_pid=42), status(EngineState.ROLLING))
    assert client.start_engine() == 42
    server.script("/start_engine", refused)
    with pytest.raises(ConflictError, match="it is booting"):
        client.start_engine()
    server.script("/start_engine", DROP, refused)
    server.script("/status", status(EngineState.OFFLINE))
    with pytest.raises(ConflictError, match="it is booting"):
        client.start_engine()


def test_another_job_that_came_between_is_told(server: ScriptedServer, client: SwarmClient) -> None:
    other = JOB.model_copy(update={"lr": 1e-3})
    server.script("/status", status(EngineState.OFFLINE), status(EngineState.ROLLING, other))
    server.script("/sync_train_config", {"success": True})
    server.script("/start_engine", {"success": True, "pid": 42})
    with pytest.raises(ConflictError, match="differs in lr"):
        client.auto_sync_train_config_and_start_engine(JOB)


def test_waiting_for_a_state_is_bounded(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/status", status(EngineState.BOOTING))
    with pytest.raises(UnavailableError, match=r"not ENGINE.ROLLING or ENGINE.OFFLINE after 0.05 s"):
        client.wait_for_state(EngineState.ROLLING, EngineState.OFFLINE, wait_seconds=0.05)


def test_a_boot_is_waited_for_while_the_line_is_down_for_seconds(server: ScriptedServer, client: SwarmClient) -> None:
    # more than one call tries, and a server that never answered is told at once
    server.script("/status", status(EngineState.BOOTING), *[DROP] * 12, status(EngineState.ROLLING))
    client.wait_for_state(EngineState.ROLLING, wait_seconds=5000.0)
    server.script("/status", DROP)
    with pytest.raises(UnavailableError, match="no swarm server answers"):
        client.wait_for_state(EngineState.ROLLING, wait_seconds=5000.0)


def test_a_server_that_stays_away_is_not_waited_for_longer_than_asked(
    server: ScriptedServer, client: SwarmClient
) -> None:
    server.script("/status", status(EngineState.BOOTING), DROP)
    with pytest.raises(UnavailableError, match="no swarm server answers"):
        client.wait_for_state(EngineState.ROLLING, wait_seconds=0.5)


def test_an_ended_episode_is_not_aborted(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_episode", claimed())
    server.script("/end_episode", {"success": True})
    with client.episode() as episode:
        assert episode.api_key == "key"
        episode.end(TASK, OUTPUT)
        with pytest.raises(StateError, match="ended already"):
            episode.end(TASK, OUTPUT)
    assert [one.path for one in server.requests] == ["/claim_episode", "/end_episode"]
