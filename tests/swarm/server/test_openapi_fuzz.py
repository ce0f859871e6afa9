"""schemathesis against a live server, from its own document: no undocumented 5xx, and responses that conform.

Bodies that fit their schema and bodies that do not, on a server whose engine is scripted; every second one names a
running episode and, on the routes that sample, has a good body with whatever was drawn beside it. The server is stopped
and started last, because little can be asked afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import strategies as st

from swarm.job import LoraSettings
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from tests.openapi import SECONDS, Caller, operations_of, routes_of
from tests.standins.vllm import ScriptedVllm, told
from tests.standins.vllm import listening as serving
from tests.swarm.server.conftest import JOB, ready

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXAMPLES = 15
LAST = ("/sync_train_config", "/sync_train_code", "/code/select", "/stop_engine", "/start_engine")
#: what the routes that sample need: the document allows them any object
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/responses": {"input": "hi"},
}


@schemathesis.serializer("application/zip")
def no_zip(context: Any, value: Any) -> bytes:
    """Anything but an archive."""
    return value if isinstance(value, bytes) else str(value).encode()


class ServerCaller(Caller):
    """Half of its cases are about an episode that runs."""

    def prepare(self, case: Any) -> None:
        real = self.claim(case.path) if next(self.turn) else {}
        if "_uuid}" in case.path and real:
            case.path_parameters = {"episode_uuid": real["uuid"], "group_uuid": real["uuid"]}
            case.headers["authorization"] = f"Bearer {real['key']}"
        if "{name}" in case.path and real:
            case.path_parameters = {"name": JOB.model_name}
        if "{version}" in case.path and real:
            # the model below the adapter
            case.path_parameters["version"] = "0"
        if isinstance(case.body, dict) and real:
            case.body |= next((good for path, good in GOOD.items() if case.path.endswith(path)), {})
            for name in ("client_uuid", "episode_uuid"):
                if name in case.body:
                    case.body[name] = real[name]
            ends = case.body.get("ends")
            for end in ends if isinstance(ends, list) else []:
                if isinstance(end, dict):
                    end["episode_uuid"] = real["episode_uuid"]
        for wait in (case.query, case.body):
            if isinstance(wait, dict) and isinstance(wait.get("wait_seconds"), int | float):
                # as long as may be is too long for a test
                wait["wait_seconds"] = min(wait["wait_seconds"], 0.02)

    def claim(self, path: str) -> dict[str, str]:
        """A group of one, so that both kinds of addresses work; nothing while the engine is off."""
        body = {"client_uuid": "fuzz", "count": 1, "discard_episode_timeout": 30}
        answer = self.session.post(f"{self.url}/claim_group", json=body, timeout=SECONDS).json()
        if not answer.get("success"):
            return {}
        (episode,) = answer["episodes"]
        one = {"client_uuid": "fuzz", "episode_uuid": episode["episode_uuid"]}
        if path.startswith("/groups"):
            return one | {"uuid": answer["group_uuid"], "key": answer["openai_api_key"]}
        return one | {"uuid": episode["episode_uuid"], "key": episode["openai_api_key"]}


def fuzz(url: str) -> dict[str, set[int]]:
    """Ask every route; the statuses that each answered."""
    with contextlib.closing(ServerCaller(url)) as caller:
        for operation in sorted(operations_of(url), key=lambda one: LAST.index(one.path) if one.path in LAST else -1):
            caller.ask(operation, EXAMPLES, st.just({}))
    return caller.statuses


async def test_no_undocumented_answer(tmp_path: Path) -> None:
    vllm = ScriptedVllm()
    chat, raw = vllm.default, told([1, 2])
    vllm.default = lambda body: (raw if "prompt" in body else chat)(body)
    config = ServerConfig(run_dir=tmp_path, post_rolling_timeout=0.0, max_episode_seconds=60)
    app = create_app(config, engine_command=(sys.executable, "-c", "raise SystemExit(1)"))
    async with serving(vllm.app) as vllm_url, serving(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as http:
            await http.get("/health")
        controller: Controller = app.state.controller
        # slots for every episode that is claimed and left alone, and no batch ever
        controller.sync_job(JOB.model_copy(update={"batch_size": 200_000, "lora": LoraSettings(rank=8)}))
        controller.boot()
        controller.rollout_ready(ready(vllm_url.removeprefix("http://")))
        statuses = await asyncio.to_thread(fuzz, url)
    assert set(statuses) == routes_of(app)
    # each route has also accepted something
    assert {label for label, seen in statuses.items() if 200 not in seen} <= {
        "POST /sync_train_config",
        "POST /sync_train_code",
        "POST /code/select",
        "GET /code/{id}",
        "POST /config/resolve",
        "GET /config/{number}",
        "POST /start_engine",
        # no gateway has a challenger here
        "GET /policies/explain",
        "POST /policies/promote",
        "POST /policies/rollback",
        "POST /policies/pin",
        # nor a checkpoint
        "GET /policies/kept/{step}",
        "POST /policies/delete",
        # answers nothing
        "GET /kept/{version}/v1/{rest}",
        "POST /kept/{version}/v1/{rest}",
        "POST /register_episode",
        "POST /update_engine_status",
        "POST /update_current_batch_rollout_pool_information",
        "POST /update_current_batch_rollout_pool_information_and_fetch_instruction",
    }
