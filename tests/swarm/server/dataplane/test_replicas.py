"""Where calls go: sticky, by prefix, bounded, around replicas that cannot be reached."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import anyio.lowlevel
import pytest

from swarm.errors import UnavailableError
from swarm.server.dataplane.replica_client import TransientError, UnreachableError
from swarm.server.dataplane.replicas import Placement, Replicas, prefix_of
from swarm.server.dataplane.suspects import Identity

pytestmark = pytest.mark.anyio

ADDRESSES = ["a:1", "b:2", "c:3", "d:4"]


class Owner:
    """Stands for an episode."""


class Health:
    """Answers every probe with ``good``."""

    def __init__(self) -> None:
        self.good = False
        self.probes: list[str] = []

    async def __call__(self, address: str) -> bool:
        self.probes.append(address)
        return self.good


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
async def replicas(health: Health, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Replicas]:
    monkeypatch.setattr("swarm.server.dataplane.replicas._FIRST_PAUSE", 0.001)
    monkeypatch.setattr("swarm.server.dataplane.replicas._LONGEST_PAUSE", 0.002)
    replicas = Replicas(health)
    yield replicas
    await replicas.close()


ANY = Identity("m", {"prompt": "any"})


def route(
    replicas: Replicas,
    owner: object,
    prefix: bytes = b"p",
    addresses: list[str] = ADDRESSES,
    identity: Identity = ANY,
) -> Placement:
    return Placement(replicas, [owner], prefix, lambda: addresses, identity)


async def used(route: Placement, samples: int = 1, error: Exception | None = None) -> str:
    """The address that a try of ``route`` goes to, and which fails with ``error``."""
    address = ""
    try:
        async with route.lease(samples) as base_url:
            address = base_url.removeprefix("http://")
            if error is not None:
                raise error
    except TransientError as exc:
        assert exc is error
    return address


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_prompts_that_begin_alike_share_a_replica_and_others_spread(replicas: Replicas) -> None:
    owners = [Owner() for _ in range(400)]
    places = [await used(route(replicas, owner, f"prompt {at % 200}".encode())) for at, owner in enumerate(owners)]
    assert places[:200] == places[200:]
    counts = Counter(places)
    assert set(counts) == set(ADDRESSES) and min(counts.values()) > 60


async def test_no_replica_is_placed_beyond_the_bound(replicas: Replicas) -> None:
    # all prompts begin alike, and all calls are in flight at once: the popular beginning overflows in its own order
    async with AsyncExitStack() as stack:
        for total in range(1, 101):
            await stack.enter_async_context(route(replicas, Owner()).lease(1))
            loads = [row.in_flight for row in replicas.rows()]
            assert sum(loads) == total
            # at most ceil(1.25 * mean), the paper's bound
            assert max(loads) <= -(-1.25 * total // 4)
        assert max(loads) == 32
    assert [row.in_flight for row in replicas.rows()] == [0] * 4


async def test_an_episode_stays_where_it_is_however_full(replicas: Replicas) -> None:
    owner = Owner()
    home = await used(route(replicas, owner))
    async with route(replicas, owner).lease(50):
        assert [await used(route(replicas, owner, b"other")) for _ in range(5)] == [home] * 5
        assert await used(route(replicas, Owner())) != home


async def test_members_of_a_group_share_its_home(replicas: Replicas) -> None:
    members = [Owner(), Owner(), Owner()]
    async with Placement(replicas, members, b"p", lambda: ADDRESSES, ANY).lease(3) as base_url:
        home = base_url.removeprefix("http://")
    assert {await used(route(replicas, member, b"q")) for member in members} == {home}


async def test_a_replica_that_cannot_be_reached_is_set_aside_until_it_answers(
    replicas: Replicas, health: Health
) -> None:
    owner = Owner()
    way = route(replicas, owner)
    home = await used(way, error=UnreachableError("refused"))
    assert [row.address for row in replicas.rows() if not row.healthy] == [home]
    second = await used(way)
    assert second != home
    assert await used(route(replicas, owner)) == second
    assert home not in {await used(route(replicas, Owner(), bytes([at]))) for at in range(64)}
    await until(lambda: len(health.probes) > 2)
    assert set(health.probes) == {home}
    assert not all(row.healthy for row in replicas.rows())
    health.good = True
    await until(lambda: all(row.healthy for row in replicas.rows()))
    assert home in {await used(route(replicas, Owner(), bytes([at]))) for at in range(64)}
    assert [(row.calls > 0, row.failures) for row in replicas.rows() if row.address == home] == [(True, 1)]


async def test_while_none_can_be_reached_nobody_waits_for_long(
    replicas: Replicas, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.dataplane.replicas._ALL_GONE_SECONDS", 0.05)
    way = route(replicas, Owner(), addresses=["a:1"])
    await used(way, error=UnreachableError("refused"))
    with pytest.raises(UnavailableError) as gone:
        await used(way)
    assert (gone.value.code, gone.value.should_retry) == ("engine_offline", True)
    health.good = True
    await until(lambda: all(row.healthy for row in replicas.rows()))
    assert await used(way) == "a:1"


async def test_the_engines_addresses_may_change(replicas: Replicas) -> None:
    owner = Owner()
    await used(route(replicas, owner), error=UnreachableError("refused"))
    places = {await used(route(replicas, owner, addresses=["e:5"]))}
    assert places == {"e:5"}
    assert [(row.address, row.healthy) for row in replicas.rows()] == [("e:5", True)]
    # nobody probes what is no longer there
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("probe")])


def test_a_prefix_is_what_later_turns_begin_with() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    first = prefix_of({"messages": [system, user]})
    later = prefix_of({"messages": [system, user, {"role": "assistant", "content": "a"}, user]})
    assert first == later
    assert prefix_of({"messages": [system, {"role": "user", "content": "v"}]}) != first
    assert prefix_of({"messages": [{"role": "user", "content": [{"type": "image", "x": 2**70}]}]})
    assert prefix_of({"messages": [system]}) != prefix_of({"messages": ["odd"]})


async def test_the_answer_of_the_last_suspect_lets_in_those_who_waited_for_it(replicas: Replicas) -> None:
    suspect, innocent, other = (Identity("m", {"prompt": prompt}) for prompt in ("suspect", "innocent", "other"))
    replicas.suspects.died([suspect, innocent])
    replicas.suspects.cleared(innocent)
    alone = route(replicas, Owner(), addresses=["a:1"], identity=suspect)
    async with alone.lease(1):
        waiting = asyncio.create_task(used(route(replicas, Owner(), addresses=["a:1"], identity=other)))
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert not waiting.done()
    # long before the suspect's time is over
    async with asyncio.timeout(10):
        assert await waiting == "a:1"
