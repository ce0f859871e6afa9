"""One ASGI endpoint per dialect: read the body, hand the request to the pipeline, deliver the outcome.

Invariant: the caller always gets an answer in its own dialect; no secret of its headers goes further.

Headers of a plain answer report its group (``x-swarm-policy-version``, ``x-swarm-reward``, ``x-swarm-reward-mean``,
``x-swarm-hook``, ``x-swarm-trained``: ``true``, ``false``, or ``pending`` until the swarm server acknowledges, and
``x-swarm-drop-reason``). A chat's stream has the report in the ``swarm`` object of the chunk with the last
``finish_reason`` (clients skip unknown fields). Every stream has it in its headers too if the group was done before the
headers left, which is with the first keep-alive at the latest. ``x-swarm-left-out`` of every answer lists the parts of
the request that the answer does not heed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from adapters.dialects import ChatDialect, Dialect, LLMRequest
from adapters.dialects.jsons import object_in
from gateway.api.exchange import Rendering, deliver
from gateway.data.consent import TRAIN_HEADER, refusal_in
from gateway.runtime import Gateway
from gateway.types import AnyRequest, Caller, Incoming, LeftOut, Outcome, Prospect
from swarm.errors import RequestError, SwarmGatewayError
from swarm.http.asgi import RawHeaders, decoded, parse_json, read_body

#: Headers with such a name never reach a hook; dropping one too many is the lesser mistake.
_SECRET_HEADER = re.compile(
    r"^(?!x-swarm-|x-claude-code-session-id$|idempotency-key$).*"
    r"(auth|cookie|credential|jwt|key|oidc|passw|secret|session|token)"
)
#: Agents that name their sessions in headers that elsewhere may hold a secret, and these headers.
_AGENT = re.compile(r"codex|opencode/")
_SESSION_NAMES = ("session-id", "x-session-id", "x-parent-session-id")
_NOBODY = Caller()


class Answering(NamedTuple):
    """How a request is answered, in which form, and the prospect of it where it is sampled here."""

    produce: Callable[[], Awaitable[Outcome]]
    rendering: Rendering
    prospect: Prospect | None = None


def caller_of(scope: Scope) -> Caller:
    """The owner of the request, as found by the keys' middleware."""
    return scope["state"].get("caller") or _NOBODY


def body_limit(limits: Mapping[str, int], scope: Scope) -> int:
    """Bytes that the body of a request may have; ``limits`` are of paths that have one of their own, and, with a slash
    at the end, of all below them."""
    path, most = scope["path"], scope["state"]["gateway"].routes.plan.config.max_body_bytes
    own = (limits[name] for name in limits if path == name or (name.endswith("/") and path.startswith(name)))
    return next(own, most)


def query_of(scope: Scope) -> str:
    """The query of the request's address, without the question mark."""
    return scope["query_string"].decode("latin-1")


def model_of(data: Mapping[str, Any]) -> str | None:
    """The model that a body names; ``None`` for anything but a text."""
    model = data.get("model")
    return model if isinstance(model, str) else None


def public_headers(headers: RawHeaders) -> dict[str, str]:
    """The headers without secrets; names in lower case, and of one name the last value, of consent the one that says
    no."""
    texts = {key.decode("latin-1"): _text_of(value) for key, value in headers}
    if no := refusal_in(headers):
        texts[TRAIN_HEADER] = no
    named = _SESSION_NAMES if _AGENT.match(texts.get("user-agent", "")) else ()
    return {name: value for name, value in texts.items() if name in named or not _SECRET_HEADER.search(name)}


def _text_of(value: bytes) -> str:
    """Beyond ASCII, clients send UTF-8 or Latin-1; what is valid UTF-8 is hardly ever meant as the other."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def plain_headers(headers: RawHeaders) -> dict[str, str]:
    """:func:`public_headers` of a body that is decoded."""
    return {name: value for name, value in public_headers(headers).items() if name != "content-encoding"}


class ApiEndpoint(ABC):
    """Answers one request in ``dialect`` (of a chat, where the address has none) with what it reads in its body; errors
    go out in the same dialect."""

    def __init__(self, dialect: Dialect | None = None) -> None:
        self.dialect = dialect or ChatDialect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway: Gateway = scope["state"]["gateway"]
        id_header = self.dialect.id_header
        more_headers = {id_header: scope["state"]["request_id"]} if id_header else {}
        gateway.door.requests += 1
        gateway.door.in_flight += 1
        raw = b""
        try:
            try:
                raw = bytes(await read_body(receive))
                answering = await self.read(gateway, scope, raw, more_headers)
            except SwarmGatewayError as exc:
                # what is refused here is logged, too
                await gateway.pipeline.hear(public_headers(scope["headers"]), object_in(raw) or {}, caller_of(scope))
                gateway.count_error(exc)
                await Rendering(self.dialect, {}, False, more_headers).refusal(exc)(scope, receive, send)
                return
            await deliver(
                scope,
                receive,
                send,
                answering.produce,
                answering.rendering,
                keepalive=gateway.routes.plan.config.keepalive_seconds,
                on_error=gateway.count_error,
                prospect=answering.prospect,
            )
        finally:
            gateway.door.in_flight -= 1

    @abstractmethod
    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        """How the request with the body ``raw`` is answered; ``more_headers`` are of every answer.

        Raises:
            SwarmGatewayError: the request itself is at fault.
        """


class DialectEndpoint(ApiEndpoint):
    """The model's answer, in the dialect of the address."""

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        raw = decoded(scope["headers"], raw, gateway.routes.plan.config.max_body_bytes)
        caller, headers, body = caller_of(scope), plain_headers(scope["headers"]), parse_json(raw)
        try:
            data = self.prepared(gateway, caller, body)
            call = self.parsed(data)
        except RequestError:
            # a plain upstream may understand what the dialect does not
            if not await gateway.pipeline.is_plain(model_of(body), caller):
                raise
            request = AnyRequest("POST", scope["path"], query_of(scope), headers, raw, model_of(body), caller)
            rendering = Rendering(self.dialect, body, body.get("stream") is True, more_headers)
            return Answering(lambda: gateway.pipeline.forward(request), rendering)
        # while the request is answered, what is left out of it comes to the headers
        headers_of_answer = {**more_headers}
        incoming = Incoming(
            call=call,
            headers=headers,
            caller=caller,
            path=self.dialect.path,
            raw=self.raw(data, body, raw),
            request_id=scope["state"]["request_id"],
            left_out=LeftOut(self.dialect, headers_of_answer, gateway.leave_out),
            query=query_of(scope),
        )
        rendering = self.rendering(gateway, incoming, data, headers_of_answer)
        return Answering(lambda: self.answer(gateway, incoming, data), rendering, incoming.prospect)

    def prepared(self, gateway: Gateway, caller: Caller, data: dict[str, Any]) -> dict[str, Any]:
        """The body as the dialect reads it.

        Raises:
            RequestError: it refers to something that does not exist.
        """
        return data

    def parsed(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of ``data``; raises :class:`RequestError` for what it cannot express."""
        return self.dialect.parse(data)

    def raw(self, data: Mapping[str, Any], body: Mapping[str, Any], raw: bytes) -> bytes:
        """The body as an upstream reads it; ``data`` was made of ``body``, which came as ``raw``."""
        return raw

    def rendering(
        self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any], more_headers: Mapping[str, str]
    ) -> Rendering:
        """The form of the answer to ``data``."""
        return Rendering(self.dialect, data, incoming.call.stream, more_headers)

    async def answer(self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any]) -> Outcome:
        """The outcome of ``incoming``; errors as of :meth:`gateway.pipeline.Pipeline.answer`."""
        return await gateway.pipeline.answer(incoming)
