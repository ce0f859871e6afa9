"""Groups on standby, in every order of what can happen to them, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.background import Background
from gateway.rollout import standby as standby_module
from gateway.rollout.standby import KEEP_SECONDS, Kind, Standby
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.errors import UnavailableError

KINDS = (Kind(2, 60.0), Kind(3, 60.0))


@pytest.fixture(autouse=True, scope="module")
def at_once() -> Iterator[None]:
    """Turns of the event loop are all the time there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby_module, "HEAD_START", 0.0)
        yield


class MovedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it is told to."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class World:
    """A server that grants when it is told to, and what became of each of its groups."""

    def __init__(self) -> None:
        self.asked: list[tuple[Kind, asyncio.Future[None]]] = []
        self.born: dict[str, float] = {}
        self.given_back: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()

    async def claim(self, kind: Kind) -> EpisodeGroup:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.append((kind, granted))
        await granted
        names = [f"g{len(self.born)}-{place}" for place in range(kind.count)]
        self.born[names[0]] = asyncio.get_running_loop().time()
        return EpisodeGroup(EpisodeEndpoint(episode_uuid=name, base_url="u", api_key="k") for name in names)

    def give_back(self, group: EpisodeGroup) -> None:
        self.given_back[group[0].episode_uuid] += 1

    def decide(self, granted: bool) -> None:
        if self.asked:
            _, future = self.asked.pop(0)
            if granted:
                future.set_result(None)
            else:
                future.set_exception(UnavailableError("none free", code="no_episodes"))


async def turn() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


steps = st.one_of(
    st.tuples(st.just("request"), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.sampled_from(["grant", "grant", "grant", "refuse", "release"]), st.just(0), st.just(0)),
    st.tuples(st.just("pass"), st.integers(1, 40), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(order=st.lists(steps, max_size=30))
def test_each_group_has_one_fate_and_none_stays_for_long(order: list[tuple[str, int, int]]) -> None:
    world = World()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovedLoop)
        async with Background(5.0) as background:
            standby = Standby(world.claim, world.give_back, background)
            wanted = dict.fromkeys(KINDS, 0)

            async def settled() -> None:
                await turn()
                here = set(world.born) - set(world.taken) - set(world.given_back)
                assert len(standby) == len(here) <= sum(wanted.values())
                assert all(loop.time() - world.born[name] <= KEEP_SECONDS + 1 for name in here)
                assert Counter(kind for kind, _ in world.asked) <= Counter(KINDS), "one claim of a kind at a time"

            for what, number, size in order:
                if what == "request":
                    kind = KINDS[number]
                    if (group := standby.take(kind)) is not None:
                        assert len(group) == kind.count
                        world.taken[group[0].episode_uuid] += 1
                    wanted[kind] = size
                    standby.fill(kind, size)
                elif what == "pass":
                    # no further than a timer at a time: they run when the loop next looks
                    for _ in range(number):
                        loop.ahead += 1.0
                        await asyncio.sleep(0)
                elif what == "release":
                    standby.release()
                    assert len(standby) == 0
                else:
                    world.decide(what == "grant")
                await settled()
            standby.close()
            assert len(standby) == 0
            while world.asked:
                world.decide(True)
                await turn()
            standby.fill(KINDS[0], 3)
            await turn()
            assert not world.asked and not len(background)

    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(run())
    assert world.taken + world.given_back == Counter(world.born.keys())


@pytest.mark.anyio
async def test_the_oldest_goes_first_and_as_many_are_claimed_as_are_wanted() -> None:
    world = World()
    async with Background(5.0) as background:
        standby = Standby(world.claim, world.give_back, background)
        standby.fill(KINDS[0], 2)
        for _ in range(3):
            await turn()
            world.decide(True)
        await turn()
        assert not world.asked
        taken = [standby.take(kind) for kind in (KINDS[1], KINDS[0], KINDS[0], KINDS[0])]
        assert [group and group[0].episode_uuid for group in taken] == [None, "g0-0", "g1-0", None]


@pytest.mark.anyio
async def test_after_a_refusal_the_server_is_left_alone_for_a_while() -> None:
    world = World()
    async with Background(5.0) as background:
        standby = Standby(world.claim, world.give_back, background)
        standby.fill(KINDS[0], 2)
        await turn()
        world.decide(False)
        await turn()
        standby.fill(KINDS[0], 2)
        standby.fill(KINDS[1], 2)
        await turn()
        assert not world.asked
