"""What a gateway knows of the stages of its routes: the last that the server said, under whose rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.rollout.following import StageFollower
from swarm.client import AsyncSwarmClient
from swarm.evidence.stages import ServingStage, StageRules
from swarm.protocol import FollowedRoute, StagesResponse

pytestmark = pytest.mark.anyio

STAGE = ServingStage.begun("chat", "gpt", StageRules(), 1.0, "salt")
ROUTE = FollowedRoute(route="chat", incumbent="gpt")


class Server(AsyncSwarmClient):
    """Answers polls as a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.polls: list[tuple[list[str], asyncio.Future[StagesResponse]]] = []
        self.polled = asyncio.Condition()

    async def follow_stages(
        self, routes: Sequence[FollowedRoute], after_change: int | None, wait_seconds: float
    ) -> StagesResponse:
        answer: asyncio.Future[StagesResponse] = asyncio.get_running_loop().create_future()
        async with self.polled:
            self.polls.append(([route.incumbent for route in routes], answer))
            self.polled.notify_all()
        return await answer

    async def poll(self, number: int) -> tuple[list[str], asyncio.Future[StagesResponse]]:
        async with self.polled, asyncio.timeout(10):
            await self.polled.wait_for(lambda: len(self.polls) > number)
        return self.polls[number]


async def test_an_answer_that_was_overtaken_undoes_no_rollback() -> None:
    server = Server()
    follower = StageFollower(server)
    follower.follow([ROUTE])
    up = STAGE.moved(1.0, 2.0, "ann", "up")
    (await server.poll(0))[1].set_result(StagesResponse(changes=5, stages=[up]))
    _, overtaken = await server.poll(1)
    assert follower.stage("chat", "gpt") == up
    down = up.moved(0.0, 3.0, "ann", "down")
    follower.look(7, [down.shown], on_disk=False)
    assert follower.stage("chat", "gpt") == up, "a death of the server may undo it"
    follower.look(7, [down.shown], on_disk=True)
    # with the salt that a status lacks
    assert follower.stage("chat", "gpt") == down
    overtaken.set_result(StagesResponse(changes=6, stages=[up]))
    await server.poll(2)
    assert follower.stage("chat", "gpt") == down
    await follower.close()
    await server.close()


async def test_only_the_routes_of_the_current_table_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    follower = StageFollower(server)
    follower.follow([ROUTE])
    await server.poll(0)
    other = ROUTE.model_copy(update={"incumbent": "other", "rules": StageRules(trial_hours=2.0)})
    follower.follow([other])
    routes, answer = await server.poll(1)
    assert routes == ["other"]
    follower.follow([other])
    answer.set_result(StagesResponse(changes=5, stages=[STAGE.model_copy(update={"incumbent": "other"})]))
    await server.poll(2)
    assert "other rules (trial_hours) for the route chat" in follower.conflict("chat", "other")
    assert follower.conflict("chat", "other") in caplog.text
    follower.follow([])
    await asyncio.sleep(0)
    assert len(server.polls) == 3 and server.polls[2][1].cancelled()
    await follower.close()
    await server.close()
