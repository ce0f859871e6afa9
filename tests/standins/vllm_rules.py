"""What vLLM 0.24 and 0.28 refuse, so that a stand-in refuses it too.

Invariant: :data:`CASES` is sent to the stand-ins in the fast suite and to the real vLLM in the engine suite; both must
answer each case with the same status and, for a refusal, a message with the same words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_GREEDY = 1e-5
_MOST_LOGPROBS = 20


@dataclass(frozen=True)
class VllmRules:
    """How vLLM was started.

    Attributes:
        tool_parser: with ``--enable-auto-tool-choice`` and ``--tool-call-parser``.
        reasoning_parser: with ``--reasoning-parser``.
        eyes: the model takes images.
        context: ``max_model_len`` in tokens; ``None`` where the stand-in counts no tokens.
    """

    tool_parser: bool = True
    reasoning_parser: bool = False
    eyes: bool = True
    context: int | None = None

    def refusal(self, path: str, body: Mapping[str, Any], prompt_tokens: int = 0) -> tuple[int, dict[str, Any]] | None:
        """Status and body of vLLM's refusal of a request, ``None`` where vLLM would sample.

        Args:
            path: of the route.
            body: the request.
            prompt_tokens: the length of its prompt.
        """
        try:
            problem = _sampling_problem(body) or self._length_problem(body, prompt_tokens)
            if path == CHAT:
                problem = problem or self._tools_problem(body) or self._messages_problem(body)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            # vLLM checks every type first, in words of pydantic's
            problem = f"1 validation error: {exc!r}"
        problem = problem or _schema_problem(body)
        if problem is None and body.get("thinking_token_budget") is not None and not self.reasoning_parser:
            problem = "thinking_token_budget is set but reasoning_config is not configured."
        if problem is None:
            return None
        return 400, {"error": {"message": problem, "type": "BadRequestError", "param": None, "code": 400}}

    def _length_problem(self, body: Mapping[str, Any], prompt_tokens: int) -> str | None:
        if self.context is None:
            return None
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if asked > self.context:
            return (
                f"max_tokens={asked} cannot be greater than max_model_len=max_total_tokens={self.context}. "
                f"Please request fewer output tokens. (parameter=max_tokens, value={asked})"
            )
        if prompt_tokens + max(asked, 1) <= self.context:
            return None
        return (
            f"This model's maximum context length is {self.context} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + asked} "
            "tokens. Please reduce the length of the input prompt or the number of requested output tokens. "
            f"(parameter=input_tokens, value={prompt_tokens})"
        )

    def _tools_problem(self, body: Mapping[str, Any]) -> str | None:
        tools, choice = body.get("tools"), body.get("tool_choice")
        if tools == []:
            return "`tools` must not be an empty array."
        if choice == "none" or (choice is None and tools is None):
            return None
        if tools is None:
            return "When using `tool_choice`, `tools` must be set."
        for tool in tools:
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                return "2 validation errors: Input should be 'function'"
        if isinstance(choice, dict):
            function = choice.get("function")
            if not isinstance(function, dict):
                return f"Invalid value for `function`: `{function}` in `tool_choice`!"
            if function.get("name") not in [tool["function"]["name"] for tool in tools]:
                return "The tool specified in `tool_choice` does not match any of the specified `tools`"
        elif choice not in (None, "auto", "required"):
            return f"Invalid value for `tool_choice`: {choice}!"
        if self.tool_parser:
            return None
        if isinstance(choice, dict):
            return f'tool_choice=function "{choice["function"]["name"]}" requires --tool-call-parser to be set'
        if choice == "required":
            return 'tool_choice="required" requires --tool-call-parser to be set'
        return '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

    def _messages_problem(self, body: Mapping[str, Any]) -> str | None:
        for message in body["messages"]:
            for call in message.get("tool_calls") or ():
                try:
                    json.loads(call["function"]["arguments"] or "{}")
                except ValueError as exc:
                    return str(exc)
            content = message.get("content")
            if message["role"] == "user" and content is None:
                return "19 validation errors: Input should be a valid string"
            for part in content if isinstance(content, list) else ():
                if isinstance(part, str):
                    continue
                if part.get("type") == "file":
                    return "Unsupported chat content part type: 'file'."
                if part.get("type") == "image_url" and not self.eyes:
                    return f"{body['model']} is not a multimodal model"
        return None


def _sampling_problem(body: Mapping[str, Any]) -> str | None:
    if not body.get("stream") and body.get("stream_options") is not None:
        return "Stream options can only be defined when `stream=True`."
    temperature, n = body.get("temperature"), int(body.get("n") or 1)
    if temperature is not None and temperature < 0:
        return f"temperature must be non-negative, got {temperature}."
    if temperature is not None and temperature > 2:
        return f"temperature must be in [0, 2], got {temperature}."
    if temperature is not None and temperature < _GREEDY and n > 1:
        return f"n must be 1 when using greedy sampling, got {n}."
    if (top_p := body.get("top_p")) is not None and not 0 < top_p <= 1:
        return f"top_p must be in (0, 1], got {top_p}."
    if (top_k := body.get("top_k")) is not None and top_k < -1:
        return f"top_k must be 0 (disable), or at least 1, got {top_k}."
    if (min_p := body.get("min_p")) is not None and not 0 <= min_p <= 1:
        return f"min_p must be in [0, 1], got {min_p}."
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (body.get(name) or 0) <= 2:
            return f"{name} must be in [-2, 2], got {body[name]}."
    if (most := body.get("max_tokens")) is not None and most < 1:
        return f"max_tokens must be at least 1, got {most}."
    if body.get("stop") == "" or "" in (body.get("stop") or []):
        return "stop cannot contain an empty string."
    if (top := body.get("top_logprobs")) is not None and top > _MOST_LOGPROBS:
        return f"Requested sample logprobs of {top}, which is greater than max allowed: {_MOST_LOGPROBS}"
    if body.get("suffix"):
        return "suffix is not currently supported"
    return None


def _schema_problem(body: Mapping[str, Any]) -> str | None:
    """vLLM refuses more; this is one of its cases."""
    form = (body.get("response_format") or {}).get("json_schema") or {}
    if "uniqueItems" in json.dumps(form.get("schema")):
        return 'Grammar error: Unimplemented keys: ["uniqueItems"]'
    return None


@dataclass(frozen=True)
class Case:
    """A request to a vLLM with ``rules``; ``refused`` are words of the refusal, empty where it samples."""

    name: str
    changes: Mapping[str, Any]
    refused: str = ""
    path: str = CHAT


USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "f"}}


def _after_call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


def _file_part() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]


_SET = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
}

#: Whatever the parsers are.
CASES: Sequence[Case] = (
    Case("plain", {}),
    Case("a field that nobody knows", {"foo": 1, "service_tier": "auto", "store": True, "metadata": {"a": "b"}}),
    Case("several greedy answers", {"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling"),
    Case("no tools in a list", {"tools": []}, "must not be an empty array"),
    Case("a choice among no tools", {"tool_choice": "auto"}, "`tools` must be set"),
    Case("none of no tools", {"tool_choice": "none"}),
    Case("none of the tools", {"tools": TOOLS, "tool_choice": "none"}),
    Case(
        "a tool that is not there",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "does not match any",
    ),
    Case(
        "allowed tools",
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "Invalid value for `function`",
    ),
    Case("a custom tool", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "Input should be 'function'"),
    Case("a call without arguments", {"messages": _after_call("")}),
    Case("a call with a list", {"messages": _after_call("[1]")}),
    Case("a call with a string", {"messages": _after_call('"{bad"')}),
    Case("a call with invalid JSON", {"messages": _after_call("{bad")}, "Expecting property name"),
    Case("a file", {"messages": _file_part()}, "Unsupported chat content part type: 'file'"),
    Case("a message without a role", {"messages": [{"content": "hi"}]}, "validation error"),
    Case("a user without content", {"messages": [{"role": "user", "content": None}]}, "Input should be a valid string"),
    Case("a system message amid the conversation", {"messages": [USER, {"role": "system", "content": "x"}, USER]}),
    Case("a negative temperature", {"temperature": -1}, "temperature must be non-negative"),
    Case("a high temperature", {"temperature": 2.1}, "temperature must be in [0, 2]"),
    Case("top_p of zero", {"top_p": 0}, "top_p must be in (0, 1]"),
    Case("a negative top_k", {"top_k": -2}, "top_k must be 0 (disable), or at least 1"),
    Case("a high min_p", {"min_p": 1.5}, "min_p must be in [0, 1]"),
    Case("a high penalty", {"presence_penalty": 3}, "presence_penalty must be in [-2, 2]"),
    Case("a low penalty", {"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2]"),
    Case("no token", {"max_tokens": 0}, "max_tokens must be at least 1"),
    Case("an empty stop", {"stop": ""}, "stop cannot contain an empty string"),
    Case("an empty stop in a list", {"stop": [""]}, "stop cannot contain an empty string"),
    Case("no stops", {"stop": []}),
    Case("many alternatives", {"logprobs": True, "top_logprobs": 30}, "greater than max allowed: 20"),
    Case("options of no stream", {"stream_options": {"include_usage": True}}, "Stream options can only be defined"),
    Case("a schema without a grammar", {"response_format": _SET}, "Grammar error: Unimplemented keys"),
    Case("a raw prompt", {"prompt": [1, 2, 3]}, path=COMPLETIONS),
    Case("a suffix", {"prompt": "a", "suffix": "b"}, "suffix is not currently supported", COMPLETIONS),
)
#: Without a parser for tool calls.
WITHOUT_TOOL_PARSER: Sequence[Case] = (
    Case("a free choice", {"tools": TOOLS}, '"auto" tool choice requires --enable-auto-tool-choice'),
    Case("some tool", {"tools": TOOLS, "tool_choice": "required"}, 'tool_choice="required" requires'),
    # 0.24 writes the whole choice where 0.28 writes the function's name
    Case("a named tool", {"tools": TOOLS, "tool_choice": NAMED}, "requires --tool-call-parser to be set"),
)
#: With one.
WITH_TOOL_PARSER: Sequence[Case] = (
    Case("a free choice", {"tools": TOOLS}),
    Case("some tool", {"tools": TOOLS, "tool_choice": "required"}),
    Case("a named tool", {"tools": TOOLS, "tool_choice": NAMED}),
)
#: Without a parser for reasoning.
WITHOUT_REASONING_PARSER: Sequence[Case] = (
    Case("a budget for thoughts", {"thinking_token_budget": 10}, "thinking_token_budget is set but reasoning_config"),
)
#: Of a model without eyes.
WITHOUT_EYES: Sequence[Case] = (
    Case(
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "is not a multimodal model",
    ),
)


def too_long(context: int) -> Sequence[Case]:
    """Cases about a context of ``context`` tokens."""
    return (
        Case("a long answer", {"max_tokens": context + 1}, "cannot be greater than max_model_len"),
        Case("a long prompt", {"prompt": [1] * context}, f"maximum context length is {context} tokens", COMPLETIONS),
        Case("prompt and answer", {"prompt": [1] * (context - 2)}, "requested 4 output tokens", COMPLETIONS),
        Case("all that fits", {"prompt": [1] * (context - 4)}, path=COMPLETIONS),
    )


def request(case: Case, model: str) -> dict[str, Any]:
    """The body of ``case`` for a vLLM that serves ``model``."""
    prompt = {} if case.path == COMPLETIONS else {"messages": [USER]}
    return {"model": model, "max_tokens": 4, **prompt, **case.changes}


async def check(client: httpx.AsyncClient, case: Case, model: str) -> None:
    """Send ``case`` to the vLLM, real or not, behind ``client`` and compare the answer with the table.

    ``client`` must keep no connection: vLLM 0.24 closes it behind a refusal, without saying so.
    """
    response = await client.post(case.path, json=request(case, model))
    assert response.status_code == (400 if case.refused else 200), (case.name, response.text)
    assert case.refused in response.text.replace("\\", ""), (case.name, response.text)
