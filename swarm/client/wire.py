"""The calls of the swarm API, how their answers are read, and when they are repeated, without I/O.

Invariant: an answer is either the model that the call names or an error that says what to do. Retries are bounded in
number and time, and delayed with jitter. Every call may be repeated: reads and commands by nature, claims, ends and
agreements because they carry the same idempotency key each time.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from swarm import protocol
from swarm.concurrency import backoff
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
from swarm.http.client import Answer, ConnectionBrokenError, retry_after
from swarm.measures import MAX_NAME
from swarm.status import EngineStatus, ServerStatus
from swarm.types import Model, Notes, WorkflowOutput

AnswerT = TypeVar("AnswerT", bound=BaseModel)
AnswerT_co = TypeVar("AnswerT_co", bound=BaseModel, covariant=True)
ModelT = TypeVar("ModelT", bound=BaseModel)

#: What sending a request leads to; a timeout is the caller's own.
Outcome = Answer | ConnectionBrokenError | TimeoutError

#: The server, or a proxy in front of it, did not act on the request.
_NOT_NOW = frozenset({502, 503, 504})
#: Seconds a long poll may take beyond the time that it was asked to wait.
WAIT_GRACE = 10.0

_STATUS_ERRORS: dict[int, type[RequestError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
}


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter.

    The k-th delay is uniform in [d/2, d] with d = min(``cap``, ``base`` * 2**k) seconds, or what ``retry-after`` asks
    for if that is longer. It ends after ``attempts`` tries or ``total`` seconds, whichever comes first. Where the
    connection of a call broke that may take longer than ``total``, such as an upload, the call is tried again for as
    long as it may take.
    """

    attempts: int = 20
    base: float = 0.2
    cap: float = 5.0
    total: float = 60.0

    def delay(self, failures: int, retry_after: float = 0.0) -> float:
        """Seconds to wait after the ``failures``-th failure in a row (1 for the first)."""
        return max(backoff(failures, self.base, self.cap), retry_after)


def may_retry(outcome: Outcome) -> bool:
    """Whether repeating the request unchanged can lead to another outcome.

    ``x-should-retry`` decides where the server sends it; then ``retry-after``; then the status.
    """
    if not isinstance(outcome, Answer):
        return True
    if outcome.status < 400:
        return False
    should = outcome.headers.get("x-should-retry")
    if should in ("true", "false"):
        return should == "true"
    return "retry-after" in outcome.headers or outcome.status in _NOT_NOW


class EpisodeEndpoint(Model):
    """Where one claimed episode samples: an OpenAI ``base_url`` and its key, valid until the episode is over."""

    episode_uuid: str
    base_url: str
    api_key: str


class EpisodeGroup(list[EpisodeEndpoint]):
    """Episodes claimed at once, in the order of the claim.

    ``base_url`` and ``api_key`` are the group's: one chat request there samples an answer for each of its episodes,
    choice ``i`` for episode ``i``. They are empty if the server offers no such address.
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
        return [endpoint.episode_uuid for endpoint in self]


class Content(Model):
    """An answer that is not JSON."""

    content: bytes


@dataclass(frozen=True)
class Call(Generic[AnswerT_co]):
    """One request.

    Attributes:
        answer: model of the answer.
        body: a model, sent as JSON, or the bytes of a zip.
        timeout: seconds; ``None``: the client's.
    """

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
        """Media type of the body."""
        if self.body is None:
            return None
        return "application/json" if isinstance(self.body, BaseModel) else "application/zip"


# exact: AgentJet's clients are shown a weight sync for longer than it lasts
ENGINE_STATUS = Call("GET", "/get_engine_status", EngineStatus, query={"exact": 1})
# the answer comes when the engine has stopped, which takes up to its grace period
STOP_ENGINE = Call("POST", "/stop_engine", protocol.SuccessResponse, timeout=120.0)


def wait_status_call(after_change: int | None, wait_seconds: float) -> Call[ServerStatus]:
    """The status once the state of engine or trainer has changed since ``after_change`` (``None``: at once) or the time
    is over; without the history of steps."""
    query: dict[str, str | int | float] = {"steps": 0}
    if after_change is not None:
        query |= {"after_change": after_change, "wait_seconds": wait_seconds}
    return Call("GET", "/status", ServerStatus, timeout=wait_seconds + WAIT_GRACE, query=query)


def with_code(output: WorkflowOutput, code: str) -> WorkflowOutput:
    """``output`` with the digest ``code`` in its notes, if they have none.

    Raises:
        RequestError: it is no result.
    """
    if not isinstance(output, WorkflowOutput):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(output).__name__
        raise RequestError(f"the result of an episode is a WorkflowOutput(reward=...), not a {kind}", param="reward")
    notes = output.notes or Notes()
    if notes.code or not code:
        return output
    return output.model_copy(update={"notes": notes.model_copy(update={"code": code})})


def end_key(task_id: str, outputs: Mapping[str, WorkflowOutput]) -> str:
    """The idempotency key of an end, from its content: the same end repeated later, even by another process, has the
    same key, and one with another result does not.

    Raises:
        RequestError: an output's metadata cannot be JSON.
    """
    try:
        content = [[uuid, output.model_dump_json()] for uuid, output in sorted(outputs.items())]
    except PydanticSerializationError as exc:
        raise RequestError(f"metadata of the workflow output cannot be JSON: {exc}", param="metadata") from exc
    return hashlib.sha256(json.dumps([task_id, content]).encode()).hexdigest()


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


def parse_server_url(text: str) -> str:
    """The address of a swarm server, without a slash at its end. ``http://`` may be left out; a path prefix is kept, a
    query and a token are not (see :func:`parse_server_query`, :func:`parse_server_token`).

    Raises:
        ConfigError: not an http address, or that of an OpenAI API.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port >= 0)
    except ValueError as exc:
        shown = without_token(text)
        raise ConfigError(f"server_url {shown!r} is no URL: {exc}; write it like http://127.0.0.1:10086") from exc
    if not valid:
        raise ConfigError(f"server_url {without_token(text)!r} must look like http://127.0.0.1:10086")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ConfigError(
            f"server_url {without_token(text)!r} ends with /v1, where models are asked: give the address of the swarm "
            "server, such as http://127.0.0.1:10086"
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def parse_server_token(text: str) -> str | None:
    """The token in the address of a server, ``http://x:TOKEN@host``, if there is one."""
    password = urlsplit(text if "://" in text else f"http://{text}").password
    return None if password is None else unquote(password)


def without_token(text: str) -> str:
    """The address of a server as it may be told."""
    scheme, mark, rest = text.partition("://") if "://" in text else ("", "", text)
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def parse_server_query(text: str) -> dict[str, str]:
    """What the address of a server adds to the query of every call, such as the route of a gateway's admin routes."""
    return dict(parse_qsl(urlsplit(text if "://" in text else f"http://{text}").query))


def parse_token(text: str) -> str:
    """``text`` as a header can hold it, without the newline at the end of a file of secrets.

    Raises:
        ConfigError: it has characters that no header can hold; the message does not quote the secret.
    """
    token = text.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("the token of the swarm server (token=... or SWARM_TOKEN) has characters that no token has")
    return token


def episodes_of(answer: protocol.ClaimEpisodeResponse | protocol.ClaimGroupResponse, server_url: str) -> EpisodeGroup:
    """The episodes of a successful claim.

    The host of each base URL is replaced by the address under which this client reaches the server, which the server
    does not know.
    """

    def here(openai_base_url: str) -> str:
        return server_url + urlsplit(openai_base_url).path if openai_base_url else ""

    def endpoint(claimed: protocol.ClaimedEpisode | protocol.ClaimEpisodeResponse) -> EpisodeEndpoint:
        return EpisodeEndpoint(
            episode_uuid=claimed.episode_uuid, base_url=here(claimed.openai_base_url), api_key=claimed.openai_api_key
        )

    if isinstance(answer, protocol.ClaimEpisodeResponse):
        return EpisodeGroup([endpoint(answer)])
    return EpisodeGroup(
        map(endpoint, answer.episodes), answer.group_uuid, here(answer.openai_base_url), answer.openai_api_key
    )


_SECRET = (
    "pass an admin key of the gateway (--api-key or SWARM_GATEWAY_KEY) or, to a swarm server, its token (token=..., "
    "--token or SWARM_TOKEN)"
)


def read_answer(call: Call[AnswerT], reply: Answer) -> AnswerT:
    """The answer to ``call``; fields that a newer server adds are ignored.

    Raises:
        SwarmGatewayError: the subclass that fits an error status or ``success: false``.
        UpstreamError: the answer is not what the wire promises.
    """
    if reply.status >= 400:
        raise error_of(call, reply)
    if reply.status >= 300:
        to = reply.headers.get("location", "nowhere")
        raise UpstreamError(
            f"{call.path}: HTTP {reply.status} leads to {to}; calls follow nothing, so give the address that it means",
            code="bad_answer",
        )
    if issubclass(call.answer, Content):
        return call.answer(content=reply.content)
    try:
        answer = validate_known(call.answer, orjson.loads(reply.content))
    except (ValueError, LookupError, TypeError) as exc:
        detail = f"has {exc.error_count()} wrong fields" if isinstance(exc, ValidationError) else "is no JSON object"
        raise UpstreamError(
            f"{call.path}: the server's answer {detail}; is that a swarm server?", code="bad_answer"
        ) from exc
    if isinstance(answer, protocol.SuccessResponse) and not answer.success:
        raise ConflictError(f"{call.path}: {answer.error or 'refused'}", code="refused")
    return answer


def validate_known(model: type[AnswerT], data: Any) -> AnswerT:
    """``data`` as ``model``, which may forbid unknown fields, as its parts may: all of them are left out, of ``data``
    too.

    Raises:
        ValidationError: something else is wrong.
        LookupError, TypeError: an unknown field is in a part that may be of several kinds, and is not found there.
    """
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        unknown = [error["loc"] for error in exc.errors() if error["type"] == "extra_forbidden"]
        if not unknown:
            raise
    for *path, name in unknown:
        reduce(getitem, path, data).pop(name)
    return model.model_validate(data)


def error_of(call: Call[Any], reply: Answer) -> SwarmGatewayError:
    """The error for an answer with an error status."""
    message, code, param = _error_body(reply)
    text = f"{call.path}: {message}"
    if reply.status == 503 or (reply.status in _NOT_NOW and code is None):
        # every error of ours has a code: one without is a proxy's, in front of a server that is away
        return UnavailableError(text, code=code or "server_unreachable", retry_after=retry_after(reply.headers) or 5.0)
    if reply.status >= 500:
        return UpstreamError(f"{text} (HTTP {reply.status})", code=code)
    if reply.status == 401:
        text += f"; {_SECRET}"
    if reply.status == 404 and code in (None, "route_not_found"):
        text += "; a swarm server and its gateway have different addresses: is this the right one?"
    return _STATUS_ERRORS.get(reply.status, RequestError)(text, code=code, param=param)


def _error_body(reply: Answer) -> tuple[str, str | None, str | None]:
    """Message, code and parameter of an error body: OpenAI-shaped, ``{success, error}``, or anything."""
    try:
        data: Any = orjson.loads(reply.content)
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
    if text.startswith("<"):
        return f"HTTP {reply.status} and a page, as of a proxy", None, None
    return text or f"HTTP {reply.status}", None, None


def warn_of_left_out(log_metrics: Mapping[str, float]) -> None:
    """Warn of values that are not finite, which JSON has no form for; Python shows each text once."""
    for name, value in log_metrics.items():
        if not math.isfinite(value):
            left_out = "it is left out, and its mean is over the other episodes"
            warnings.warn(f"log_metrics: {name[:MAX_NAME]!r} is {value}: {left_out}", RuntimeWarning, stacklevel=2)
