"""A user's workflow as a function of a task and an episode's address: plain functions and coroutines.

Invariant: each episode has clients of its own, with the key of that episode, which are closed with it; a workflow that
returns no finite reward fails, and never counts as a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, SupportsFloat, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from swarm.client.wire import EpisodeEndpoint, warn_of_left_out
from swarm.errors import ConfigError
from swarm.importer import load_attribute
from swarm.packs import added
from swarm.protocol import WireOutput
from swarm.types import Task, WorkflowOutput
from swarm.validation import describe_validation

#: Runs one episode in a thread.
Execute = Callable[[Task, EpisodeEndpoint], WorkflowOutput]

#: Parameters that a workflow may have after its first one, the task.
PARAMETERS = ("client", "base_url", "api_key", "api")
#: The model name of clients that are not told one: an episode's address serves one model, whatever it is called.
MODEL = "policy"
_OUTPUT: TypeAdapter[WorkflowOutput] = TypeAdapter(WireOutput)


def find_workflow(spec: str, settings: Mapping[str, Any] | None = None) -> Execute:
    """:func:`load_workflow`, or what a pack loads in its place, which knows further forms."""
    return (added("workflow") or load_workflow)(spec, settings)


def load_workflow(spec: str, settings: Mapping[str, Any] | None = None) -> Execute:
    """The workflow at ``module:attribute``: a function or a coroutine function.

    A function gets the task first, and of :data:`PARAMETERS` those that it names: ``client``, an ``openai.OpenAI`` (a
    coroutine function: ``AsyncOpenAI``); ``base_url`` and ``api_key``; or ``api``, both in one. It returns a
    :class:`WorkflowOutput`. Coroutines run on an event loop of their own, so one that blocks holds up no other.
    ``settings`` are values for further parameters of a function, by name.

    Raises:
        ConfigError: it does not import, is of another kind, has other parameters, or `openai` is not installed.
    """
    target: Any = load_attribute(spec)
    settings = dict(settings or {})
    if not inspect.isroutine(target):
        raise ConfigError(f"{spec} is a {type(target).__name__}: a workflow is a function")
    wanted = _parameters(spec, target, settings)
    if "client" in wanted:
        _openai()
    return partial(_run_function, spec, cast("Callable[..., Any]", target), wanted, settings)


def _parameters(spec: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> tuple[str, ...]:
    first, *rest = [*inspect.signature(function).parameters.values(), None]
    if first is None:
        raise ConfigError(f"{spec} takes no argument: its first one is the task")
    named = [parameter for parameter in rest if parameter is not None]
    if unknown := [name for name in settings if name not in {parameter.name for parameter in named} - set(PARAMETERS)]:
        raise ConfigError(f"{spec} has no parameter for the setting {unknown[0]!r}")
    wrong = [
        parameter.name
        for parameter in named
        if parameter.name not in {*PARAMETERS, *settings} and parameter.default is parameter.empty
    ]
    if wrong:
        raise ConfigError(
            f"{spec}: unknown parameter {wrong[0]!r}; after the task there may be {', '.join(PARAMETERS)}"
        )
    return tuple(parameter.name for parameter in named if parameter.name in PARAMETERS)


def _run_function(
    spec: str,
    function: Callable[..., Any],
    wanted: tuple[str, ...],
    settings: Mapping[str, Any],
    task: Task,
    api: EpisodeEndpoint,
) -> WorkflowOutput:
    offered: dict[str, Any] = {"base_url": api.base_url, "api_key": api.api_key, "api": api}
    arguments = {**settings, **{name: offered[name] for name in wanted if name in offered}}
    if inspect.iscoroutinefunction(function):

        async def run() -> Any:
            if "client" not in wanted:
                return await function(task, **arguments)
            async with async_client(api) as client:
                return await function(task, client=client, **arguments)

        return output_of(asyncio.run(run()), spec)
    if "client" not in wanted:
        return output_of(function(task, **arguments), spec)
    with _client(api) as client:
        return output_of(function(task, client=client, **arguments), spec)


def output_of(result: Any, spec: str) -> WorkflowOutput:
    """What a workflow returned, as ours; of its metrics the numbers, of any library, with a warning of those that are
    not finite.

    Raises:
        ConfigError: it is no workflow output, or has no finite reward.
    """
    if isinstance(result, WorkflowOutput):
        return result
    fields: Any = result.model_dump() if isinstance(result, BaseModel) else result
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{spec} returned a {type(result).__name__}; a workflow returns WorkflowOutput(reward=...)")
    numbers: dict[str, float] = {}
    metrics: Any = fields.get("log_metrics")
    if isinstance(metrics, Mapping):
        for name, value in cast("Mapping[Any, Any]", metrics).items():
            # an array, and an integer beyond any float, are none
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):
                if isinstance(value, SupportsFloat):
                    numbers[str(name)] = float(value)
        fields = {**fields, "log_metrics": numbers}
    try:
        output = _OUTPUT.validate_python(fields)
    except ValidationError as exc:
        raise describe_validation(exc, f"what {spec} returned") from exc
    warn_of_left_out(numbers)
    return output


def _openai() -> Any:
    try:
        import openai
    except ImportError as exc:
        raise ConfigError("a workflow with a `client` needs openai: pip install '.[train]' in a clone") from exc
    return openai


def _http(api: EpisodeEndpoint) -> dict[str, Any]:
    # no proxy between two processes of ours, and the authorities that our own calls trust: httpx has a list of its own.
    # To read them takes long, and plain HTTP needs none.
    return {"trust_env": False, "verify": api.base_url.startswith("https:") and ssl.create_default_context()}


def _client(api: EpisodeEndpoint) -> Any:
    openai = _openai()
    http = openai.DefaultHttpxClient(**_http(api))
    return openai.OpenAI(base_url=api.base_url, api_key=api.api_key, http_client=http)


def async_client(api: EpisodeEndpoint) -> Any:
    """An ``openai.AsyncOpenAI`` for one episode.

    Raises:
        ConfigError: `openai` is not installed.
    """
    openai = _openai()
    http = openai.DefaultAsyncHttpxClient(**_http(api))
    return openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, http_client=http)
