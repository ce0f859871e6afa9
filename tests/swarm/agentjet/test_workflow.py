"""Workflows written for AgentJet, as ``train`` runs them: its classes, and ``execute_agent(task, api_baseurl_key)``."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.agentjet.workflow import load_workflow
from swarm.client import EpisodeEndpoint
from swarm.client.workflow import Execute
from swarm.errors import ConfigError
from swarm.types import Task, WorkflowOutput
from tests.swarm.client.scripted import ScriptedServer

pytestmark = pytest.mark.usefixtures("no_shim")

TASK = Task(task_id="t", main_query="2+2?", init_messages=[{"role": "user", "content": "2+2?"}], metadata={"answer": 4})
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}],
}
Load = Callable[..., Execute]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.script("/v1/chat/completions", ANSWER)
        yield server


@pytest.fixture
def api(server: ScriptedServer) -> EpisodeEndpoint:
    return EpisodeEndpoint(episode_uuid="e", base_url=f"{server.url}/v1", api_key="sk-e")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Load]:
    """The workflow ``solve`` of a module with this text."""
    name = f"workflow_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(tmp_path)

    def load(text: str, attribute: str = "solve", settings: dict[str, Any] | None = None) -> Execute:
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return load_workflow(f"{name}:{attribute}", settings)

    yield load
    sys.modules.pop(name, None)


AGENTJET = """
    import threading
    import requests_stand_in as requests
    from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

    class MathAgent(Workflow):
        name: str = "math"
        system_prompt: str = "You solve."

        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            where = tuner.as_oai_baseurl_apikey()
            self.seen = threading.get_ident()
            told = requests.post(where.base_url, where.api_key, workflow_task.task.main_query)
            client = tuner.as_raw_openai_sdk_client()
            answer = await client.chat.completions.create(messages=workflow_task.task.init_messages)
            return WorkflowOutput(
                reward=0.5,
                is_success=answer.choices[0].message.content == told,
                metadata={"thread": self.seen},
                log_metrics={"length": 3, "curve": [1, 2]},
            )
"""


def test_a_class_of_agentjet_runs_as_it_is_even_one_that_blocks(
    load: Load, api: EpisodeEndpoint, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(sys)("requests_stand_in")

    def post(base_url: str, api_key: str, query: str) -> str:
        body = {"model": "whatever", "messages": [{"role": "user", "content": query}]}
        headers = {"authorization": f"Bearer {api_key}"}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, trust_env=False, verify=False)
        return answer.json()["choices"][0]["message"]["content"]

    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module)["post"] = post
    output = load(AGENTJET, "MathAgent")(TASK, api)
    # what is no number is left out, as it is of AgentJet's own clients
    assert (output.reward, output.is_success, output.log_metrics) == (0.5, True, {"length": 3.0})
    assert output.metadata == {"thread": threading.get_ident()}
    assert [one.headers["authorization"] for one in server.requests] == ["Bearer sk-e"] * 2


def test_a_reward_that_agentjet_leaves_to_a_judge_is_refused(load: Load, api: EpisodeEndpoint) -> None:
    solve = load(
        """
        from ajet import Workflow, WorkflowOutput

        class Late(Workflow):
            async def execute(self, workflow_task, tuner):
                return WorkflowOutput(reward=None, metadata={"final_answer": "4"})
        """,
        "Late",
    )
    with pytest.raises(ConfigError, match="reward: one number is needed"):
        solve(TASK, api)


def test_a_class_has_no_settings(load: Load) -> None:
    with pytest.raises(ConfigError, match="no function, so it has no settings"):
        load(CLASS_WITH_AGENTSCOPE, settings={"weight": 1})


AGENT = """
    import httpx
    from ajet.schema.task import Task, WorkflowOutput
    from ajet.tuner_lib.as_oai_baseurl_apikey import OpenaiBaseUrlAndApiKey
    from ajet.utils.retry import retry_with_backoff

    @retry_with_backoff(max_retry=2)
    def solve(task: Task, api_baseurl_key: OpenaiBaseUrlAndApiKey, weight=1.0):
        base_url, api_key = api_baseurl_key.base_url, api_baseurl_key.api_key
        answer = httpx.post(
            f"{base_url}/chat/completions",
            json={"model": "whatever", "messages": task.init_messages},
            headers={"authorization": f"Bearer {api_key}"},
            trust_env=False,
        )
        text = answer.json()["choices"][0]["message"]["content"]
        return WorkflowOutput(
            reward=weight * (text == str(task.metadata["answer"])), metadata={"episode": api_baseurl_key.episode_uuid}
        )

    async def late(task, api_baseurl_key):
        return WorkflowOutput(reward=2.0, metadata={"model": api_baseurl_key.model})

    async def with_client(task: Task, api_baseurl_key: OpenaiBaseUrlAndApiKey):
        client = api_baseurl_key.as_raw_openai_sdk_client()
        answer = await client.chat.completions.create(model="x", messages=task.init_messages)
        await client.close()
        return WorkflowOutput(reward=float(answer.choices[0].message.content))

    def wanting(task, api_baseurl_key, more): ...
"""


def test_an_agents_function_runs_as_it_is(load: Load, api: EpisodeEndpoint, server: ScriptedServer) -> None:
    assert load(AGENT)(TASK, api) == WorkflowOutput(reward=1.0, metadata={"episode": "e"})
    assert load(AGENT, settings={"weight": 3.0})(TASK, api).reward == 3.0
    assert load(AGENT, "late")(TASK, api).reward == 2.0
    assert [one.headers["authorization"] for one in server.requests] == ["Bearer sk-e"] * 2


def test_the_address_makes_a_client_of_openais(load: Load, api: EpisodeEndpoint) -> None:
    assert load(AGENT, "with_client")(TASK, api).reward == 4.0


@pytest.mark.parametrize(("attribute", "settings"), [("wanting", {}), ("solve", {"height": 1})])
def test_an_unknown_parameter_is_named_before_anything_runs(
    load: Load, attribute: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"is called with a task, api_baseurl_key and its settings: .*(more|height)"):
        load(AGENT, attribute, settings)


def test_what_is_none_of_agentjets_is_loaded_as_ever(load: Load, api: EpisodeEndpoint) -> None:
    assert load("def solve(task, api): return {'reward': 1}")(TASK, api).reward == 1.0
    with pytest.raises(ConfigError, match="unknown parameter 'llm'"):
        load("def solve(task, llm): ...")


def test_agentscopes_model_is_refused(load: Load, api: EpisodeEndpoint) -> None:
    for text in ("def solve(task, api_baseurl_key): api_baseurl_key.as_agentscope_model()", CLASS_WITH_AGENTSCOPE):
        with pytest.raises(ConfigError, match="give AgentScope's OpenAIChatModel the episode's base_url"):
            load(text)(TASK, api)


CLASS_WITH_AGENTSCOPE = """
    class solve:
        def execute(self, workflow_task, tuner):
            tuner.as_agentscope_model()
"""
