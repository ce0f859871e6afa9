"""Workflows that were written for AgentJet, for ``train``: its classes, and ``execute_agent(task, api_baseurl_key)``.

Invariant: each episode has a client of its own, with the key of that episode, which is closed with it.

AgentJet's names are those of its public interface: ``Workflow.execute(workflow_task, tuner)``, and of its tuner
``as_oai_baseurl_apikey`` and ``as_raw_openai_sdk_client``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from swarm import types
from swarm.agentjet.schema import OpenaiBaseUrlAndApiKey, Task, WorkflowTask
from swarm.agentjet.shim import install
from swarm.client import EpisodeEndpoint
from swarm.client import workflow as plain
from swarm.errors import ConfigError
from swarm.importer import load_attribute

#: The parameter of a function by which AgentJet's agents get where they sample.
ENDPOINT = "api_baseurl_key"


class Workflow(BaseModel):
    """AgentJet's ``Workflow``."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    name: str = "default_workflow"
    trainable_targets: list[str] | None = None

    async def execute(self, workflow_task: Any, tuner: Any) -> Any:
        """Run one episode."""
        raise NotImplementedError


class Tuner:
    """AgentJet's tuner for one episode; every agent of it is trained."""

    def __init__(self, api: EpisodeEndpoint, client: Any) -> None:
        self._api = api
        self._client = client

    def as_oai_baseurl_apikey(self, *_: Any, **__: Any) -> Any:
        """Where the episode samples: ``base_url``, ``api_key`` and ``model_name``."""
        return SimpleNamespace(base_url=self._api.base_url, api_key=self._api.api_key, model_name=plain.MODEL)

    def as_raw_openai_sdk_client(self, *_: Any, **__: Any) -> Any:
        """Something with ``chat.completions.create``, to be awaited; the model need not be named."""

        async def create(**arguments: Any) -> Any:
            return await self._client.chat.completions.create(**{"model": plain.MODEL, **arguments})

        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    as_agentscope_model = OpenaiBaseUrlAndApiKey.as_agentscope_model


def load_workflow(spec: str, settings: Mapping[str, Any] | None = None) -> plain.Execute:
    """:func:`swarm.client.workflow.load_workflow`, and AgentJet's forms: a class with ``execute(workflow_task,
    tuner)``, or a function with the parameter ``api_baseurl_key``. Modules may import ``ajet``, installed or not.

    Raises:
        ConfigError: it does not import, is of another kind, or has other parameters.
    """
    install()
    target: Any = load_attribute(spec)
    if inspect.isclass(target) and callable(getattr(target, "execute", None)):
        if settings:
            raise ConfigError(f"{spec} is no function, so it has no settings")
        return partial(_run_class, spec, target)
    if inspect.isroutine(target) and ENDPOINT in inspect.signature(target).parameters:
        agent = partial(cast("Callable[..., Any]", target), **(settings or {}))
        try:
            inspect.signature(agent).bind(None, **{ENDPOINT: None})
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"{spec} is called with a task, {ENDPOINT} and its settings: {exc}") from exc
        return partial(_run_agent, spec, agent)
    return plain.load_workflow(spec, settings)


def _run_class(spec: str, workflow: type, task: types.Task, api: EpisodeEndpoint) -> types.WorkflowOutput:
    workflow_task = WorkflowTask(
        env_type=task.env_type, task_id=task.task_id, episode_uuid=api.episode_uuid, task=Task(**task.model_dump())
    )

    async def run() -> Any:
        async with plain.async_client(api) as client:
            return await _awaited(workflow().execute(workflow_task, Tuner(api, client)))

    return plain.output_of(asyncio.run(run()), spec)


def _run_agent(spec: str, agent: Callable[..., Any], task: types.Task, api: EpisodeEndpoint) -> types.WorkflowOutput:
    endpoint = OpenaiBaseUrlAndApiKey(base_url=api.base_url, api_key=api.api_key, episode_uuid=api.episode_uuid)
    result = agent(Task(**task.model_dump()), **{ENDPOINT: endpoint})
    return plain.output_of(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result, spec)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
