"""Workflows of users: what they get, and what they may return."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import JSONResponse

from swarm.client import EpisodeEndpoint
from swarm.client.workflow import Execute, load_workflow
from swarm.errors import ConfigError
from swarm.http.serve import bind, uvicorn_config
from swarm.types import Task, WorkflowOutput
from tests.swarm.client.scripted import ScriptedServer
from tests.swarm.http.certificates import make_tls

TASK = Task(task_id="t", main_query="2+2?", init_messages=[{"role": "user", "content": "2+2?"}])
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}],
}


@pytest.fixture
def api(server: ScriptedServer) -> EpisodeEndpoint:
    server.script("/v1/chat/completions", ANSWER)
    return EpisodeEndpoint(episode_uuid="e", base_url=f"{server.url}/v1", api_key="sk-e")


Load = Callable[..., Execute]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Load]:
    """The workflow ``solve`` of a module with this text."""
    name = f"workflow_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def load(text: str, attribute: str = "solve") -> Execute:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return load_workflow(f"{name}:{attribute}")

    yield load
    for module in set(sys.modules) - before:
        if module.startswith("workflow_"):
            del sys.modules[module]


CLIENT = """
    from swarm.types import WorkflowOutput

    def solve(task, client):
        answer = client.chat.completions.create(model="m", messages=task.init_messages)
        return WorkflowOutput(reward=float(answer.choices[0].message.content == "4"), is_success=True)
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_gets_a_client_of_its_kind(
    load: Load, api: EpisodeEndpoint, server: ScriptedServer, asynchronous: bool
) -> None:
    text = CLIENT.replace("def ", "async def ").replace("= client", "= await client") if asynchronous else CLIENT
    assert load(text)(TASK, api) == WorkflowOutput(reward=1.0, is_success=True)
    [asked] = server.requests
    assert asked.headers["authorization"] == "Bearer sk-e"
    assert asked.body["messages"] == TASK.init_messages


@pytest.mark.anyio
async def test_a_client_trusts_the_authorities_that_our_own_calls_trust(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = make_tls(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
    config = uvicorn_config(JSONResponse(ANSWER), shutdown_seconds=1, log_level="error", tls=tls)
    config.lifespan = "off"
    server, listener = uvicorn.Server(config), bind("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/v1"
        api = EpisodeEndpoint(episode_uuid="e", base_url=url, api_key="sk-e")
        assert (await asyncio.to_thread(load(CLIENT), TASK, api)).reward == 1
    finally:
        server.should_exit = True
        await running


def test_a_function_gets_what_it_names(load: Load, api: EpisodeEndpoint) -> None:
    solve = load("""
        def solve(task, api_key, base_url, api, hint="none"):
            return {"reward": 1, "metadata": {"got": [api_key, base_url, api.episode_uuid, hint]}, "unknown": 1}
    """)
    assert solve(TASK, api).metadata == {"got": ["sk-e", api.base_url, "e", "none"]}


def test_an_unknown_parameter_is_named_before_anything_runs(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"unknown parameter 'llm'; after the task there may be client, base_url"):
        load("def solve(task, llm): ...")


SETTINGS = """
    from swarm.types import WorkflowOutput

    def solve(task, base_url, weight=1.0, power=2.0):
        return WorkflowOutput(reward=weight ** power)
"""


def test_settings_are_values_of_further_parameters(load: Load, api: EpisodeEndpoint) -> None:
    plain = load(SETTINGS)
    assert plain(TASK, api).reward == 1.0
    name = next(one for one in sys.modules if one.startswith("workflow_"))
    assert load_workflow(f"{name}:solve", {"weight": 3.0})(TASK, api).reward == 9.0
    for wrong in ("height", "base_url"):
        with pytest.raises(ConfigError, match="no parameter for the setting"):
            load_workflow(f"{name}:solve", {wrong: 1})


def test_a_class_is_no_workflow(load: Load) -> None:
    with pytest.raises(ConfigError, match="is a type: a workflow is a function"):
        load("class solve: ...")


def test_a_workflow_without_a_task_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="takes no argument"):
        load("def solve(): ...")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned a NoneType; a workflow returns WorkflowOutput"),
        ("{'reward': None}", "reward: one number is needed"),
        ("{'reward': float('nan')}", "reward: must be a finite number"),
    ],
)
def test_no_reward_is_an_error_and_never_a_zero(load: Load, api: EpisodeEndpoint, returned: str, message: str) -> None:
    solve = load(f"def solve(task): return {returned}")
    with pytest.raises(ConfigError, match=message):
        solve(TASK, api)


def test_metrics_are_the_numbers_of_any_library(load: Load, api: EpisodeEndpoint) -> None:
    metrics = "'a': np.float32(0.5), 'b': np.array(2), 'c': np.zeros(2), 'd': 'text', 'e': 10**400, 'f': float('inf')"
    solve = load(f"import numpy as np\ndef solve(task): return {{'reward': 1.0, 'log_metrics': {{{metrics}}}}}")
    with pytest.warns(RuntimeWarning, match="'f' is inf: it is left out"):
        assert solve(TASK, api).log_metrics == {"a": 0.5, "b": 2.0}


def test_a_refused_call_reaches_the_workflow(load: Load, api: EpisodeEndpoint, server: ScriptedServer) -> None:
    import openai

    from tests.swarm.client.scripted import Answer

    refusal: dict[str, Any] = {"error": {"message": "no", "type": "invalid_request_error", "code": None}}
    server.script("/v1/chat/completions", Answer(refusal, status=400))
    with pytest.raises(openai.BadRequestError):
        load(CLIENT)(TASK, api)
