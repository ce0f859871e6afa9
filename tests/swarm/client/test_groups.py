"""Groups on several servers: all end, or none does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from swarm.client import AsyncSwarmClient, RetryPolicy, SwarmClient, end_groups, end_groups_async
from swarm.errors import ConflictError, SwarmGatewayError, UnavailableError
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.types import WorkflowOutput
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_sync import OUTPUT
from tests.swarm.client.test_with_server import JOB, READY, Swarm
from tests.swarm.server.vllm import serving

pytestmark = pytest.mark.anyio

OK = {"success": True}
FEW = RetryPolicy(attempts=2, base=0.002, cap=0.01)
PREPARE, COMMIT, CANCEL = "/prepare_group_end", "/commit_group_end", "/cancel_group_end"

End = Callable[[Sequence[ScriptedServer]], Awaitable[list[str]]]


@pytest.fixture(params=["sync", "async"])
def end(request: pytest.FixtureRequest, anyio_backend: str) -> End:
    """End a group on each server, by either client."""

    async def sync(servers: Sequence[ScriptedServer]) -> list[str]:
        clients = [SwarmClient(one.url, client_uuid=f"me{n}", policy=FEW) for n, one in enumerate(servers)]
        try:
            return end_groups([(one, f"t{n}", {f"e{n}": OUTPUT}) for n, one in enumerate(clients)])
        finally:
            for one in clients:
                one.close()

    async def asynchronous(servers: Sequence[ScriptedServer]) -> list[str]:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncSwarmClient(one.url, client_uuid=f"me{n}", policy=FEW))
                for n, one in enumerate(servers)
            ]
            return await end_groups_async([(one, f"t{n}", {f"e{n}": OUTPUT}) for n, one in enumerate(clients)])

    return sync if request.param == "sync" else asynchronous


@pytest.fixture
def other() -> Any:
    with ScriptedServer() as server:
        yield server


def script(server: ScriptedServer, prepare: Any = OK, commit: Any = OK, cancel: Any = OK) -> ScriptedServer:
    for path, answer in ((PREPARE, prepare), (COMMIT, commit), (CANCEL, cancel)):
        server.script(path, answer)
    return server


def refusal(code: str, status: int = 409) -> Answer:
    return Answer({"error": {"message": "no", "code": code}}, status)


def paths(server: ScriptedServer) -> list[str]:
    return [one.path for one in server.requests]


async def test_all_promise_before_any_commits(server: ScriptedServer, other: ScriptedServer, end: End) -> None:
    order: list[str] = []

    class Noted(threading.Event):
        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

        def wait(self, timeout: float | None = None) -> bool:
            order.append(self.what)
            return True

    script(server, Answer(OK, wait=Noted("p")), Answer({"success": True, "error": "note"}, wait=Noted("first")))
    script(other, Answer(OK, wait=Noted("p")), Answer(OK, wait=Noted("second")))
    assert await end([server, other]) == ["note", ""]
    assert order == ["p", "p", "first", "second"]
    [first], [second] = server.bodies(PREPARE), other.bodies(PREPARE)
    assert (first["coordinator"], second["coordinator"]) == ("", server.url)
    assert first["transaction"] == second["transaction"]
    assert (second["client_uuid"], second["task_id"], second["ends"][0]["episode_uuid"]) == ("me1", "t1", "e1")
    assert other.bodies(COMMIT) == [{"client_uuid": "me1", "transaction": first["transaction"]}]


async def test_one_refusal_is_none_for_all(server: ScriptedServer, other: ScriptedServer, end: End) -> None:
    script(server)
    script(other, prepare=refusal("group_not_trained"))
    with pytest.raises(ConflictError) as caught:
        await end([server, other])
    assert caught.value.code == "group_not_trained"
    assert other.url in "".join(caught.value.__notes__)
    assert paths(server) == [PREPARE, CANCEL]
    assert paths(other) == [PREPARE, CANCEL]


async def test_the_first_promises_before_the_others_are_asked(
    server: ScriptedServer, other: ScriptedServer, end: End
) -> None:
    script(server, prepare=refusal("group_not_trained"))
    script(other)
    with pytest.raises(ConflictError):
        await end([server, other])
    assert paths(server) == [PREPARE, CANCEL]
    assert paths(other) == [], "whoever promises may ask the first, which must know what it is asked for"


async def test_a_server_that_is_away_is_none_for_all(server: ScriptedServer, other: ScriptedServer, end: End) -> None:
    script(server)
    other.stop()
    with pytest.raises(UnavailableError) as caught:
        await end([server, other])
    assert caught.value.code == "server_unreachable"
    assert paths(server) == [PREPARE, CANCEL]


async def test_a_first_server_that_has_cancelled_decides(
    server: ScriptedServer, other: ScriptedServer, end: End
) -> None:
    script(server, commit=refusal("group_end_cancelled"))
    script(other)
    with pytest.raises(ConflictError) as caught:
        await end([server, other])
    assert caught.value.code == "group_end_cancelled"
    assert paths(other) == [PREPARE, CANCEL]


async def test_a_first_server_that_does_not_say_leaves_it_to_the_servers(
    server: ScriptedServer, other: ScriptedServer, end: End
) -> None:
    script(server, commit=DROP)
    script(other)
    with pytest.raises(UnavailableError) as caught:
        await end([server, other])
    assert caught.value.code == "group_end_in_doubt"
    assert paths(server) == [PREPARE, COMMIT, COMMIT]
    # neither committed nor cancelled: what the first one did is not known
    assert paths(other) == [PREPARE]
    script(server)
    assert await end([server, other]) == ["", ""]
    assert len({body["transaction"] for body in other.bodies(PREPARE)}) == 1


async def test_once_decided_a_server_that_is_away_learns_later(
    server: ScriptedServer, other: ScriptedServer, end: End, caplog: pytest.LogCaptureFixture
) -> None:
    script(server)
    script(other, commit=DROP)
    assert await end([server, other]) == ["", ""]
    assert f"{other.url} ends its group later" in caplog.text


async def test_what_another_run_took_away_is_told(server: ScriptedServer, other: ScriptedServer, end: End) -> None:
    script(server)
    script(other, commit=refusal("episode_deleted"))
    with pytest.raises(ConflictError) as caught:
        await end([server, other])
    assert "the others ended" in "".join(caught.value.__notes__)


async def test_one_server_needs_one_phase_and_none_none(server: ScriptedServer, end: End) -> None:
    server.script("/end_group", OK)
    assert await end([server]) == [""]
    assert paths(server) == ["/end_group"]
    assert await end([]) == []


# -- real servers


@asynccontextmanager
async def swarm(run_dir: Path, **more: Any) -> AsyncGenerator[Swarm]:
    app = create_app(ServerConfig(run_dir=run_dir, token="secret", **more))
    async with serving(app) as url:
        one = Swarm(url, app.state.controller)
        async with AsyncSwarmClient(url, token="secret", policy=QUICK) as client:
            await client.status()
        one.controller.sync_job(JOB)
        one.controller.boot()
        one.controller.rollout_ready(READY)
        yield one


async def claim(one: Swarm, client: AsyncSwarmClient, *, sampled: bool = True) -> dict[str, WorkflowOutput]:
    episodes = await client.claim_group(2, 5.0)
    for episode in episodes:
        if sampled:
            one.sample(episode)
    return {episode.episode_uuid: OUTPUT for episode in episodes}


def counts(*swarms: Swarm) -> list[tuple[dict[str, int], int]]:
    return [(one.controller.pool.information().tasks, one.controller.pool.running) for one in swarms]


async def test_both_or_neither_on_real_servers(tmp_path: Path, anyio_backend: str) -> None:
    async with (
        swarm(tmp_path / "a") as first,
        swarm(tmp_path / "b", peers={first.url: "secret"}) as second,
        AsyncSwarmClient(first.url, token="secret", policy=QUICK) as one,
        AsyncSwarmClient(second.url, token="secret", policy=QUICK) as two,
    ):
        parts = [(one, "t", await claim(first, one)), (two, "t", await claim(second, two))]
        for _ in range(2):
            assert await end_groups_async(parts) == ["", ""]
        assert counts(first, second) == [({"t": 2}, 0)] * 2
        parts = [(one, "u", await claim(first, one)), (two, "u", await claim(second, two, sampled=False))]
        with pytest.raises(SwarmGatewayError):
            await end_groups_async(parts)
        assert counts(first, second) == [({"t": 2}, 0), ({"t": 2}, 2)]


async def test_a_client_that_vanishes_between_the_commits(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        swarm(tmp_path / "a") as first,
        swarm(tmp_path / "b", peers={first.url: "secret"}) as second,
        AsyncSwarmClient(first.url, token="secret", policy=QUICK) as one,
        AsyncSwarmClient(second.url, token="secret", policy=FEW) as two,
    ):
        parts = [(one, "t", await claim(first, one)), (two, "t", await claim(second, two))]
        send = two.send

        async def only_prepare(call: Any, policy: Any = None) -> Any:
            if call.path == COMMIT:
                raise UnavailableError("the client was killed")
            return await send(call, policy)

        monkeypatch.setattr(two, "send", only_prepare)
        assert await end_groups_async(parts, hold_seconds=0.3) == ["", ""]
        assert counts(first) == [({"t": 2}, 0)]
        async with asyncio.timeout(30):
            while counts(second) != [({"t": 2}, 0)]:
                await two.status()
