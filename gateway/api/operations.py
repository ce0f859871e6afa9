"""The table of the gateway's own routes: what each takes, answers and needs.

Invariant: every route of the app is in it but the one that passes on whatever else is under ``/v1`` (a test compares).
A route is opened by a ``key`` where the gateway has keys, or by anyone (``none``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gateway.api.feedback import GivenFeedback, SessionFeedback
from swarm.http.openapi import Method, OpenAIBody, Operation, Query


class Turn(OpenAIBody):
    """One message of a chat; what it holds beside its role depends on that."""

    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None


class AnthropicTurn(BaseModel):
    """One message of a conversation: text, or blocks."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[dict[str, Any]], Field(min_length=1)]


class Asked(OpenAIBody):
    """What requests of all dialects have in common."""

    model: str | None = Field(default=None, description="may be left out where the gateway has one route")
    stream: bool | None = None


class ChatRequest(Asked):
    """As OpenAI's, with vLLM's extras."""

    messages: list[Turn] = Field(min_length=1)
    n: int | None = Field(default=None, ge=1, description="at most as many as a group has episodes")


class CompletionRequest(Asked):
    """As OpenAI's, with vLLM's extras: one prompt or several, as texts or as token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]


class ResponseRequest(Asked):
    """As OpenAI's."""

    input: str | list[dict[str, Any]]


class CountRequest(Asked):
    """As Anthropic's."""

    messages: list[AnthropicTurn] = Field(min_length=1)


class MessageRequest(CountRequest):
    """As Anthropic's."""

    max_tokens: int


class FeedbackTaken(BaseModel):
    """What became of the feedback."""

    completion_id: str
    trains: bool = Field(description="whether the group is still open for it")
    replaced: bool


class SessionEnded(BaseModel):
    """The session is over."""

    session_id: str
    ended: bool


class Reloaded(BaseModel):
    """The configuration was read again."""

    routes: list[str]
    needs_restart: list[str]


_POLICY = r"^(first|best(;quorum=[1-9]|;deadline=[1-9](\.[0-9])?)?)$"
_HEADERS = (
    Query("x-swarm-policy", "best, first, best;quorum=4 or best;deadline=2.5", {"type": "string", "pattern": _POLICY}),
    Query("x-swarm-train", "false: straight through", {"type": "string", "enum": ["true", "false"]}),
    Query("x-swarm-session", "names the conversation", {"type": "string"}),
    Query("idempotency-key", "requests with the same key are one", {"type": "string"}),
)
_REFUSALS = (
    (404, "no route has the model"),
    (409, "an idempotency key of another request"),
    (413, "the body is larger than the gateway takes"),
    (415, "the body is compressed"),
    (422, "the engine refuses the request"),
    (429, "too many requests at once; `retry-after` says when to come back"),
    (502, "the engine or the upstream failed, and there is no other"),
    (503, "neither swarm nor upstream serves now; `retry-after` says when to come back"),
    (504, "there was no answer within the route's deadline"),
)


def _dialect(path: str, form: str, request: type[BaseModel]) -> Operation:
    return Operation(
        "POST",
        path,
        f"An answer in the form of {form}, errors included; plain or as a stream",
        request=request,
        answer=OpenAIBody,
        refusals=_REFUSALS,
        stream=True,
        key="key",
        headers=_HEADERS,
    )


def _kept(method: Method, summary: str) -> Operation:
    return Operation(method, "/v1/responses/{response_id}", summary, answer=OpenAIBody, refusals=_REFUSALS, key="key")


OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/health", "Whether the gateway answers, and how its engine is", answer=OpenAIBody, key="none"),
    Operation("GET", "/status", "Counts since the start", answer=OpenAIBody, key="key"),
    Operation("GET", "/metrics", "Counters for Prometheus", media_type="text/plain", key="key"),
    Operation("GET", "/openapi.json", "This document", answer=OpenAIBody, key="key"),
    Operation(
        "POST",
        "/admin/reload",
        "Read the configuration file again; a wrong one changes nothing",
        answer=Reloaded,
        refusals=((409, "the gateway was started without a file"),),
        key="key",
    ),
    _dialect("/v1/chat/completions", "OpenAI's Chat Completions", ChatRequest),
    _dialect("/v1/completions", "OpenAI's legacy Completions", CompletionRequest),
    _dialect("/v1/responses", "OpenAI's Responses", ResponseRequest),
    _dialect("/v1/messages", "Anthropic's Messages", MessageRequest),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "How many tokens a request of Anthropic's would be",
        request=CountRequest,
        answer=OpenAIBody,
        refusals=_REFUSALS,
        key="key",
    ),
    _kept("GET", "A response that was kept"),
    _kept("DELETE", "Forget a response that was kept"),
    Operation(
        "GET",
        "/v1/models",
        "What the key may ask for",
        answer=OpenAIBody,
        refusals=((503, "not known yet"),),
        key="key",
    ),
    Operation(
        "GET",
        "/v1/models/{name}",
        "One model",
        answer=OpenAIBody,
        refusals=((404, "there is none of that name"), (503, "not known yet")),
        key="key",
    ),
    Operation(
        "POST",
        "/v1/feedback",
        "What the user says of an answer",
        request=GivenFeedback,
        answer=FeedbackTaken,
        refusals=((404, "the answer is not known, or another key's"), (413, "the body is too large")),
        key="key",
    ),
    Operation(
        "POST",
        "/v1/sessions/{id}/end",
        "A conversation is over",
        request=SessionFeedback,
        answer=SessionEnded,
        refusals=((404, "the session is not known, or another key's"), (413, "the body is too large")),
        key="key",
        optional=True,
    ),
)
