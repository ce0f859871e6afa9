"""Several apps train one model: each fills its share of every batch, and nobody waits for anybody's share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.gateway import read_config
from gateway.keys.store import KeyFile
from swarm.errors import ConfigError
from swarm.types import StepResult
from tests.gateway.conftest import BODY, CHAT, Http, OpenGateway, gateway_before
from tests.standins.swarm import Swarm
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig

JOB = server.JOB.model_copy(update={"batch_size": 5})
SHARES = {"math": 0.4, "code": 0.6}
BATCHES = 20
#: Users of each app; what it may train does not depend on how much it asks.
USERS = {"math": 4, "code": 3}


@contextlib.asynccontextmanager
async def apps(rig: server.Rig, folder: Path, by_key: bool) -> AsyncGenerator[tuple[Http, dict[str, dict[str, Any]]]]:
    """A gateway in which each app has a route, or a key of one route; and what each app sends."""
    url = str(rig.client.base_url)
    if not by_key:
        shared = {"swarm_url": url, "hooks": str(folder / "hooks"), "acknowledge_seconds": 5.0}
        routes = [{"name": name, "share": share, **shared} for name, share in SHARES.items()]
        async with gateway_before(url, folder, routes=routes) as http:
            yield http, {name: {"json": BODY | {"model": name}} for name in SHARES}
        return
    file = KeyFile(folder / "keys.json")
    keys = {name: file.create(name)[1] for name in SHARES}
    async with gateway_before(url, folder, key_shares=SHARES, keys_file=str(file.path)) as http:
        yield http, {name: {"json": BODY, "headers": {"authorization": f"Bearer {keys[name]}"}} for name in SHARES}


@pytest.mark.slow
@pytest.mark.parametrize("by_key", [False, True], ids=["routes", "keys"])
async def test_each_batch_is_a_cocktail_by_the_shares_and_nobody_starves(
    rig: server.Rig, tmp_path: Path, by_key: bool
) -> None:
    controller = rig.controller
    controller.offline("another job")
    controller.sync_job(JOB)
    controller.boot()
    controller.rollout_ready(server.ready(rig.vllm_address))
    answers: dict[str, list[tuple[str, str]]] = {name: [] for name in SHARES}
    trained = dict.fromkeys(SHARES, 0)

    async with apps(rig, tmp_path, by_key) as (http, requests):

        async def ask(name: str) -> None:
            while True:
                answer = await http.post(CHAT, **requests[name])
                assert answer.status_code == 200, answer.text
                answers[name].append(
                    (answer.headers.get("x-swarm-trained", ""), answer.headers.get("x-swarm-drop-reason", ""))
                )

        users = [asyncio.create_task(ask(name)) for name, count in USERS.items() for _ in range(count)]
        mixes: list[dict[str, int]] = []
        try:
            for step in range(1, BATCHES + 1):
                async with asyncio.timeout(60):
                    batch = await controller.next_batch()
                controller.step_done(StepResult(step=step, batch_id=batch.batch_id, metrics={}, seconds=0.0))
                now = {name: of_client(controller, name, by_key) for name in SHARES}
                mixes.append({name: (now[name] - trained[name]) // JOB.num_repeat for name in SHARES})
                trained = now
                controller.rollout_ready(server.ready(rig.vllm_address, step, batch.batch_id))
            assert not [user for user in users if user.done()], "an app was refused"
        finally:
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
    # until both have come, one alone may fill a batch
    for mix in mixes[1:]:
        assert sum(mix.values()) == JOB.batch_size
        for name, share in SHARES.items():
            assert abs(mix[name] - share * JOB.batch_size) <= 1, mixes
    # what is beyond a share is answered all the same, untrained
    told = {reason for outcomes in answers.values() for _, reason in outcomes}
    assert told <= {"", "throttled", "cancelled", "sample_failed"}, told
    assert "throttled" in told


def of_client(controller: Any, name: str, by_key: bool) -> int:
    """Episodes of the app that were trained so far."""
    client = f"share-default/{name}" if by_key else f"share-{name}"
    return sum(row.trained for row in controller.pool.collection.rows() if row.client_uuid == client)


async def test_a_schedule_gives_the_share_of_the_step_that_is_served(
    swarm: Swarm, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    shared = {"swarm_url": swarm.url, "hooks": str(tmp_path / "hooks")}
    routes: list[dict[str, Any]] = [
        {"name": "early", "share": [[0, 0.8], [8, 0.4]], **shared},
        {"name": "late", "share": [[0, 0.8], [7, 0.4]], **shared},
        {"name": "free", **shared},
    ]
    assert swarm.step == 7
    async with open_gateway(routes=routes) as http:
        for route in routes:
            assert (await http.post(CHAT, json=BODY | {"model": route["name"]})).status_code == 200
    policies = [claim["throttle_policy"] for claim in swarm.claims]
    assert [policy and policy["ratio"] for policy in policies] == [0.8, 0.4, None]
    names = [claim["client_uuid"] for claim in swarm.claims]
    assert names[:2] == ["share-early", "share-late"] and not names[2].startswith("share-")


@pytest.mark.parametrize("share", [0, 1.5, [[0, 0.5], [0, 0.6]], [[5, 0.5], [2, 0.6]], [[0, 2]], [], "half"])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"share"):
        read_config({"hooks": "h", "share": share})
