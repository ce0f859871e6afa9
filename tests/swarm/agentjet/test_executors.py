"""AgentJet's executors and retries: bounded submission, periodic drains, and that nothing begun is left open."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from swarm import client
from swarm.agentjet.client import SwarmClient, auto_train_with_dataset, run_episodes_until_all_complete
from swarm.agentjet.executors import (
    BoundedThreadPoolExecutor,
    PeriodicDrainThreadPoolExecutor,
    note_begun,
    note_over,
    retry_with_backoff,
)
from swarm.agentjet.schema import OpenaiBaseUrlAndApiKey, Task, WorkflowOutput
from swarm.protocol import NO_EPISODES
from tests.swarm.agentjet.test_conformance import run, served
from tests.swarm.client.scripted import ScriptedServer
from tests.swarm.client.test_sync import not_yet

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.wire.RetryPolicy.delay", lambda self, failures, retry_after=0.0: 0.0)


def test_a_submit_blocks_while_so_many_are_pending() -> None:
    release = threading.Event()
    with BoundedThreadPoolExecutor(max_workers=1, max_queue_size=2) as pool, ThreadPoolExecutor(1) as other:
        first = [pool.submit(release.wait, PATIENCE) for _ in range(2)]
        third = other.submit(pool.submit, release.wait, PATIENCE)
        assert not third.done()
        with pytest.raises(TimeoutError):
            third.result(0.05)
        release.set()
        assert third.result(PATIENCE).result(PATIENCE)
        assert all(one.result(PATIENCE) for one in first)


def test_a_shutdown_tells_submitters_that_wait() -> None:
    release = threading.Event()
    pool = BoundedThreadPoolExecutor(max_workers=1, max_queue_size=1)
    running = pool.submit(release.wait, PATIENCE)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pool.submit, release.wait, PATIENCE)
        pool.shutdown(wait=False)
        release.set()
        with pytest.raises(RuntimeError, match="after shutdown"):
            waiting.result(PATIENCE)
    assert running.result(PATIENCE)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(release.wait)


def square(task: int) -> int:
    return task**2


def test_a_drain_comes_before_the_next_submission_and_hands_out_what_was_returned() -> None:
    with PeriodicDrainThreadPoolExecutor[int](workers=4, max_parallel=2, auto_retry=True) as pool:
        # with keywords, as its users call it
        submitted = [pool.submit_with_periodic_drain(fn=square, task=number) for number in range(10)]
    assert [drained for _, drained in submitted] == [[], [], [], [], [0, 1, 4, 9], [], [], [], [16, 25, 36, 49], []]
    assert [future.result() for future, _ in submitted] == [number**2 for number in range(10)]


def test_the_first_run_may_block() -> None:
    with PeriodicDrainThreadPoolExecutor[int](workers=4, block_first_run=True) as pool:
        assert pool.submit(square, 3).done()


def test_a_call_that_fails_for_good_is_left_out_of_a_drain(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def fail(task: int) -> int:
        tries.append(task)
        if task == 1:
            raise ValueError("broken")
        return task

    with PeriodicDrainThreadPoolExecutor[int](workers=2) as pool:
        _, (failed, _), (_, drained) = (pool.submit_with_periodic_drain(fail, task) for task in range(3))
    assert isinstance(failed.exception(), ValueError)
    assert (sorted(tries), drained) == ([0, 1, 1, 1, 2], [0])
    assert "failed for good after 3 tries" in caplog.text


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a pool is told to end."""
    event, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    def told(self: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        # first, so that what is not to be begun is not
        shutdown(self, False, cancel_futures=cancel_futures)
        event.set()
        shutdown(self, wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", told)
    return event


def test_what_was_submitted_last_is_tried_again_as_well(ending: threading.Event) -> None:
    tries: list[int] = []

    def flaky() -> str:
        assert ending.wait(PATIENCE)
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("broken")
        return "done"

    with PeriodicDrainThreadPoolExecutor[str](workers=4) as pool:
        future, _ = pool.submit_with_periodic_drain(flaky)
    assert (future.result(0), len(tries)) == ("done", 3)


def test_after_an_interrupt_nothing_is_tried_again_or_begun(ending: threading.Event) -> None:
    began = threading.Event()
    tries: list[int] = []

    def broken() -> None:
        began.set()
        assert ending.wait(PATIENCE)
        tries.append(1)
        raise ValueError("broken")

    pool = PeriodicDrainThreadPoolExecutor[None](workers=4, max_parallel=1)
    with pytest.raises(KeyboardInterrupt), pool:
        for _ in range(4):
            pool.submit(broken)
        assert began.wait(PATIENCE)
        raise KeyboardInterrupt
    assert len(tries) == 1


def test_ctrl_c_ends_a_loop_over_tasks(ending: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()
    ran: list[int] = []

    def broken(task: int) -> None:
        began.set()
        assert ending.wait(PATIENCE)
        ran.append(task)
        raise ValueError("broken")

    def interrupted(futures: object) -> None:
        assert began.wait(PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr("swarm.agentjet.client.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_episodes_until_all_complete(range(100), broken, max_workers=1)
    assert ran == [0]


@pytest.mark.parametrize("where", ["loop", "block", "last drain"])
def test_ctrl_c_ends_the_wait_for_an_episode(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = partialmethod(client.SwarmClient.__init__, begin_timeout=5.0)
    monkeypatch.setattr(client.SwarmClient, "__init__", impatient)
    ended: list[type[BaseException]] = []

    def begin(_: int) -> None:
        try:
            ours.begin_episode()
        except BaseException as exc:
            ended.append(type(exc))
            raise

    def interrupt(_: object = None) -> None:
        while not server.bodies("/claim_episode"):
            threading.Event().wait(0.01)
        raise KeyboardInterrupt

    def interrupted(pool: ThreadPoolExecutor, wait: bool = True, **_: bool) -> None:
        monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
        interrupt()

    shutdown = ThreadPoolExecutor.shutdown
    with ScriptedServer() as server:
        server.script("/claim_episode", not_yet(NO_EPISODES))
        server.script("/withdraw_claim", {"success": True})
        ours = SwarmClient(server.url)
        with pytest.raises(KeyboardInterrupt):
            if where != "loop":
                with PeriodicDrainThreadPoolExecutor[Any](2) as pool:
                    pool.submit(begin, 1)
                    if where == "block":
                        interrupt()
                    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
            else:
                monkeypatch.setattr("swarm.agentjet.client.wait", interrupt)
                run_episodes_until_all_complete([1], begin, max_workers=1)
        ours.close()
    assert ended == [CancelledError]


@pytest.mark.parametrize("bounded", [False, True])
def test_what_a_call_begins_and_does_not_end_is_aborted(bounded: bool) -> None:
    aborted: list[str] = []

    def rollout(task: str) -> None:
        note_begun(f"{task} left", aborted.append)
        note_begun(f"{task} ended", aborted.append)
        note_over(f"{task} ended")

    pool = BoundedThreadPoolExecutor(2) if bounded else PeriodicDrainThreadPoolExecutor[None](2)
    with pool:
        for task in ("a", "b"):
            pool.submit(rollout, task)
    assert sorted(aborted) == ["a left", "b left"]


def test_outside_of_an_attempt_nothing_is_noted() -> None:
    note_begun("mine", pytest.fail)
    note_over("mine")


class Agent:
    tries = 4

    def __init__(self) -> None:
        self.calls: list[int] = []

    @retry_with_backoff(max_retry=2, max_retry_attr="tries")
    def by_attribute(self) -> None:
        self.calls.append(1)
        raise ValueError("broken")

    @retry_with_backoff(max_retry=3)
    def second_time(self) -> str:
        self.calls.append(1)
        if len(self.calls) < 2:
            raise ValueError("broken")
        return "done"


def test_a_function_is_tried_again() -> None:
    waited: list[int] = []

    @retry_with_backoff(max_retry=3, backoff_fn=lambda failures: waited.append(failures) or 0.0)
    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert waited == [0, 1]
    agent = Agent()
    with pytest.raises(ValueError, match="broken"):
        agent.by_attribute()
    assert len(agent.calls) == 4
    agent.calls.clear()
    assert (agent.second_time(), len(agent.calls)) == ("done", 2)


@pytest.mark.anyio
async def test_a_training_that_alone_makes_no_group_whole_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoTasks:
        def generate_training_tasks(self) -> list[Task]:
            return []

    def agent(task: Task, api: OpenaiBaseUrlAndApiKey) -> WorkflowOutput:
        raise AssertionError("there is no task")

    async with served(tmp_path) as swarm:
        await swarm.start()
        client = await run(SwarmClient, swarm.url)
        try:
            for local_grpo_n in (2, 1):
                assert "local_grpo_n" not in caplog.text
                await run(auto_train_with_dataset, NoTasks(), client, agent, local_grpo_n=local_grpo_n)
        finally:
            await run(client.close)
    assert "local_grpo_n is 1, and the job trains groups of 2 episodes" in caplog.text


@pytest.mark.anyio
async def test_a_task_whose_end_is_too_late_is_not_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[str] = []

    async with served(tmp_path) as swarm:
        await swarm.start()
        ours = await run(SwarmClient, swarm.url)

        def work(task_id: str) -> str:
            runs.append(task_id)
            episode_uuid, _ = ours.begin_episode(discard_episode_timeout=0.01)
            while ours.can_continue_episode(episode_uuid):
                pass
            ours.end_episode(Task(task_id=task_id), episode_uuid, WorkflowOutput(reward=1.0))
            return "done"

        try:
            assert await run(run_episodes_until_all_complete, ["a"], work) == ["done"]
        finally:
            await run(ours.close)
    assert runs == ["a"]
    assert "will not be trained" in caplog.text and "came too late" in caplog.text
