import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.replay.bar import describe
from gateway.replay.run import ReplayConfig, ReplayProgress, failures_of, latency_of, replay
from gateway.replay.senders import Outcome
from swarm.client import AsyncSwarmClient, RetryPolicy
from swarm.data import epochs_of
from swarm.errors import ConfigError
from swarm.http.client import Answer, HttpClient
from swarm.types import Task

pytestmark = pytest.mark.anyio


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"question": "q{n}?"}}\n' for n in range(6)))
    return path


def config(data: Path, **fields: Any) -> ReplayConfig:
    return ReplayConfig(data=data, target="test", concurrency=2, **fields)


class Scripted:
    """Answers after giving others a turn; counts how many run at once."""

    def __init__(self, *failures: str) -> None:
        self.failures = list(failures)
        self.sent: list[str] = []
        self.running = self.most = 0
        #: whether requests end only once two run
        self.waits = False
        self.together = asyncio.Event()

    async def send(self, task: Task) -> Outcome:
        self.sent.append(task.main_query)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running > 1:
            self.together.set()
        try:
            await (self.together.wait() if self.waits else asyncio.sleep(0))
        finally:
            self.running -= 1
        failure = self.failures.pop(0) if self.failures else ""
        return Outcome(1.0, failure, reward=None if failure else 0.5, policy_version=len(self.sent) // 4)


class Hanging:
    def __init__(self) -> None:
        self.started, self.together = asyncio.Event(), asyncio.Event()

    async def send(self, task: Task) -> Outcome:
        if self.started.is_set():
            self.together.set()
        self.started.set()
        await asyncio.Event().wait()
        raise AssertionError


def swarm_with(*looks: int, asked: list[int] | None = None) -> AsyncSwarmClient:
    """A server that at each look has done so many steps; the last look repeats. ``asked`` gets how many of them are
    asked for."""
    queue = list(looks)

    class Looks(HttpClient):
        async def request(
            self,
            method: str,
            url: str,
            content: bytes | None,
            headers: Mapping[str, str],
            seconds: float | None = None,
        ) -> Answer:
            count = queue.pop(0) if len(queue) > 1 else queue[0]
            most = int(parse_qs(urlsplit(url).query)["steps"][0])
            if asked is not None:
                asked.append(most)
            steps = [
                {"step": n, "batch_id": "b", "seconds": 1.0, "metrics": {"swarm/reward_mean": n / 10}}
                for n in range(max(0, count - most) + 1, count + 1)
            ]
            answer = {"engine": {"engine_status": "ENGINE.ROLLING"}, "steps": steps}
            return Answer(200, {}, json.dumps(answer).encode())

    return AsyncSwarmClient("http://swarm", policy=RetryPolicy(attempts=1), http=Looks())


def test_a_reader_of_its_steps_that_is_gone_ends_no_replay() -> None:
    told = """
from gateway.replay.bar import replay_bar
from gateway.replay.run import ReplayProgress
from swarm.types import StepResult
with replay_bar() as show:
    for step in (1, 2):
        result = StepResult(step=step, batch_id="b", metrics={}, seconds=1.0)
        show(ReplayProgress(None, step=step, steps={step: result}))
    print("it went on")
"""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", told], stdout=subprocess.PIPE, stderr=writing, text=True)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "it went on\n")


async def test_every_prompt_is_sent_once_and_no_more_than_allowed_at_a_time(data: Path) -> None:
    sender = Scripted()
    sender.waits = True
    report = await replay(config(data), sender)
    assert sorted(sender.sent) == [f"q{n}?" for n in range(6)]
    assert sender.most == 2
    assert (report.requests, report.answered, report.failed, report.cancelled) == (6, 6, 0, 0)
    assert report.stopped_because == "all prompts sent"
    assert [(point.step, point.reward_mean) for point in report.steps] == [(1, 0.5), (2, 0.5)], "from the answers"


async def test_failures_are_counted_by_kind(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.replay.run._FAILURE_PAUSE", 0.0)
    report = await replay(config(data), Scripted("timeout", "HTTP 503", "timeout"))
    assert {kind: failure.count for kind, failure in report.failures.items()} == {"timeout": 2, "HTTP 503": 1}
    assert (report.answered, report.failed) == (3, 3)


async def test_requests_bound_an_endless_replay(data: Path) -> None:
    sender = Scripted()
    await replay(config(data, epochs=None, max_requests=15), sender)
    assert len(sender.sent) == 15


async def test_it_ends_when_its_steps_are_done_and_counts_what_it_cancels(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.replay.run._POLL", 0.01)
    async with swarm_with(2, 2, 3, 5) as swarm:
        report = await replay(config(data, epochs=None, steps=3), Hanging(), swarm)
    assert report.stopped_because == "step 5 is done"
    assert (report.requests, report.cancelled) == (2, 2)
    assert [point.step for point in report.steps] == [3, 4, 5], "those from before it began are not its own"


async def test_steps_from_before_it_began_are_not_its_own(data: Path) -> None:
    async with swarm_with(2, 2, 4) as swarm:
        report = await replay(config(data), Scripted(), swarm)
    assert [point.step for point in report.steps] == [3, 4]


async def test_a_look_at_a_long_run_asks_for_its_latest_steps(data: Path) -> None:
    asked: list[int] = []
    async with swarm_with(900, 900, 901, asked=asked) as swarm:
        report = await replay(config(data), Scripted(), swarm)
    assert [point.step for point in report.steps] == [901]
    assert max(asked) < 10, "a thousand of them are megabytes, each second"


async def test_no_step_is_missed_between_two_looks(data: Path) -> None:
    async with swarm_with(900, 920) as swarm:
        report = await replay(config(data), Scripted(), swarm)
    assert [point.step for point in report.steps] == list(range(901, 921))


async def test_hope_ends_when_all_requests_fail(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.replay.run._FAILURE_PAUSE", 0.0)
    sender = Scripted(*["connection"] * 1000)
    report = await replay(config(data, epochs=None, max_requests=1000, max_failures_in_a_row=5), sender)
    assert report.stopped_because == "the last 5 requests all failed, the latest with: connection"
    assert report.answered == 0


async def test_a_replay_that_failures_end_has_failed_whatever_was_answered_before(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.replay.run._FAILURE_PAUSE", 0.0)
    async with swarm_with(2) as swarm:
        sender = Scripted("", "", *["connection"] * 1000)
        report = await replay(config(data, epochs=None, steps=3, max_failures_in_a_row=5), sender, swarm)
    assert report.answered == 2
    assert report.exit_code == 1
    # one that goes on over single failures has not
    assert (await replay(config(data), Scripted("timeout"))).exit_code == 0
    assert (await replay(config(data), Scripted(*["timeout"] * 6))).exit_code == 1


async def test_the_time_limit_ends_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sender = asyncio.get_running_loop(), Hanging()
    replaying = asyncio.create_task(replay(config(data, time_limit=1000), sender))
    async with asyncio.timeout(30):
        await sender.together.wait()
    began = loop.time
    monkeypatch.setattr(loop, "time", lambda: began() + 1000)
    report = await replaying
    assert "time limit" in report.stopped_because
    assert (report.requests, report.cancelled) == (2, 2)


async def test_an_interrupt_still_gives_the_report(data: Path) -> None:
    sender = Hanging()
    task = asyncio.create_task(replay(config(data), sender))
    async with asyncio.timeout(30):
        await sender.started.wait()
    task.cancel()
    report = await task
    assert report.interrupted
    assert report.cancelled == report.requests > 0


async def test_progress_has_its_total_and_the_reward(data: Path) -> None:
    seen: list[tuple[int | None, int, float | None]] = []
    await replay(
        config(data, epochs=2),
        Scripted(),
        on_progress=lambda one: seen.append((one.total, len(one.outcomes), one.reward)),
    )
    assert seen[-1] == (None, 12, 0.5)


def test_a_replay_that_could_not_end_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="never end"):
        config(data, epochs=None)


def test_prompts_are_questions_or_messages(data: Path, tmp_path: Path) -> None:
    first = min(epochs_of(data, 0, 1), key=lambda task: task.main_query)
    assert (first.main_query, first.messages) == ("q0?", [{"role": "user", "content": "q0?"}])
    path = tmp_path / "messages.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(json.dumps({"messages": messages}))
    [task] = epochs_of(path, 0, 1)
    assert (task.main_query, task.messages) == ("u", messages)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no task"):
        list(epochs_of(path, 0, 1))


async def test_data_that_breaks_off_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "q?"}\n' * 2000 + "{\n")
    sender = Scripted()
    with pytest.raises(ConfigError, match=r"broken.jsonl, line 2001 is not valid JSON"):
        await replay(config(path), sender)
    assert sender.sent, "what is held of a stream is bounded, so prompts are sent before its end is read"


def test_each_epoch_has_every_prompt_in_an_order_that_the_seed_fixes(data: Path) -> None:
    first, same, other = ([task.main_query for task in islice(epochs_of(data, seed), 12)] for seed in (1, 1, 2))
    half = 6
    assert sorted(first[:half]) == sorted(first[half:]) == [f"q{n}?" for n in range(6)]
    assert first[:half] != first[half:] and first == same != other


def test_progress_says_on_how_many_answers_the_hook_failed() -> None:
    failed = Outcome(1.0, untrained="reward_hook_failed")
    assert describe(ReplayProgress(None, outcomes=[failed, Outcome(1.0)]), 1.0) == "the hook failed on 1"


def test_latency_is_of_answered_requests_by_nearest_rank() -> None:
    latency = latency_of([*(Outcome(float(n)) for n in range(1, 101)), Outcome(999.0, "timeout")])
    assert latency is not None
    assert (latency.p50, latency.p95) == (50.0, 95.0)
    assert latency_of([Outcome(99.0, "timeout")]) is None


def test_the_most_frequent_failure_comes_first_with_its_first_example() -> None:
    outcomes = [Outcome(1.0, "a", "x"), Outcome(1.0, "b", "first"), Outcome(1.0, "b", "second"), Outcome(1.0)]
    assert [(kind, one.count, one.example) for kind, one in failures_of(outcomes).items()] == [
        ("b", 2, "first"),
        ("a", 1, "x"),
    ]
