"""The event loop behind ``SwarmClient``: interrupts, forks, and clients that nobody closes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from swarm.client import EpisodeEndpoint, SwarmClient, ThrottleSchedule, auto_train_with_dataset
from swarm.client.portal import BlockingCall, in_thread
from swarm.errors import StateError
from swarm.types import Task, WorkflowOutput
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import Answer, ScriptedServer
from tests.swarm.client.test_idempotency import keys
from tests.swarm.client.test_sync import JOB, claimed, engine
from tests.swarm.client.test_watching import PATIENCE, ROLLING, SYNCING, Calls, at, loops

FORGETFUL = """
import sys
from swarm.client import SwarmClient, ThrottleSchedule
client = SwarmClient(sys.argv[1])
client.add_entering_weight_sync_callback(print)
print(client.get_global_step())
"""

FORKING = """
import os, signal, sys
from swarm.client import SwarmClient
client = SwarmClient(sys.argv[1])
client.get_global_step()
if (child := os.fork()) == 0:
    signal.alarm(30)
    print(client.get_global_step(), flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_where_ctrl_c_ends_no_wait_for_a_lock_a_call_looks_for_it(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def done(_: BlockingCall[object], within: float) -> bool:
        looks.append(within)
        if len(looks) > 1:
            raise KeyboardInterrupt
        return False

    server.script("/get_engine_status", engine(ROLLING))
    monkeypatch.setattr("swarm.client.portal._LOCKS_HOLD", True, raising=False)
    with SwarmClient(server.url, policy=QUICK) as client:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(BlockingCall, "done", done)
            with pytest.raises(KeyboardInterrupt):
                client.get_engine_status()
        assert client.get_engine_status()
    assert looks == [0.5, 0.5]


def test_ctrl_c_ends_a_claim_that_waits_and_withdraws_it(server: ScriptedServer) -> None:
    held = threading.Event()
    server.script("/claim_episode", Answer(claimed("late"), wait=held))
    server.script("/withdraw_claim", {"success": True})

    def interrupt() -> None:
        while not server.requests:
            threading.Event().wait(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    with SwarmClient(server.url, policy=QUICK) as client:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            client.begin_episode()
        interrupting.join()
        held.set()
    assert keys(server, "/withdraw_claim") == keys(server, "/claim_episode")


def test_a_forked_child_has_connections_of_its_own(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/get_engine_status", engine(ROLLING, step=3))
    assert client.get_global_step() == 3
    if (child := os.fork()) == 0:
        os._exit(0 if client.get_global_step() == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get_global_step() == 3


def test_a_forked_child_ends_as_any_process_does(server: ScriptedServer) -> None:
    server.script("/get_engine_status", engine(ROLLING, step=3))
    # of a fork beside a thread, as the portal is, Python 3.12 warns
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n0\n", "")


def test_threads_of_a_forked_child_share_its_connections(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/get_engine_status", engine(ROLLING, step=3))
    assert client.get_global_step() == 3
    if (child := os.fork()) == 0:
        together = threading.Barrier(8)

        def ask() -> None:
            together.wait(20)
            client.get_global_step()

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        os._exit(len(loops()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a loop outlives its client"


def test_an_episode_of_the_parent_is_refused_in_a_forked_child(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_episode", claimed("mine"))
    server.script("/end_episode", {"success": True})
    with client.episode() as episode:
        if (child := os.fork()) == 0:
            try:
                episode.end("task", WorkflowOutput(reward=1.0))
            except StateError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert episode.end("task", WorkflowOutput(reward=1.0)) == ""
    assert len(server.bodies("/end_episode")) == 1


def test_a_client_that_nobody_closes_is_closed_at_exit_without_a_word(server: ScriptedServer) -> None:
    server.script("/status", at(1, 0))
    server.script("/get_engine_status", engine(ROLLING, step=3))
    done = subprocess.run([sys.executable, "-c", FORGETFUL, server.url], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_a_client_that_is_collected_ends_its_loop(server: ScriptedServer) -> None:
    server.script("/status", at(1, 0))
    client = SwarmClient(server.url, policy=QUICK)
    client.add_entering_weight_sync_callback(lambda: None)
    [loop] = loops()
    del client
    gc.collect()
    loop.join(PATIENCE)
    assert loops() == []


def test_a_callback_may_use_the_client_and_its_exit_ends_nothing(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("/status", at(1, 0), at(2, 1, SYNCING), at(3, 2, SYNCING), at(3, 2))
    server.script("/get_engine_status", engine(ROLLING, step=3))
    steps: list[int] = []
    called = Calls()

    def leave() -> None:
        steps.append(client.get_global_step())
        called()
        raise SystemExit

    client.add_entering_weight_sync_callback(leave)
    assert called.reached(2)
    assert steps == [3, 3] and "SystemExit" in caplog.text
    assert client.get_global_step() == 3


def test_code_on_the_loop_cannot_wait_for_the_loop(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/get_engine_status", engine(ROLLING))
    with pytest.raises(StateError, match="own event loop"):
        client.begin_episode(throttle_policy=ThrottleSchedule(lambda _: client.get_global_step()))


def test_ctrl_c_waits_for_the_agents_that_run(server: ScriptedServer) -> None:
    server.script("/status", {**at(1, 0), "job": JOB.model_dump(mode="json"), "pool": {"whole_groups": False}})
    server.script("/claim_episode", claimed())
    for path in ("/end_episode", "/abort_episode", "/withdraw_claim"):
        server.script(path, {"success": True})
    finished: list[str] = []

    def agent(task: Task, _: EpisodeEndpoint) -> WorkflowOutput:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.1)  # the interrupt arrives meanwhile
        finished.append(task.task_id)
        return WorkflowOutput(reward=1.0)

    with SwarmClient(server.url, policy=QUICK) as client:
        with pytest.raises(KeyboardInterrupt):
            auto_train_with_dataset([Task(task_id="t")], client, agent, num_repeat=1, progress=False)
        assert finished == ["t"]


@pytest.mark.anyio
@pytest.mark.parametrize("abandon", [False, True])
async def test_a_cancelled_call_waits_for_its_thread_unless_it_may_be_abandoned(abandon: bool) -> None:
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    call = asyncio.create_task(in_thread(work, abandon=abandon)())
    assert await asyncio.to_thread(began.wait, PATIENCE)
    call.cancel()
    done, _ = await asyncio.wait([call], timeout=PATIENCE if abandon else 0.05)
    assert bool(done) is abandon
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
