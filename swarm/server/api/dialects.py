"""The bodies of other dialects than chat completions, for the OpenAPI document.

Invariant: it lists the fields that :mod:`adapters.dialects` knows; any other is left out, and what is in them is judged
there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Blocks = str | list[dict[str, Any]]


class MessageTurn(BaseModel):
    """One turn; ``content`` is text or blocks."""

    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesRequest(BaseModel):
    """As Anthropic's, with vLLM's ``chat_template_kwargs``; ``model`` may be left out. Another field, and what
    cannot be carried to the model, is left out, which ``x-swarm-left-out`` of the answer tells."""

    model_config = ConfigDict(extra="allow")

    messages: list[MessageTurn] = Field(min_length=1)
    max_tokens: int
    model: str | None = None
    system: Blocks | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(BaseModel):
    """As OpenAI's, with vLLM's ``chat_template_kwargs``; ``model`` may be left out. Nothing is stored: a conversation
    comes whole with each request. A field that is not here, and what cannot be carried to the model, is left out, which
    ``x-swarm-left-out`` of the answer tells."""

    model_config = ConfigDict(extra="allow")

    input: Blocks
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
