"""The hook runner: results are validated, and no failure of user code passes as anything but a HookError."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reward_hooks import (
    Candidate,
    HookContext,
    HookRunner,
    Hooks,
    PassThrough,
    Reward,
    Submission,
    Task,
    UserRequest,
    load_hooks,
)
from swarm.errors import HookError
from tests.reward_hooks.making import candidates

pytestmark = pytest.mark.anyio

TASK = Task(task_id="t", main_query="why?")
CONTEXT = HookContext(num_repeat=2, policy_version=3)
REQUEST = UserRequest(
    request_id="req_1", body={"model": "m", "messages": [{"role": "user", "content": "why?"}], "x": 1}
)
#: Long enough that only a bug waits for it.
LONG = 30.0


def scoring(hook: Callable[..., Any], timeout: float = LONG, **options: Any) -> HookRunner:
    return HookRunner(Hooks(hook, source="mine"), timeout, **options)


def shaping(hook: Callable[..., Any], timeout: float = LONG) -> HookRunner:
    return HookRunner(Hooks(lambda *_: [], submit=hook, source="mine"), timeout)


async def refused(runner: HookRunner) -> HookError:
    with pytest.raises(HookError) as caught:
        await runner.score(TASK, candidates("a", "b"), CONTEXT)
    return caught.value


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end of the test, so that a hook hanging on it lets its thread go."""
    event = threading.Event()
    yield event
    event.set()


# -- what works


async def test_sync_and_async_hooks_score() -> None:
    def lengths(task: Task, listed: list[Candidate], context: HookContext) -> list[float]:
        return [float(len(one.text)) for one in listed]

    async def later(task: Task, listed: list[Candidate], context: HookContext) -> list[float]:
        await asyncio.sleep(0)
        return lengths(task, listed, context)

    class Later:
        async def __call__(self, *args: Any) -> list[float]:
            assert threading.current_thread() is threading.main_thread()
            return lengths(*args)

    for hook in (lengths, later, lambda *args: later(*args), Later()):
        score = await scoring(hook).score(TASK, candidates("aaa", "b"), CONTEXT)
        assert (score.values, score.informative) == ([3.0, 1.0], True)


async def test_rewards_may_be_numbers_of_any_kind() -> None:
    numpy = pytest.importorskip("numpy")
    rich = Reward(value=0.5, components={"length": 2.0}, reason="so so")
    score = await scoring(lambda *_: (rich, True)).score(TASK, candidates("a", "b"), CONTEXT)
    assert score.rewards == [rich, Reward(value=1.0)]
    score = await scoring(lambda *_: list(numpy.array([0.5, 1], dtype="float32"))).score(
        TASK, candidates("a", "b"), CONTEXT
    )
    assert score.values == [0.5, 1.0]


async def test_a_hook_cannot_corrupt_its_arguments() -> None:
    def score(task: Task, listed: list[Candidate], context: HookContext) -> list[float]:
        listed[0].message["content"] = "hacked"
        assert listed[0].request is listed[1].request  # what is shared stays shared
        listed[0].request["messages"].append("hacked")
        task.metadata["x"].add(1)
        listed.reverse()
        return [1.0, 0.0]

    def submit(request: UserRequest, context: HookContext) -> list[dict[str, Any]]:
        request.body["messages"].clear()
        return [request.body, request.body]

    body: dict[str, Any] = {"messages": []}
    given = [one.model_copy(update={"request": body}) for one in candidates("a", "b")]
    task = Task(task_id="t", metadata={"x": set()})
    await scoring(score).score(task, given, CONTEXT)
    assert [one.text for one in given] == [one.message["content"] for one in given] == ["a", "b"]
    assert (body, task.metadata) == ({"messages": []}, {"x": set()})
    assert (await submitted(shaping(submit))).requests[0]["messages"] == []
    assert REQUEST.body["messages"] == [{"role": "user", "content": "why?"}]


async def test_sync_hooks_run_beside_the_event_loop_with_its_context() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    main = threading.get_ident()

    def hook(*_: Any) -> list[float]:
        assert threading.get_ident() != main
        return [variable.get(), 0.0]

    assert (await scoring(hook).score(TASK, candidates("a", "b"), CONTEXT)).values == [7.0, 0.0]


# -- shaping requests


async def submitted(hooks: HookRunner, request: UserRequest = REQUEST) -> Submission:
    submission = await hooks.submit(request, CONTEXT)
    assert isinstance(submission, Submission)
    return submission


async def test_without_a_hook_a_request_is_repeated_under_its_own_id() -> None:
    submission = await submitted(HookRunner(Hooks(lambda *_: [])))
    assert submission.requests == [REQUEST.body, REQUEST.body]
    assert submission.requests[0] is not submission.requests[1]
    assert submission.task == Task(task_id="req_1", main_query="why?", init_messages=REQUEST.body["messages"])


@pytest.mark.parametrize(
    ("messages", "query"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], "a"),
        ([{"role": "user", "content": "first"}, {"role": "user", "content": "last"}], "last"),
        ([{"role": "system", "content": "s"}], ""),
        ("not a list", ""),
        ([1, None], ""),
    ],
)
async def test_the_default_task_takes_any_body(messages: Any, query: str) -> None:
    request = UserRequest(request_id="r", body={"messages": messages})
    assert (await submitted(HookRunner(Hooks(lambda *_: [])), request)).task.main_query == query


async def test_a_hook_returns_bodies_or_a_submission_or_lets_the_request_pass() -> None:
    bodies: list[dict[str, Any]] = [{"messages": [], "seed": seed} for seed in range(2)]
    plain = await submitted(shaping(lambda *_: bodies))
    assert (plain.requests, plain.task.task_id) == (bodies, "req_1")
    full = await submitted(shaping(lambda *_: Submission(task=TASK, requests=bodies)))
    assert (full.requests, full.task) == (bodies, TASK)
    passing = PassThrough(name="title")
    assert await shaping(lambda *_: passing).submit(REQUEST, CONTEXT) == passing


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned a NoneType; return a list of request bodies, a Submission or a PassThrough"),
        ({"messages": []}, "returned a dict"),
        ([{}], "returned 1 requests; return 2 (context.num_repeat)"),
        ([{}, "no"], "returned a str as request 1"),
        ([{}, {"x": {1, 2}}], "returned request 1 that is not JSON"),
        ([{}, {"x": math.nan}], "returned request 1 that is not JSON"),
    ],
)
async def test_wrong_submissions_are_refused(result: Any, said: str) -> None:
    with pytest.raises(HookError) as caught:
        await shaping(lambda *_: result).submit(REQUEST, CONTEXT)
    assert said in caught.value.message
    assert caught.value.code == "hook_result"


# -- what a reward hook may return


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned a NoneType; return a list with one reward per candidate"),
        ("11", "returned a str; return a list"),
        ({0: 1.0, 1: 2.0}, "returned a dict"),
        (1.0, "returned a float"),
        ([], "returned 0 rewards for 2 candidates"),
        ([1.0], "returned 1 rewards for 2 candidates"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 candidates"),
        ([1.0, math.nan], "returned nan as reward 1"),
        ([math.inf, 1.0], "returned inf as reward 0"),
        ([1.0, "0.5"], "returned a str as reward 1"),
        ([1.0, None], "returned a NoneType as reward 1"),
        ([1.0, 1j], "returned a complex as reward 1"),
        ([1.0, 10**400], "too large"),
        ([1.0, Reward.model_construct(value=math.nan)], "returned nan as reward 1"),
        ([1.0, Reward.model_construct(value="high")], "returned a str as reward 1"),
        ([1.0, Reward.model_construct(value=1.0, components={"x": math.inf}, reason="")], "components"),
    ],
)
async def test_wrong_rewards_are_refused(result: Any, said: str) -> None:
    error = await refused(scoring(lambda *_: result))
    assert said in error.message
    assert error.message.startswith("mine: on_compute_relative_reward ")
    assert error.code == "hook_result"


# -- failures


class Exiting:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def sync(self, *_: Any) -> list[float]:
        raise self.error

    async def later(self, *_: Any) -> list[float]:
        await asyncio.sleep(0)
        raise self.error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    "error",
    [ValueError("broken"), SystemExit(1), KeyboardInterrupt(), Unprintable(), asyncio.CancelledError(), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["sync", "later"])
async def test_whatever_a_hook_raises_becomes_a_hook_error(kind: str, error: BaseException) -> None:
    refusal = await refused(scoring(getattr(Exiting(error), kind)))
    assert type(error).__name__ in refusal.message
    assert "test_runner.py, line " in refusal.message
    assert refusal.code == "hook_raised"


async def test_a_failure_keeps_its_message_beside_its_notes() -> None:
    def noted(*_: Any) -> list[float]:
        error = ValueError("broken")
        error.add_note("while it was read")
        raise error

    message = (await refused(scoring(noted))).message
    assert "raised ValueError: broken\nwhile it was read (test_runner.py, line " in message


async def test_of_several_failures_at_once_the_first_is_told_with_its_code() -> None:
    async def fail(error: Exception) -> None:
        raise error

    def failing(error: Exception) -> HookRunner:
        async def score(*_: Any) -> list[float]:
            async with asyncio.TaskGroup() as tasks, asyncio.TaskGroup() as inner:
                inner.create_task(fail(error))
                tasks.create_task(asyncio.Event().wait())
            return []

        return scoring(score)

    refusal = await refused(failing(KeyError("answer")))
    assert "raised KeyError: 'answer' (test_runner.py, line " in refusal.message
    refusal = await refused(failing(HookError("all is spent", code="judge_budget")))
    assert (refusal.code, refusal.message) == (
        "judge_budget",
        "mine: on_compute_relative_reward gives no result: all is spent",
    )


class Grading:
    def __call__(self, *_: Any) -> list[float]:
        return json.loads("no JSON")


@pytest.mark.parametrize("hook", [Grading(), partial(Grading(), 1), partial(partial(Grading().__call__), 1)])
async def test_the_line_of_a_failure_is_of_the_hooks_own_file(hook: Callable[..., Any]) -> None:
    assert "(test_runner.py, line " in (await refused(scoring(hook))).message


async def test_the_line_of_a_failure_in_a_file_beside_the_hook_is_of_that_file(tmp_path: Path) -> None:
    (tmp_path / "grading.py").write_text("import json\n\n\ndef grade(answer):\n    return json.loads(answer.text)\n")
    (tmp_path / "on_compute_relative_reward.py").write_text(
        "from grading import grade\n"
        "def on_compute_relative_reward(task, candidates, context):\n"
        "    return [grade(one) for one in candidates]\n"
    )
    assert "(grading.py, line 5)" in (await refused(HookRunner(load_hooks(tmp_path)))).message


async def test_a_hanging_sync_hook_is_given_up(released: threading.Event) -> None:
    error = await refused(scoring(lambda *_: released.wait(), timeout=0.05))
    assert error.message == "mine: on_compute_relative_reward took longer than 0.05 s"
    assert error.code == "hook_timeout"


async def test_a_hanging_async_hook_is_cancelled_at_the_smaller_deadline() -> None:
    cancelled = asyncio.Event()

    async def hang(*_: Any) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    assert (await refused(scoring(hang, timeout=0.05))).code == "hook_timeout"
    assert cancelled.is_set()
    context = HookContext(num_repeat=2, deadline_seconds=0.05)
    with pytest.raises(HookError, match=r"took longer than 0.05 s"):
        await scoring(hang).score(TASK, candidates("a", "b"), context)


async def test_async_hooks_that_ignore_their_cancellation_are_left_behind_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reward_hooks.runner.CANCEL_GRACE", 0.01)
    release = asyncio.Event()

    async def stubborn(*_: Any) -> list[float]:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return [1.0, 0.0]

    runner = scoring(stubborn, timeout=0.01, max_threads=1)
    assert (await refused(runner)).code == "hook_timeout"
    assert (await refused(runner)).code == "hook_busy"
    release.set()
    async with asyncio.timeout(LONG):
        while (await code_of_next(runner)) == "hook_busy":
            pass


async def code_of_next(runner: HookRunner) -> str | None:
    """Error code of one more call; lets the event loop run first, for a busy runner answers without waiting."""
    await asyncio.sleep(0)
    try:
        await runner.score(TASK, candidates("a", "b"), CONTEXT)
    except HookError as exc:
        return exc.code
    return None


async def test_hung_threads_are_bounded_and_come_back() -> None:
    release = threading.Event()
    hang = True

    def hook(*_: Any) -> list[float]:
        if hang:
            release.wait()
        return [1.0, 0.0]

    runner = scoring(hook, timeout=0.05, max_threads=2)
    before = set(threading.enumerate())
    for _ in range(2):
        assert (await refused(runner)).code == "hook_timeout"
    for _ in range(3):
        error = await refused(runner)
        assert error.code == "hook_busy"
        assert "all 2 hook threads" in error.message
    assert len(set(threading.enumerate()) - before) == 2, "idle threads of other tests may end meanwhile"
    hang = False
    release.set()
    async with asyncio.timeout(LONG):
        while (await code_of_next(runner)) is not None:
            pass


async def test_a_call_that_found_no_thread_in_time_did_not_take_that_long(released: threading.Event) -> None:
    def hook(*_: Any) -> list[float]:
        released.wait(LONG)
        return [1.0, 0.0]

    runner = scoring(hook, max_threads=1)
    first = asyncio.ensure_future(runner.score(TASK, candidates("a", "b"), CONTEXT))
    await asyncio.sleep(0)
    with pytest.raises(HookError, match=r"was not begun within 0\.05 s: 1 calls run at once") as caught:
        await runner.score(TASK, candidates("a", "b"), HookContext(num_repeat=2, deadline_seconds=0.05))
    assert caught.value.code == "hook_timeout"
    released.set()
    assert (await first).values == [1.0, 0.0]


async def test_more_calls_than_threads_take_turns() -> None:
    running = 0
    most = 0
    lock = threading.Lock()

    def hook(*_: Any) -> list[float]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1
        return [1.0, 0.0]

    runner = scoring(hook, max_threads=2)
    scores = await asyncio.gather(*(runner.score(TASK, candidates("a", "b"), CONTEXT) for _ in range(10)))
    assert len(scores) == 10
    assert most <= 2


async def test_a_caller_that_leaves_takes_its_async_hook_along() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(*_: Any) -> list[float]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    caller = asyncio.ensure_future(scoring(hang).score(TASK, candidates("a", "b"), CONTEXT))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    async with asyncio.timeout(LONG):
        await cancelled.wait()


async def test_callers_that_leave_do_not_count_as_hung_hooks(released: threading.Event) -> None:
    inside = threading.Semaphore(0)

    def hook(*_: Any) -> list[float]:
        inside.release()
        released.wait(LONG)
        return [1.0, 0.0]

    runner = scoring(hook, max_threads=1)
    caller = asyncio.ensure_future(runner.score(TASK, candidates("a", "b"), CONTEXT))
    await asyncio.to_thread(inside.acquire)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    waiting = asyncio.ensure_future(runner.score(TASK, candidates("a", "b"), CONTEXT))
    await asyncio.sleep(0)
    released.set()
    assert (await waiting).values == [1.0, 0.0]


async def test_arguments_too_deep_to_copy_are_a_hook_error() -> None:
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"deeper": nested}
    request = REQUEST.model_copy(update={"body": nested})
    with pytest.raises(HookError, match=r"mine: on_user_submit_new_requests cannot be given a copy.*Recursion") as e:
        await shaping(lambda *_: []).submit(request, CONTEXT)
    assert e.value.code == "hook_arguments"
    with pytest.raises(HookError) as caught:
        task = TASK.model_copy(update={"metadata": nested})
        await scoring(lambda *_: [0.0, 1.0]).score(task, candidates("a", "b"), CONTEXT)
    assert caught.value.code == "hook_arguments"
