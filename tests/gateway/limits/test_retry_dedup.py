"""Who joins whom, and what becomes of work whose callers leave."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from adapters.dialects import LLMRequest
from gateway.limits import RetryDedup
from gateway.types import Caller, Decided, Incoming, Live, Outcome, Relayed
from swarm.errors import ConflictError, UnavailableError

pytestmark = pytest.mark.anyio
COUNT, KEY = "x-stainless-retry-count", "idempotency-key"


ROUTE = "route"


def request(text: str = "hello", caller: Caller = Caller(), **headers: str) -> Incoming:  # noqa: B008
    body = {"messages": [{"role": "user", "content": text}]}
    call = LLMRequest(None, body["messages"], 1, False, False, body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Incoming(call, named, caller, "/v1/chat/completions", text.encode(), "req")


def first(text: str = "hello", **headers: str) -> Incoming:
    return request(text, **{COUNT: "0", **headers})


def retry(count: int = 1, text: str = "hello", **headers: str) -> Incoming:
    return request(text, **{COUNT: str(count), **headers})


def decided(text: str) -> Decided:
    return Decided({"text": text})


def said(outcome: Outcome) -> str:
    assert isinstance(outcome, Decided)
    return outcome.completion["text"]


async def taken(asking: Awaitable[Outcome]) -> str:
    """What the outcome says, delivered."""
    outcome = await asking
    if outcome.close is not None:
        await outcome.close()
    await settled()
    return said(outcome)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Produces outcomes ``0``, ``1``, ... when told to; counts what began and what was cancelled."""

    def __init__(self) -> None:
        self.began = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self.gone = asyncio.Event()
        self.fails: Exception | None = None

    async def __call__(self) -> Outcome:
        number = self.began
        self.began += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.gone.set()
            raise
        if self.fails is not None:
            raise self.fails
        return decided(str(number))


class Chunk(dict[str, Any]):
    """Something that a weak reference can point to."""


class Streaming(Work):
    """Produces streams of ``parts``; ``sent`` lets the parts after the first go."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.parts = parts
        self.sent = asyncio.Event()
        self.closed = 0
        self.read = 0
        self.chunks: list[weakref.ref[Chunk]] = []

    async def __call__(self) -> Outcome:
        self.began += 1
        return Live(self._chunks(), {"x": "y"}, self._close)

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        try:
            for number in range(self.parts):
                self.read += 1
                chunk = Chunk(n=number)
                self.chunks.append(weakref.ref(chunk))
                yield chunk
                del chunk
                await self.sent.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _close(self) -> None:
        self.closed += 1


@pytest.fixture
async def retries() -> AsyncIterator[RetryDedup]:
    async with RetryDedup() as retries:
        yield retries
    assert len(retries) == 0


def asking(retries: RetryDedup, incoming: Incoming, work: Callable[[], Awaitable[Outcome]]) -> asyncio.Task[Outcome]:
    return asyncio.create_task(retries.run(incoming, ROUTE, work))


@pytest.mark.parametrize("name", ["x_session_id", "x_claude_code_agent_id", "thread_id", "x_swarm_session"])
async def test_a_retry_joins_nothing_of_another_session_or_agent(retries: RetryDedup, name: str) -> None:
    work = Work()
    work.go.set()
    assert await taken(asking(retries, first(**{name: "one"}), work)) == "0"
    assert await taken(asking(retries, retry(**{name: "two"}), work)) == "1"
    assert await taken(asking(retries, retry(**{name: "one"}), work)) == "0"


@pytest.mark.parametrize("count", ["1", "10", "1" * 5000])
async def test_a_retry_in_flight_gets_the_same_outcome(retries: RetryDedup, count: str) -> None:
    work = Work()
    asked = asking(retries, first(), work)
    await settled()
    again = asking(retries, request(**{COUNT: count}), work)
    await settled()
    work.go.set()
    assert [await taken(asked), await taken(again)] == ["0", "0"]
    assert (work.began, retries.joined, len(retries)) == (1, 1, 0)


@pytest.mark.parametrize(
    "other",
    [
        request(),
        first(),
        retry(text="other"),
        retry(caller=Caller("another")),
        retry(x_swarm_policy="first"),
    ],
    ids=["unmarked", "first attempt", "other body", "other key", "other policy"],
)
async def test_others_get_work_of_their_own(retries: RetryDedup, other: Incoming) -> None:
    work = Work()
    tasks = [asking(retries, first(), work), asking(retries, other, work)]
    await settled()
    assert work.began == 2
    work.go.set()
    assert {await taken(task) for task in tasks} == {"0", "1"}


async def test_an_error_reaches_all_who_wait_and_is_not_remembered(retries: RetryDedup) -> None:
    work = Work()
    work.fails = UnavailableError("boom")
    tasks = [asking(retries, first(), work), asking(retries, retry(), work)]
    await settled()
    work.go.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes == [work.fails] * 2 and work.began == 1
    work.fails = None
    assert await taken(retries.run(retry(2), ROUTE, work)) == "1"


async def test_an_error_that_is_passed_on_is_not_remembered(retries: RetryDedup) -> None:
    began = 0

    async def refuses() -> Outcome:
        nonlocal began
        began += 1
        return Relayed(429, {}, b"no")

    for attempt in range(3):
        outcome = await retries.run(retry(attempt), ROUTE, refuses)
        assert outcome.close is not None
        await outcome.close()
    assert began == 3


@pytest.mark.parametrize("passed_on", [False, True])
async def test_a_retry_after_an_error_joins_no_equal_request_beside_it(retries: RetryDedup, passed_on: bool) -> None:
    """Of several samples of one prompt some are refused: who asks for these again wants further ones."""
    refused, beside, again = Work(), Work(), Work()
    if passed_on:

        async def produce() -> Outcome:
            await refused.go.wait()
            return Relayed(429, {}, b"{}")
    else:
        refused.fails, produce = UnavailableError("slower"), refused
    asked = asyncio.create_task(retries.run(first(), ROUTE, produce))
    await settled()
    answered = asyncio.create_task(taken(retries.run(first(), ROUTE, beside)))
    await settled()
    refused.go.set()
    outcome = (await asyncio.gather(asked, return_exceptions=True))[0]
    if isinstance(outcome, Relayed) and outcome.close is not None:
        await outcome.close()
    await settled()
    beside.go.set()
    again.go.set()
    await answered
    await taken(retries.run(retry(), ROUTE, again))
    assert again.began == 1
    # an error is asked again once; a further retry is one of an answer that was lost
    await taken(retries.run(retry(), ROUTE, again))
    assert again.began == 1


async def test_an_error_that_nobody_repeats_is_forgotten(retries: RetryDedup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a 400, or those of an outage that an SDK gave up in: else later answers that were lost were made twice."""
    monkeypatch.setattr("gateway.limits._LATEST_RETRY", 0.0)
    work = Work()
    work.go.set()
    work.fails = UnavailableError("away")
    for _ in range(3):
        with pytest.raises(UnavailableError):
            await retries.run(first(), ROUTE, work)
        await settled()
    work.fails = None
    assert [await taken(retries.run(asked, ROUTE, work)) for asked in (first(), retry())] == ["3", "3"]


async def test_an_answer_lost_on_the_way_is_given_again(retries: RetryDedup) -> None:
    work = Work()
    work.go.set()
    assert [await taken(retries.run(asked, ROUTE, work)) for asked in (first(), retry())] == ["0", "0"]
    # who asks anew wants a new answer, and its retry that one
    assert [await taken(retries.run(asked, ROUTE, work)) for asked in (first(), retry())] == ["1", "1"]


async def test_what_was_answered_is_forgotten(retries: RetryDedup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.limits._REMEMBERED_SECONDS", 0.0)
    work = Work()
    work.go.set()
    await taken(retries.run(first(), ROUTE, work))
    await asyncio.sleep(0)
    assert await taken(retries.run(retry(), ROUTE, work)) == "1"


async def test_an_outcome_is_forgotten_when_its_time_is_over_and_no_other_request_comes(
    retries: RetryDedup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.limits._REMEMBERED_SECONDS", 0.01)
    work = Streaming()
    work.sent.set()
    outcome = await retries.run(first(), ROUTE, work)
    assert await everything(outcome) == [0, 1, 2]
    del outcome
    async with asyncio.timeout(20):
        while any(chunk() is not None for chunk in work.chunks):
            gc.collect()
            await asyncio.sleep(0.005)


async def test_the_memory_is_bounded(retries: RetryDedup) -> None:
    work = Work()
    work.go.set()
    for number in range(300):
        await taken(retries.run(first(str(number)), ROUTE, work))
    recent = await taken(retries.run(retry(text="299"), ROUTE, work))
    forgotten = await taken(retries.run(retry(text="0"), ROUTE, work))
    assert (recent, forgotten) == ("299", "300")


async def test_an_idempotency_key_names_one_request(retries: RetryDedup) -> None:
    work = Work()
    tasks = [asking(retries, request(**{KEY: "k"}), work) for _ in range(3)]
    await settled()
    work.go.set()
    assert [await taken(task) for task in tasks] == ["0", "0", "0"]
    assert await taken(retries.run(request(**{KEY: "k"}), ROUTE, work)) == "0"
    with pytest.raises(ConflictError, match="idempotency-key"):
        await retries.run(request("other", **{KEY: "k"}), ROUTE, work)
    assert await taken(retries.run(request("other", Caller("another"), **{KEY: "k"}), ROUTE, work)) == "1"


async def test_one_leaving_does_not_cancel_the_others_and_the_last_one_does(retries: RetryDedup) -> None:
    work = Work()
    asked, again = asking(retries, first(), work), asking(retries, retry(), work)
    await settled()
    asked.cancel()
    await settled()
    assert not work.cancelled
    again.cancel()
    await settled()
    assert work.cancelled == 1 and len(retries) == 0
    # neither was answered, so each may ask again, and both come into one
    work.go.set()
    assert await taken(retries.run(retry(2), ROUTE, work)) == "1"


async def test_work_with_a_key_whose_caller_left_waits_for_the_retry(retries: RetryDedup) -> None:
    work = Work()
    asked = asking(retries, request(**{KEY: "k"}), work)
    await settled()
    asked.cancel()
    await settled()
    assert not work.cancelled
    again = asking(retries, request(**{KEY: "k"}), work)
    await settled()
    work.go.set()
    assert (await taken(again), work.began) == ("0", 1)


async def test_work_with_a_key_for_which_nobody_comes_back_is_cancelled(
    retries: RetryDedup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.limits._KEYED_GRACE", 0.0)
    work = Work()
    asked = asking(retries, request(**{KEY: "k"}), work)
    await settled()
    asked.cancel()
    async with asyncio.timeout(20):
        await work.gone.wait()


async def test_what_is_whole_is_held_until_the_last_has_it(retries: RetryDedup) -> None:
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    async def work() -> Outcome:
        return Decided({"text": "0"}, close=close)

    one, two = await retries.run(first(), ROUTE, work), await retries.run(retry(), ROUTE, work)
    assert one.close is not None and two.close is not None
    await one.close()
    await one.close()
    await settled()
    assert not closed
    await two.close()
    await settled()
    assert closed == [True] and len(retries) == 0


async def everything(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, Live) and outcome.close is not None
    try:
        return [chunk["n"] async for chunk in outcome.chunks]
    finally:
        await outcome.close()


async def test_a_stream_is_followed_from_its_beginning(retries: RetryDedup) -> None:
    work = Streaming()
    one = await retries.run(first(), ROUTE, work)
    assert isinstance(one, Live) and one.headers == {"x": "y"}
    assert await anext(one.chunks) == {"n": 0}
    two = await retries.run(retry(), ROUTE, work)
    work.sent.set()
    rest, whole = await asyncio.gather(everything(one), everything(two))
    assert (rest, whole, work.began, work.closed) == ([1, 2], [0, 1, 2], 1, 1)
    assert await everything(await retries.run(retry(2), ROUTE, work)) == [0, 1, 2]
    assert work.began == 1


@pytest.mark.parametrize(("parts", "began"), [(3, 1), (4, 2)])
async def test_a_long_stream_goes_on_but_is_not_joined(
    retries: RetryDedup, monkeypatch: pytest.MonkeyPatch, parts: int, began: int
) -> None:
    monkeypatch.setattr("gateway.limits._MOST_PARTS", 4)
    work = Streaming(parts)
    work.sent.set()
    for asked in (first(), retry()):
        assert await everything(await retries.run(asked, ROUTE, work)) == list(range(parts))
    assert work.began == began


async def test_a_stream_that_grows_too_long_is_joined_no_more_while_it_runs(
    retries: RetryDedup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.limits._MOST_PARTS", 1)
    work = Streaming()
    one = await retries.run(first(), ROUTE, work)
    assert isinstance(one, Live) and await anext(one.chunks) == {"n": 0}
    two = await retries.run(retry(), ROUTE, work)
    work.sent.set()
    assert await everything(one) == [1, 2]
    assert (await everything(two), work.began) == ([0, 1, 2], 2)


async def test_the_last_to_leave_a_stream_cancels_it(retries: RetryDedup) -> None:
    work = Streaming()
    one = await retries.run(first(), ROUTE, work)
    two = await retries.run(retry(), ROUTE, work)
    assert isinstance(one, Live) and isinstance(two, Live) and one.close is not None and two.close is not None
    await anext(two.chunks)
    await one.close()
    await one.close()
    await settled()
    assert not work.cancelled
    await two.close()
    await settled()
    assert (work.cancelled, work.closed, len(retries)) == (1, 1, 0)


async def test_a_stream_that_nobody_fetched_is_closed(retries: RetryDedup) -> None:
    work = Streaming()
    asked = asking(retries, first(), work)
    # the work has its outcome, and its caller is not yet told
    for _ in range(2):
        await asyncio.sleep(0)
    assert work.read and not asked.done()
    asked.cancel()
    await settled()
    assert (work.closed, len(retries)) == (1, 0)


async def test_a_streams_error_reaches_all_after_what_came_before(retries: RetryDedup) -> None:
    async def breaks() -> AsyncIterator[dict[str, Any]]:
        yield {"n": 0}
        raise UnavailableError("boom")

    async def work() -> Outcome:
        return Live(breaks())

    for attempt in range(2):
        outcome = await retries.run(retry(attempt), ROUTE, work)
        assert isinstance(outcome, Live)
        assert await anext(outcome.chunks) == {"n": 0}
        with pytest.raises(UnavailableError, match="boom"):
            await anext(outcome.chunks)
        assert outcome.close is not None
        await outcome.close()


async def test_an_upstreams_stream_is_followed_too(retries: RetryDedup) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    async def work() -> Outcome:
        return Relayed(200, {}, parts())

    for attempt in range(2):
        outcome = await retries.run(retry(attempt), ROUTE, work)
        assert isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes) and outcome.close is not None
        assert [part async for part in outcome.body] == [b"a", b"b"]
        await outcome.close()


async def test_what_is_under_way_at_the_end_is_cancelled_and_says_so() -> None:
    work, stream = Work(), Streaming()
    async with RetryDedup() as retries:
        asked = asking(retries, first(), work)
        followed = await retries.run(first("stream"), ROUTE, stream)
        await settled()
    with pytest.raises(UnavailableError, match="stops"):
        await asked
    assert isinstance(followed, Live)
    assert await anext(followed.chunks) == {"n": 0}
    with pytest.raises(UnavailableError, match="stops"):
        await anext(followed.chunks)
    assert (work.cancelled, stream.closed) == (1, 1)
