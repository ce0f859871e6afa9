"""The calls of the swarm wire and how their answers are read, free of I/O: both clients share it.

Invariant: an answer is either the model that the call names or an error of our tree that says what to do.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar, cast

import httpx
from pydantic import BaseModel, ValidationError

from swarm import protocol
from swarm.client.policy import Reply, retry_after
from swarm.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
    SwarmGatewayError,
    UnavailableError,
    UpstreamError,
)
from swarm.job import TrainJob, dump_job
from swarm.states import EngineState
from swarm.types import Model, WorkflowOutput

AnswerT = TypeVar("AnswerT", bound=BaseModel)
AnswerT_co = TypeVar("AnswerT_co", bound=BaseModel, covariant=True)

#: Seconds a long poll may take beyond the time that it was asked to wait.
WAIT_GRACE = 10.0
#: Long polls hold a connection each; idle ones go well before the server closes them under a request (75 s).
LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=128, keepalive_expiry=30.0)


@cache
def tls_context() -> ssl.SSLContext:
    """One context for all HTTP clients of the process: reading the certificates takes some 30 ms each time."""
    return httpx.create_ssl_context(trust_env=False)


_STATUS_ERRORS: dict[int, type[RequestError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
}


class EpisodeEndpoint(Model):
    """Where one claimed episode samples: an OpenAI ``base_url`` and its key, both dead once the episode is over."""

    episode_uuid: str
    base_url: str
    api_key: str


@dataclass(frozen=True)
class Call(Generic[AnswerT_co]):
    """One request: ``answer`` is the model of its answer, ``timeout`` its seconds (``None``: the client's)."""

    method: str
    path: str
    answer: type[AnswerT_co]
    body: BaseModel | None = None
    timeout: float | None = None
    query: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])

    @property
    def content(self) -> bytes | None:
        """The JSON body."""
        return None if self.body is None else self.body.model_dump_json().encode()


ClaimCall = Call[protocol.ClaimEpisodeResponse] | Call[protocol.ClaimGroupResponse]

STATUS = Call("GET", "/status", protocol.ServerStatus)
ENGINE_STATUS = Call("GET", "/get_engine_status", protocol.EngineStatus)
POOL = Call("GET", "/get_current_batch_rollout_pool_information", protocol.PoolInformation)
# commands answer when the thing is done: stopping waits for the engine's grace period
START_ENGINE = Call("POST", "/start_engine", protocol.StartEngineResponse, timeout=60.0)
STOP_ENGINE = Call("POST", "/stop_engine", protocol.SuccessResponse, timeout=120.0)


def wait_status_call(state: EngineState, wait_seconds: float) -> Call[protocol.ServerStatus]:
    """The status once the engine is in ``state``, goes OFFLINE, or the time is over; without the history of steps."""
    query = {"wait_state": str(state), "wait_seconds": wait_seconds, "steps": 0}
    return Call("GET", "/status", protocol.ServerStatus, timeout=wait_seconds + WAIT_GRACE, query=query)


def claim_call(
    client_uuid: str,
    count: int | None,
    wait_seconds: float,
    episode_type: protocol.EpisodeType,
    discard_episode_timeout: float,
    throttle_policy: Mapping[str, Any] | None = None,
) -> ClaimCall:
    """Claim ``count`` episodes at once, or the one of ``/claim_episode`` where ``count`` is ``None``."""
    fields: dict[str, Any] = {
        "client_uuid": client_uuid,
        "episode_type": episode_type,
        "discard_episode_timeout": discard_episode_timeout,
        "throttle_policy": None if throttle_policy is None else dict(throttle_policy),
        "wait_seconds": wait_seconds,
    }
    timeout = wait_seconds + WAIT_GRACE
    if count is None:
        one = protocol.ClaimEpisodeRequest(**fields)
        return Call("POST", "/claim_episode", protocol.ClaimEpisodeResponse, one, timeout)
    many = protocol.ClaimGroupRequest(**fields, count=count)
    return Call("POST", "/claim_group", protocol.ClaimGroupResponse, many, timeout)


def end_episode_call(
    client_uuid: str, episode_uuid: str, task_id: str, output: WorkflowOutput
) -> Call[protocol.SuccessResponse]:
    """End one episode with its result."""
    body = protocol.EndEpisodeRequest(
        client_uuid=client_uuid, episode_uuid=episode_uuid, task_id=task_id, workflow_output=output
    )
    return Call("POST", "/end_episode", protocol.SuccessResponse, body)


def end_group_call(
    client_uuid: str, task_id: str, outputs: Mapping[str, WorkflowOutput]
) -> Call[protocol.SuccessResponse]:
    """End the episodes of one task; ``outputs`` maps episode uuid to result."""
    ends = [protocol.EpisodeEnd(episode_uuid=uuid, workflow_output=output) for uuid, output in outputs.items()]
    body = protocol.EndGroupRequest(client_uuid=client_uuid, task_id=task_id, ends=ends)
    return Call("POST", "/end_group", protocol.SuccessResponse, body)


def abort_call(client_uuid: str, episode_uuid: str) -> Call[protocol.SuccessResponse]:
    """Give up one episode."""
    body = protocol.EpisodeRequest(client_uuid=client_uuid, episode_uuid=episode_uuid)
    return Call("POST", "/abort_episode", protocol.SuccessResponse, body)


def can_continue_call(client_uuid: str, episode_uuid: str) -> Call[protocol.CanContinueResponse]:
    """Ask whether an episode is still ours."""
    body = protocol.EpisodeRequest(client_uuid=client_uuid, episode_uuid=episode_uuid)
    return Call("POST", "/can_continue_episode", protocol.CanContinueResponse, body)


def sync_config_call(job: TrainJob) -> Call[protocol.SuccessResponse]:
    """Hand the job to an OFFLINE server."""
    body = protocol.SyncTrainConfigRequest(yaml_as_string=dump_job(job))
    return Call("POST", "/sync_train_config", protocol.SuccessResponse, body)


def parse_server_url(text: str) -> httpx.URL:
    """The address of a swarm server; ``http://`` may be left out and a path prefix may be there.

    Raises:
        ConfigError: not an http address.
    """
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except (httpx.InvalidURL, TypeError) as exc:
        raise ConfigError(f"server_url {text!r} is no URL: {exc}; write it like http://127.0.0.1:10086") from exc
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"server_url {text!r} must look like http://127.0.0.1:10086")
    return url.copy_with(path=url.path.rstrip("/") or "/", query=None, fragment=None)


def at_server(server_url: httpx.URL, path: str) -> str:
    """``path`` below the address (and path prefix) of the server."""
    return str(server_url.copy_with(path=server_url.path.rstrip("/") + path))


def endpoints(
    answer: protocol.ClaimEpisodeResponse | protocol.ClaimGroupResponse, server_url: httpx.URL
) -> list[EpisodeEndpoint]:
    """The episodes of a successful claim.

    The host of each base URL is replaced by the address under which *we* reach the server, which cannot know it.
    """
    claimed = (
        answer.episodes
        if isinstance(answer, protocol.ClaimGroupResponse)
        else [
            protocol.ClaimedEpisode(
                episode_uuid=answer.episode_uuid,
                openai_base_url=answer.openai_base_url,
                openai_api_key=answer.openai_api_key,
            )
        ]
    )
    return [
        EpisodeEndpoint(
            episode_uuid=one.episode_uuid,
            base_url=at_server(server_url, httpx.URL(one.openai_base_url).path),
            api_key=one.openai_api_key,
        )
        for one in claimed
    ]


def read_answer(call: Call[AnswerT], reply: Reply) -> AnswerT:
    """The answer to ``call``; fields that a newer server adds are ignored.

    Raises:
        SwarmGatewayError: the subclass that fits an error status or ``success: false``.
        UpstreamError: the answer is not what the wire promises.
    """
    if reply.status >= 400:
        raise error_of(call, reply)
    try:
        data: Any = json.loads(reply.content)
        answer = call.answer.model_validate({k: v for k, v in data.items() if k in call.answer.model_fields})
    except (ValueError, AttributeError) as exc:
        detail = f"{exc.error_count()} wrong fields" if isinstance(exc, ValidationError) else "not a JSON object"
        raise UpstreamError(
            f"{call.path}: the server's answer is {detail}; is that a swarm server?", code="bad_answer"
        ) from exc
    if isinstance(answer, protocol.SuccessResponse) and not answer.success:
        raise ConflictError(f"{call.path}: {answer.error or 'refused'}", code="refused")
    return answer


def error_of(call: Call[Any], reply: Reply) -> SwarmGatewayError:
    """The error that an answer with an error status stands for."""
    message, code, param = _said(reply)
    text = f"{call.path}: {message}"
    if reply.status == 503:
        return UnavailableError(text, code=code, retry_after=retry_after(reply) or 5.0)
    if reply.status >= 500:
        return UpstreamError(f"{text} (HTTP {reply.status})", code=code)
    if reply.status in (401, 403):
        text += "; pass the server's token (token=... or SWARM_TOKEN)"
    return _STATUS_ERRORS.get(reply.status, RequestError)(text, code=code, param=param)


def _said(reply: Reply) -> tuple[str, str | None, str | None]:
    """Message, code and parameter of an error body: OpenAI-shaped, ``{success, error}``, or anything."""
    try:
        data: Any = json.loads(reply.content)
    except ValueError:
        data = None
    if isinstance(data, dict):
        body = cast("dict[str, Any]", data)
        error: Any = body.get("error") or body.get("detail")
        if isinstance(error, dict):
            shaped = cast("dict[str, Any]", error)
            return str(shaped.get("message") or "failed"), shaped.get("code"), shaped.get("param")
        if error:
            code = body.get("code")
            return str(error), code if isinstance(code, str) else None, None
    text = reply.content[:200].decode(errors="replace").strip()
    return text or f"HTTP {reply.status}", None, None
