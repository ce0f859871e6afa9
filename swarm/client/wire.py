"""The calls of the swarm wire and how their answers are read, free of I/O: both clients share it.

Invariant: an answer is either the model that the call names or an error of our tree that says what to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

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
from swarm.types import Model, WorkflowOutput

AnswerT = TypeVar("AnswerT", bound=BaseModel)
AnswerT_co = TypeVar("AnswerT_co", bound=BaseModel, covariant=True)
ModelT = TypeVar("ModelT", bound=BaseModel)

#: Seconds a long poll may take beyond the time that it was asked to wait.
WAIT_GRACE = 10.0
#: Seconds that sending code may take.
CODE_TIMEOUT = 120.0
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


class EpisodeGroup(list[EpisodeEndpoint]):
    """Episodes claimed at once, in the order of the claim.

    ``base_url`` and ``api_key`` are of the group: one chat call there samples an answer for each of its episodes,
    choice ``i`` for episode ``i``. They are empty where the server offers no such address.
    """

    def __init__(
        self, episodes: Iterable[EpisodeEndpoint] = (), group_uuid: str = "", base_url: str = "", api_key: str = ""
    ) -> None:
        super().__init__(episodes)
        self.group_uuid = group_uuid
        self.base_url = base_url
        self.api_key = api_key

    @property
    def episode_uuids(self) -> list[str]:
        """The names of the episodes."""
        return [one.episode_uuid for one in self]


@dataclass(frozen=True)
class Call(Generic[AnswerT_co]):
    """One request: ``answer`` is the model of its answer, ``timeout`` its seconds (``None``: the client's). The body is
    a model, sent as JSON, or the bytes of a zip."""

    method: str
    path: str
    answer: type[AnswerT_co]
    body: BaseModel | bytes | None = None
    timeout: float | None = None
    query: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])

    @property
    def content(self) -> bytes | None:
        """The body as it is sent."""
        return self.body.model_dump_json().encode() if isinstance(self.body, BaseModel) else self.body

    @property
    def content_type(self) -> str | None:
        """What the body is."""
        if self.body is None:
            return None
        return "application/json" if isinstance(self.body, BaseModel) else "application/zip"


ClaimCall = Call[protocol.ClaimEpisodeResponse] | Call[protocol.ClaimGroupResponse]

STATUS = Call("GET", "/status", protocol.ServerStatus)
# AgentJet's clients are shown a weight sync for longer than it lasts
ENGINE_STATUS = Call("GET", "/get_engine_status", protocol.EngineStatus, query={"exact": 1})
POOL = Call("GET", "/get_current_batch_rollout_pool_information", protocol.PoolInformation)
EPISODE_BUFFER = Call("POST", "/get_episode_buffer", protocol.EpisodeBufferResponse)
# commands answer when the thing is done: stopping waits for the engine's grace period
START_ENGINE = Call("POST", "/start_engine", protocol.StartEngineResponse, timeout=60.0)
STOP_ENGINE = Call("POST", "/stop_engine", protocol.SuccessResponse, timeout=120.0)


def wait_status_call(after_change: int | None, wait_seconds: float) -> Call[protocol.ServerStatus]:
    """The status once the engine's state is another than at ``after_change`` (``None``: at once) or the time is over;
    without the history of steps."""
    query: dict[str, str | int | float] = {"steps": 0}
    if after_change is not None:
        query |= {"after_change": after_change, "wait_seconds": wait_seconds}
    return Call("GET", "/status", protocol.ServerStatus, timeout=wait_seconds + WAIT_GRACE, query=query)


def claim_call(
    client_uuid: str,
    count: int | None,
    wait_seconds: float,
    episode_type: protocol.EpisodeType,
    discard_episode_timeout: float,
    *,
    max_episode_seconds: float | None,
    throttle_policy: protocol.SwarmThrottlePolicy | None,
    idempotency_key: str,
    standby: bool = False,
) -> ClaimCall:
    """Claim ``count`` episodes at once, or the one of ``/claim_episode`` where ``count`` is ``None``."""
    fields: dict[str, Any] = {
        "client_uuid": client_uuid,
        "episode_type": episode_type,
        "discard_episode_timeout": discard_episode_timeout,
        "max_episode_seconds": max_episode_seconds,
        "throttle_policy": throttle_policy,
        "wait_seconds": wait_seconds,
        "idempotency_key": idempotency_key,
        "standby": standby,
    }
    timeout = wait_seconds + WAIT_GRACE
    if count is None:
        one = checked(protocol.ClaimEpisodeRequest, fields)
        return Call("POST", "/claim_episode", protocol.ClaimEpisodeResponse, one, timeout)
    many = checked(protocol.ClaimGroupRequest, fields | {"count": count})
    return Call("POST", "/claim_group", protocol.ClaimGroupResponse, many, timeout)


def end_episode_call(
    client_uuid: str, episode_uuid: str, task_id: str, output: WorkflowOutput
) -> Call[protocol.SuccessResponse]:
    """End one episode with its result."""
    fields = {
        "client_uuid": client_uuid,
        "episode_uuid": episode_uuid,
        "task_id": task_id,
        "workflow_output": output,
        "idempotency_key": end_key(task_id, {episode_uuid: output}),
    }
    body = checked(protocol.EndEpisodeRequest, fields)
    return Call("POST", "/end_episode", protocol.SuccessResponse, body)


def end_group_call(
    client_uuid: str, task_id: str, outputs: Mapping[str, WorkflowOutput]
) -> Call[protocol.SuccessResponse]:
    """End the episodes of one task; ``outputs`` maps episode uuid to result."""
    ends = [protocol.EpisodeEnd(episode_uuid=uuid, workflow_output=output) for uuid, output in outputs.items()]
    fields = {
        "client_uuid": client_uuid,
        "task_id": task_id,
        "ends": ends,
        "idempotency_key": end_key(task_id, outputs),
    }
    body = checked(protocol.EndGroupRequest, fields)
    return Call("POST", "/end_group", protocol.SuccessResponse, body)


def end_key(task_id: str, outputs: Mapping[str, WorkflowOutput]) -> str:
    """The name of an end, from what it says."""
    # from the content: an end that is repeated later, by another process even, is still the same end, and one with
    # another result is not
    content = [[uuid, output.model_dump_json()] for uuid, output in sorted(outputs.items())]
    return hashlib.sha256(json.dumps([task_id, content]).encode()).hexdigest()


def withdraw_call(client_uuid: str, idempotency_key: str) -> Call[protocol.SuccessResponse]:
    """Let a claim that waits go."""
    body = protocol.WithdrawClaimRequest(client_uuid=client_uuid, idempotency_key=idempotency_key)
    return Call("POST", "/withdraw_claim", protocol.SuccessResponse, body)


def abort_call(
    client_uuid: str, episode_uuid: str, reason: str = "", metadata: Mapping[str, Any] | None = None
) -> Call[protocol.SuccessResponse]:
    """Give up one episode; why is kept with it."""
    body = protocol.AbortEpisodeRequest(
        client_uuid=client_uuid, episode_uuid=episode_uuid, reason=reason, metadata=dict(metadata or {})
    )
    return Call("POST", "/abort_episode", protocol.SuccessResponse, body)


def can_continue_call(client_uuid: str, episode_uuid: str) -> Call[protocol.CanContinueResponse]:
    """Ask whether an episode is still ours."""
    body = protocol.EpisodeRequest(client_uuid=client_uuid, episode_uuid=episode_uuid)
    return Call("POST", "/can_continue_episode", protocol.CanContinueResponse, body)


def agree_call(client_uuid: str) -> Call[protocol.AgreeSyncWeightResponse]:
    """This client has no more for the current batch."""
    body = protocol.AgreeSyncWeightRequest(client_uuid=client_uuid)
    return Call("POST", "/agree_sync_weight", protocol.AgreeSyncWeightResponse, body)


def sync_code_call(archive: bytes) -> Call[protocol.SuccessResponse]:
    """Hand a zip of training code to an OFFLINE server."""
    return Call("POST", "/sync_train_code", protocol.SuccessResponse, archive, timeout=CODE_TIMEOUT)


def read_archive(archive: bytes | str | os.PathLike[str]) -> bytes:
    """The bytes of a zip that is given as such or by its path.

    Raises:
        ConfigError: there is no such file.
    """
    if isinstance(archive, bytes):
        return archive
    try:
        return Path(archive).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read the code archive {archive}: {exc.strerror or exc}") from exc


def sync_config_call(job: TrainJob) -> Call[protocol.SuccessResponse]:
    """Hand the job to an OFFLINE server."""
    body = protocol.SyncTrainConfigRequest(yaml_as_string=dump_job(job))
    return Call("POST", "/sync_train_config", protocol.SuccessResponse, body)


def checked(model: type[ModelT], fields: Mapping[str, Any]) -> ModelT:
    """A request body from a caller's arguments.

    Raises:
        RequestError: an argument is out of range; names each.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        wrong = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
        raise RequestError(wrong) from exc


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


def parse_token(text: str) -> str:
    """``text`` as it can stand in a header; the line's end that a file of secrets has is left out.

    Raises:
        ConfigError: it has characters that no header takes; it is not told, it is a secret.
    """
    token = text.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("the token of the swarm server (token=... or SWARM_TOKEN) has characters that no token has")
    return token


def at_server(server_url: httpx.URL, path: str) -> str:
    """``path`` below the address (and path prefix) of the server."""
    return str(server_url).rstrip("/") + path


def episodes_of(
    answer: protocol.ClaimEpisodeResponse | protocol.ClaimGroupResponse, server_url: httpx.URL
) -> EpisodeGroup:
    """The episodes of a successful claim.

    The host of each base URL is replaced by the address under which *we* reach the server, which cannot know it.
    """

    def here(openai_base_url: str) -> str:
        return at_server(server_url, urlsplit(openai_base_url).path) if openai_base_url else ""

    if isinstance(answer, protocol.ClaimEpisodeResponse):
        fields = answer.model_dump(include=set(protocol.ClaimedEpisode.model_fields))
        return episodes_of(
            protocol.ClaimGroupResponse(
                success=True, client_uuid=answer.client_uuid, episodes=[protocol.ClaimedEpisode(**fields)]
            ),
            server_url,
        )
    return EpisodeGroup(
        (
            EpisodeEndpoint(
                episode_uuid=one.episode_uuid, base_url=here(one.openai_base_url), api_key=one.openai_api_key
            )
            for one in answer.episodes
        ),
        answer.group_uuid,
        here(answer.openai_base_url),
        answer.openai_api_key,
    )


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
    except (ValueError, AttributeError, RecursionError) as exc:
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
    if reply.status == 401:
        text += "; pass the server's token (token=... or SWARM_TOKEN)"
    return _STATUS_ERRORS.get(reply.status, RequestError)(text, code=code, param=param)


def _said(reply: Reply) -> tuple[str, str | None, str | None]:
    """Message, code and parameter of an error body: OpenAI-shaped, ``{success, error}``, or anything."""
    try:
        data: Any = json.loads(reply.content)
    except (ValueError, RecursionError):
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
