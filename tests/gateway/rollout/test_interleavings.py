"""Whatever order samples end, fail and users leave in: each episode has one end, and rewards are of one judgement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.dialects import SampledAnswer
from gateway.config.route import RouteSettings
from gateway.rollout import group, server
from gateway.rollout.answering import best
from gateway.rollout.first import first
from gateway.rollout.return_policy import ReturnPolicy
from gateway.rollout.sampling import EpisodeLostError, LiveSample, Sample
from gateway.rollout.server import ServerReport, Training
from gateway.stats import Accounted, Stats
from gateway.types import Decided, Live
from reward_hooks import Candidate, HookContext, HookRunner, Hooks
from swarm.client import EpisodeEndpoint, EpisodeGroup, RetryPolicy
from swarm.concurrency import Background
from swarm.errors import HookError, RelayedError, SwarmGatewayError, UpstreamError
from swarm.evidence.pairs import Pair
from swarm.types import Notes, Task, WorkflowOutput
from tests.gateway.rollout.conftest import asking

SIZE = 4
#: What a sample comes to; made anew each time, because an error keeps the frames that it went through.
ERRORS: dict[str, Callable[[], SwarmGatewayError]] = {
    "fails": lambda: UpstreamError("failed"),
    "lost": lambda: EpisodeLostError("lost", retry_after=0.001),
    "refused": lambda: RelayedError(400, {"message": "no"}),
}


@dataclass
class World:
    """A swarm whose samples end when they are told to, with a hook whose calls can be told apart by their rewards."""

    takes_partial: bool
    hook_fails: int
    claimed: list[str] = field(default_factory=list[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    submitted: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    judged: int = 0
    pending: dict[str, asyncio.Future[None]] = field(default_factory=dict[str, "asyncio.Future[None]"])
    dropped: int = 0
    given: set[int] = field(default_factory=set[int])
    client: None = None
    background: Background | None = None

    # -- episodes

    @property
    def report(self) -> ServerReport:
        return ServerReport(model="m", num_repeat=SIZE, takes_partial=self.takes_partial)

    def gone_for(self, seconds: float) -> None:
        """The server answers."""

    async def wait_for_job(self, waited: Any) -> ServerReport:
        return self.report

    async def claim(self, count: int, waited: Any, idle_seconds: float) -> EpisodeGroup:
        names = [f"e{len(self.claimed) + k}" for k in range(count)]
        self.claimed += names
        episodes = [EpisodeEndpoint(episode_uuid=name, base_url="u", api_key=name) for name in names]
        return EpisodeGroup(episodes, "g", "u", names[0])

    def abort(self, episodes: Sequence[EpisodeEndpoint], reason: str, notes: Notes) -> None:
        assert reason
        self.ends.update(one.episode_uuid for one in episodes)

    # -- sampler

    @property
    def sampler(self) -> World:
        return self

    async def sample(self, episode: EpisodeEndpoint, body: bytes, deadline: float) -> Sample:
        await self._end_of(episode.episode_uuid)
        return _sample(episode.episode_uuid)

    async def sample_group(
        self, group: EpisodeGroup, places: Sequence[int], body: bytes, deadline: float
    ) -> list[Sample]:
        await self._end_of(group[places[0]].episode_uuid)
        return [_sample(group[place].episode_uuid) for place in places]

    @asynccontextmanager
    async def stream(self, episode: EpisodeEndpoint, body: bytes, deadline: float) -> AsyncGenerator[LiveSample]:
        async def chunks() -> AsyncGenerator[dict[str, Any]]:
            yield {"choices": [{"index": 0, "delta": {"content": "a"}}], "model": "m"}
            await self._end_of(episode.episode_uuid)
            yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "model": "m"}

        yield LiveSample(1, chunks())

    async def _end_of(self, name: str) -> None:
        self.pending[name] = asyncio.get_running_loop().create_future()
        try:
            await self.pending[name]
        finally:
            del self.pending[name]

    def end(self, place: int, how: str) -> None:
        """The sample at ``place`` of the newest group comes to its end, if it is under way."""
        future = self.pending.get(f"e{len(self.claimed) - SIZE + place}")
        if future is None or future.done():
            return
        if how == "ok":
            future.set_result(None)
        else:
            future.set_exception(ERRORS[how]())

    # -- hook and submission

    async def reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        self.judged += 1
        call = self.judged
        await asyncio.sleep(0)
        if call == self.hook_fails:
            raise HookError("cannot tell")
        return [call * 1000.0 + index for index in range(len(candidates))]

    async def submit(
        self,
        client: None,
        task_id: str,
        outputs: Mapping[str, WorkflowOutput],
        seconds: float,
        stats: Stats,
        account: Accounted,
        pair: Pair | None,
    ) -> None:
        await asyncio.sleep(0)
        self.ends.update(list(outputs))
        self.submitted.append({name: output.reward for name, output in outputs.items()})  # pyright: ignore


def _sample(name: str) -> Sample:
    return Sample(SampledAnswer("m", {"role": "assistant", "content": name}, "stop"), 0.1, 1)


async def turn() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


steps = st.one_of(
    st.tuples(st.integers(0, SIZE - 1), st.sampled_from(["ok", "ok", "ok", *ERRORS])),
    st.tuples(st.just(-1), st.sampled_from(["leave", "read"])),
)


def _all_goes_well(kind: str, *, stream: bool) -> example:
    return example(kind, None, "finish", "cancel", False, 0, stream, 1, [])


@settings(max_examples=300)
@_all_goes_well("best", stream=False)
@_all_goes_well("first", stream=False)
@_all_goes_well("first", stream=True)
@given(
    kind=st.sampled_from(["best", "first"]),
    quorum=st.none() | st.integers(1, SIZE),
    stragglers=st.sampled_from(["finish", "cancel"]),
    on_disconnect=st.sampled_from(["cancel", "finish"]),
    takes_partial=st.booleans(),
    hook_fails=st.integers(0, 2),
    stream=st.booleans(),
    choices=st.integers(1, 2),
    order=st.lists(steps, max_size=10),
)
def test_every_episode_has_one_end_and_rewards_are_of_one_call(
    kind: str,
    quorum: int | None,
    stragglers: str,
    on_disconnect: str,
    takes_partial: bool,
    hook_fails: int,
    stream: bool,
    choices: int,
    order: list[tuple[int, str]],
) -> None:
    async def run() -> World:
        world = World(takes_partial, hook_fails)
        given = RouteSettings.model_validate(
            {"hooks": "x", "stragglers": stragglers, "on_disconnect": on_disconnect, "sample_timeout_seconds": 60}
        )
        # turns of the event loop are all the time there is
        with (
            patch.object(server, "_PAUSES", RetryPolicy(base=0.0)),
            patch.object(group, "submit", world.submit),
        ):
            await ask(world, given)
        return world

    async def ask(world: World, given: RouteSettings) -> None:
        async with Background(5.0) as background:
            world.background = background
            swarm: Any = world
            route = Training(swarm, HookRunner(Hooks(reward=world.reward)), given, Stats())
            incoming = asking(n=choices, stream=stream)
            work = (
                best(route, incoming, None, ReturnPolicy(quorum=quorum))
                if kind == "best"
                else first(route, incoming, None)
            )
            asked = asyncio.create_task(work)
            reading: asyncio.Task[None] | None = None
            await turn()
            # in the end every sample ends somehow, in every group that is still claimed
            for place, what in [*order, *[(place, "ok") for _ in range(4) for place in range(SIZE)]]:
                if place >= 0:
                    world.end(place, what)
                elif what == "leave":
                    await _leave(asked, reading)
                elif asked.done() and not asked.cancelled() and asked.exception() is None and reading is None:
                    reading = asyncio.create_task(_read(asked.result()))
                await turn()
            if not asked.done():
                async with asyncio.timeout(60):
                    while not asked.done():
                        for place in range(SIZE):
                            world.end(place, "ok")
                        await asyncio.sleep(0.01)
            await _leave(asked, reading)
            async with asyncio.timeout(20):
                # a request that outlives its user may claim another group by now
                while len(background):
                    for place in range(SIZE):
                        world.end(place, "ok")
                    await asyncio.sleep(0.001)
        world.dropped = route.stats.groups.dropped.total()

    world = asyncio.run(run())
    assert world.ends == dict.fromkeys(world.claimed, 1)
    assert (world.dropped + len(world.submitted)) * SIZE == len(world.claimed), "every group is counted"
    if not (order or hook_fails or quorum):
        assert len(world.submitted) == 1, "a group of which all goes well is trained"
    for rewards in world.submitted:
        assert len({int(reward) // 1000 for reward in rewards.values()}) == 1
        assert len(set(rewards.values())) == len(rewards)
        assert len(rewards) == SIZE or (takes_partial and len(rewards) >= 2)


async def _read(outcome: Live | Decided) -> None:
    try:
        if isinstance(outcome, Decided):
            list(outcome.chunks())
        else:
            async for _ in outcome.chunks:
                pass
    except SwarmGatewayError:
        pass
    finally:
        if outcome.close is not None:
            await outcome.close()


async def _leave(asked: asyncio.Task[Live | Decided], reading: asyncio.Task[None] | None) -> None:
    """The user hangs up: before there is an outcome, before it is read, or while it is."""
    if not asked.done():
        asked.cancel()
        await asyncio.wait({asked})
    elif reading is not None:
        reading.cancel()
        await asyncio.wait({reading})
    elif not asked.cancelled() and asked.exception() is None and (close := asked.result().close) is not None:
        await close()
