"""Workflows of users: what they get, what they may return, and AgentJet's classes as they are."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from swarm.client import EpisodeEndpoint
from swarm.client.workflow import Execute, load_workflow
from swarm.errors import ConfigError
from swarm.types import Task, WorkflowOutput
from tests.swarm.client.scripted import ScriptedServer

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
        if module.startswith(("ajet", "workflow_")):
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

    class Agent:
        def execute(self, task, tuner): ...
"""


def test_settings_are_values_of_further_parameters(load: Load, api: EpisodeEndpoint) -> None:
    plain = load(SETTINGS)
    assert plain(TASK, api).reward == 1.0
    name = next(one for one in sys.modules if one.startswith("workflow_"))
    assert load_workflow(f"{name}:solve", {"weight": 3.0})(TASK, api).reward == 9.0
    for attribute, wrong in (("solve", "height"), ("solve", "base_url"), ("Agent", "weight")):
        with pytest.raises(ConfigError, match=r"no parameter for the setting|has no settings"):
            load_workflow(f"{name}:{attribute}", {wrong: 1})


def test_a_workflow_without_a_task_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="takes no argument"):
        load("def solve(): ...")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned a NoneType; a workflow returns WorkflowOutput"),
        ("{'reward': None}", "reward: one number is needed"),
        ("{'reward': float('nan')}", "reward: Input should be a finite number"),
    ],
)
def test_no_reward_is_an_error_and_never_a_zero(load: Load, api: EpisodeEndpoint, returned: str, message: str) -> None:
    solve = load(f"def solve(task): return {returned}")
    with pytest.raises(ConfigError, match=message):
        solve(TASK, api)


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


def test_a_refused_call_reaches_the_workflow(load: Load, api: EpisodeEndpoint, server: ScriptedServer) -> None:
    from tests.swarm.client.scripted import Answer

    refusal: dict[str, Any] = {"error": {"message": "no", "type": "invalid_request_error", "code": None}}
    server.script("/v1/chat/completions", Answer(refusal, status=400))
    with pytest.raises(openai.BadRequestError):
        load(CLIENT)(TASK, api)
