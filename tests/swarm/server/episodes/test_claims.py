"""The queue of claims: repetitions get one grant, the held back are passed, and nothing is granted to nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.concurrency import ClientGoneError
from swarm.errors import ConflictError
from swarm.server.episodes import claims as claims_module
from swarm.server.episodes.claims import ClaimQueue, WaitingClaim
from swarm.server.episodes.episode import ClaimWish, Grant, Refusal
from swarm.server.episodes.pool import EpisodePool
from swarm.states import EngineStates, TrainerState, VllmState
from tests.swarm.server.episodes.test_pool import rolling_pool

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


async def test_a_failed_claim_is_not_remembered(queue: ClaimQueue, pool: EpisodePool) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    assert isinstance(queue.claim(KEYED, wait=False), Refusal)
    free(queue, pool, full)
    granted(queue.claim(KEYED, wait=False))


async def test_a_claim_that_its_withdrawal_overtakes_gets_nothing(queue: ClaimQueue, pool: EpisodePool) -> None:
    queue.withdraw("me", "k")
    for wait in (True, False):
        with pytest.raises(ConflictError) as refused:
            queue.claim(KEYED, wait=wait)
        assert refused.value.code == "claim_withdrawn"
    assert not pool.running
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
    assert len(pool.running) == 4
    assert waiting(queue.claim(KEYED, wait=True)).wish is KEYED, "the key is forgotten"

    gone.set()
    other = queue.claim(ClaimWish("me", claim_key="other"), wait=True)
    with pytest.raises(ClientGoneError):
        await queue.wait(waiting(other), LONG, receive)
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


async def test_a_group_keeps_its_place_between_the_polls_of_its_client(
    pool: EpisodePool, queue: ClaimQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "LONG_POLL", 0.01)
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    wish = ClaimWish("me", episodes=2, as_group=True, claim_key="k")
    group = waiting(queue.claim(wish, wait=True))
    single = waiting(queue.claim(ClaimWish("another"), wait=True))
    free(queue, pool, full)
    assert isinstance(await queue.wait(group, 0.01), Refusal)
    free(queue, pool, full, 2)
    assert not single.granted.done()
    assert isinstance(await queue.wait(waiting(queue.claim(wish, wait=True)), LONG), Grant)
    free(queue, pool, full, 3)
    assert single.granted.done()


async def test_a_group_that_gives_up_leaves_its_place(pool: EpisodePool, queue: ClaimQueue) -> None:
    full = granted(queue.claim(ClaimWish("me", episodes=4), wait=False))
    group = waiting(queue.claim(ClaimWish("me", episodes=2, as_group=True, claim_key="k"), wait=True))
    single = waiting(queue.claim(ClaimWish("another"), wait=True))
    # its client's last poll is shorter than the others
    assert isinstance(await queue.wait(group, 0.01), Refusal)
    free(queue, pool, full)
    assert single.granted.done()


async def test_old_keys_are_forgotten(queue: ClaimQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "MAX_KEYS", 2)
    first, *_ = [granted(queue.claim(ClaimWish("me", claim_key=key), wait=False)) for key in "abc"]
    assert granted(queue.claim(ClaimWish("me", claim_key="a"), wait=False)) != first


@pytest.mark.parametrize("while_closed", [False, True])
async def test_all_that_wait_are_answered_as_the_server_shuts_down(pool: EpisodePool, while_closed: bool) -> None:
    queue = ClaimQueue(lambda: pool)
    pool.follow(EngineStates(VllmState.PAUSED, TrainerState.COMPUTING))
    wish = ClaimWish("me", while_closed=while_closed)
    held = [waiting(queue.claim(wish, wait=True)) for _ in range(3)]
    asked = [asyncio.create_task(queue.wait(one, LONG)) for one in held]
    await asyncio.sleep(0)
    queue.close()
    # an episode that ends now lets nobody begin
    queue.serve()
    assert [isinstance(await one, Refusal) for one in asked] == [True] * 3
    assert not len(queue)
