"""The queue of claims: repetitions get one grant, the held back are passed, and nothing is granted to nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.errors import ConflictError
from swarm.protocol import SwarmThrottlePolicy
from swarm.server.concurrency import ClientGoneError
from swarm.server.episodes import claims as claims_module
from swarm.server.episodes.claims import ClaimQueue, WaitingClaim
from swarm.server.episodes.episode import ClaimWish, Grant, Refusal
from swarm.server.episodes.pool import EpisodePool
from tests.swarm.server.episodes.test_pool import ends, rolling_pool, sample

pytestmark = pytest.mark.anyio

LONG = 20.0
KEYED = ClaimWish("me", claim_key="k")


@pytest.fixture
def pool() -> EpisodePool:
    return rolling_pool()


@pytest.fixture
def queue(pool: EpisodePool) -> ClaimQueue:
    return ClaimQueue(lambda: pool)


def granted(outcome: Grant | WaitingClaim | Refusal) -> Grant:
    assert isinstance(outcome, Grant), outcome
    return outcome


def waiting(outcome: Grant | WaitingClaim | Refusal) -> WaitingClaim:
    assert isinstance(outcome, WaitingClaim), outcome
    return outcome


def free(queue: ClaimQueue, pool: EpisodePool, grant: Grant, count: int = 1) -> None:
    for claim in grant.claims[:count]:
        pool.abort("me", claim.episode_uuid)
    queue.serve()


async def test_a_claim_that_can_be_granted_starts_no_task_and_no_timer(queue: ClaimQueue) -> None:
    loop = asyncio.get_running_loop()
    tasks, timers = len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]
    granted(queue.claim(KEYED, wait=True))
    assert (len(asyncio.all_tasks()), len(loop._scheduled)) == (tasks, timers)  # type: ignore[attr-defined]


async def test_a_repeated_claim_gets_the_first_grant(queue: ClaimQueue, pool: EpisodePool) -> None:
    first = granted(queue.claim(KEYED, wait=True))
    assert queue.claim(KEYED, wait=False) == first
    assert pool.running == 1
    assert granted(queue.claim(ClaimWish("another", claim_key="k"), wait=True)) != first
    with pytest.raises(ConflictError) as reused:
        queue.claim(ClaimWish("me", episodes=2, as_group=True, claim_key="k"), wait=True)
    assert reused.value.code == "idempotency_key_reused"
    sample(pool, first.claims[0])
    pool.end("me", "a", ends(first.claims[0]))
    over = granted(queue.claim(KEYED, wait=True))
    assert over.claims[0].episode_uuid == first.claims[0].episode_uuid


async def test_a_failed_claim_is_not_remembered(queue: ClaimQueue, pool: EpisodePool) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    assert isinstance(queue.claim(KEYED, wait=False), Refusal)
    free(queue, pool, full)
    granted(queue.claim(KEYED, wait=False))


async def test_a_repetition_joins_the_claim_that_waits(queue: ClaimQueue, pool: EpisodePool) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    first = waiting(queue.claim(KEYED, wait=True))
    again = waiting(queue.claim(KEYED, wait=True))
    assert first is again and len(queue) == 1
    with pytest.raises(ConflictError):
        queue.claim(ClaimWish("me", episodes=2, as_group=True, claim_key="k"), wait=True)
    works = [asyncio.create_task(queue.wait(one, LONG)) for one in (first, again)]
    await asyncio.sleep(0)
    works[0].cancel()
    free(queue, pool, full)
    grant = granted(await asyncio.wait_for(works[1], LONG))
    assert pool.running == 4
    assert queue.claim(KEYED, wait=True) == grant


async def test_a_claim_that_is_withdrawn_is_answered_and_lets_others_pass(queue: ClaimQueue, pool: EpisodePool) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    works = [asyncio.create_task(queue.wait(waiting(queue.claim(KEYED, wait=True)), LONG)) for _ in range(2)]
    behind = waiting(queue.claim(ClaimWish("behind"), wait=True))
    queue.withdraw("somebody else", "k")
    queue.withdraw("me", "k")
    assert [type(outcome) for outcome in await asyncio.gather(*works)] == [Refusal] * 2
    free(queue, pool, full)
    assert behind.granted.done()
    queue.withdraw("behind", "")
    assert pool.is_running(behind.granted.result().claims[0].episode_uuid), "a claim without a key has no name"


async def test_a_claim_that_its_withdrawal_overtakes_gets_nothing(queue: ClaimQueue, pool: EpisodePool) -> None:
    queue.withdraw("me", "k")
    for wait in (True, False):
        with pytest.raises(ConflictError) as refused:
            queue.claim(KEYED, wait=wait)
        assert refused.value.code == "claim_withdrawn"
    assert pool.running == 0
    granted(queue.claim(ClaimWish("another", claim_key="k"), wait=False))
    queue.withdraw("me", "")
    granted(queue.claim(ClaimWish("me"), wait=False))


async def test_withdrawals_are_remembered_for_a_while_and_not_without_end(
    queue: ClaimQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "MAX_KEYS", 2)
    for number in range(3):
        queue.withdraw("me", f"k{number}")
    granted(queue.claim(ClaimWish("me", claim_key="k0"), wait=False))
    for key in ("k1", "k2"):
        with pytest.raises(ConflictError):
            queue.claim(ClaimWish("me", claim_key=key), wait=False)
    queue.withdraw("me", "k1")
    queue.withdraw("me", "k3")
    granted(queue.claim(ClaimWish("me", claim_key="k2"), wait=False))
    with pytest.raises(ConflictError):
        queue.claim(ClaimWish("me", claim_key="k1"), wait=False)
    monkeypatch.setattr(claims_module, "KEY_SECONDS", 0.0)
    queue.withdraw("me", "k4")
    granted(queue.claim(ClaimWish("me", claim_key="k1"), wait=False))


async def test_what_a_claim_was_granted_ends_when_it_is_withdrawn(queue: ClaimQueue, pool: EpisodePool) -> None:
    grant = granted(queue.claim(KEYED, wait=False))
    behind = waiting(queue.claim(ClaimWish("behind", episodes=4), wait=True))
    queue.withdraw("somebody else", KEYED.claim_key)
    assert not behind.granted.done()
    queue.withdraw(KEYED.client_uuid, KEYED.claim_key)
    assert behind.granted.done() and pool.running == 4
    assert not any(pool.is_running(claim.episode_uuid) for claim in grant.claims)
    with pytest.raises(ConflictError):
        queue.claim(KEYED, wait=True)
    queue.withdraw(KEYED.client_uuid, KEYED.claim_key)
    assert pool.running == 4


async def test_a_grant_that_nobody_is_left_to_take_goes_back(queue: ClaimQueue, pool: EpisodePool) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    work = asyncio.create_task(queue.wait(waiting(queue.claim(KEYED, wait=True)), LONG, receive))
    behind = waiting(queue.claim(ClaimWish("behind"), wait=True))
    await asyncio.sleep(0)
    work.cancel()
    free(queue, pool, full)  # granted in the turn in which the caller leaves
    with pytest.raises(asyncio.CancelledError):
        await work
    assert behind.granted.done(), "those behind it get what went back"
    assert pool.running == 4
    assert waiting(queue.claim(KEYED, wait=True)).wish is KEYED, "the key is forgotten"

    gone.set()
    other = queue.claim(ClaimWish("me", claim_key="other"), wait=True)
    with pytest.raises(ClientGoneError):
        await queue.wait(waiting(other), LONG, receive)
    assert len(queue) == 1


async def test_a_throttled_claim_is_passed_until_its_share_allows_it(pool: EpisodePool, queue: ClaimQueue) -> None:
    pool.collection.seen("math", train=True)
    policy = SwarmThrottlePolicy(ratio=0.5, expected_batch_size=2, current_task_id="one")
    first = granted(queue.claim(ClaimWish("code", throttle=policy), wait=True))
    more = policy.model_copy(update={"current_task_id": "two"})
    held = waiting(queue.claim(ClaimWish("code", throttle=more), wait=True))
    assert "throttled" in held.reason
    granted(queue.claim(ClaimWish("code", throttle=policy), wait=True))  # the task was begun already
    granted(queue.claim(ClaimWish("math"), wait=True))
    assert not held.granted.done()
    for claim in first.claims:
        pool.abort("code", claim.episode_uuid)
    assert len(queue) == 1


async def test_a_group_is_not_starved_by_single_claims(pool: EpisodePool, queue: ClaimQueue) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    group = waiting(queue.claim(ClaimWish("me", episodes=2, as_group=True), wait=True))
    single = waiting(queue.claim(ClaimWish("me"), wait=True))
    free(queue, pool, full)
    assert isinstance(queue.claim(ClaimWish("me"), wait=False), Refusal)
    assert not group.granted.done() and not single.granted.done()
    free(queue, pool, full, 2)
    assert group.granted.done() and not single.granted.done()
    assert queue.longest_wait() >= 0


async def test_old_keys_are_forgotten(queue: ClaimQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "MAX_KEYS", 2)
    first, *_ = [granted(queue.claim(ClaimWish("me", claim_key=key), wait=False)) for key in "abc"]
    assert granted(queue.claim(ClaimWish("me", claim_key="a"), wait=False)) != first


async def test_claims_before_a_restart(queue: ClaimQueue) -> None:
    queue.restore({("me", "k"): ["an-episode"]})
    assert granted(queue.claim(KEYED, wait=True)).claims[0].episode_uuid == "an-episode"


async def test_a_closed_queue_lets_everyone_go(queue: ClaimQueue) -> None:
    granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    work = asyncio.create_task(queue.wait(waiting(queue.claim(KEYED, wait=True)), LONG))
    await asyncio.sleep(0)
    queue.close()
    assert isinstance(await asyncio.wait_for(work, LONG), Refusal)
    assert isinstance(queue.claim(KEYED, wait=True), Refusal)
