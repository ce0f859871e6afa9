"""OpenAI's legacy Completions on the wire: a raw prompt in, text out.

Invariant: the prompt reaches the model unchanged, without a chat template: the internal form has it as ``prompt``
instead of ``messages``, and vLLM continues it. Nothing is dropped silently; what the internal form cannot express is a
400 that names the field.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

from adapters.dialects.chat import ChatDialect, delivery, sampling
from adapters.dialects.chat_answers import answer_of_chunks
from adapters.dialects.dialect import Body, Dialect, EventStream, LLMRequest, SampledAnswer, choices_of
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.sse import encode_event

#: Default length of an answer, as of OpenAI and vLLM.
_MAX_TOKENS = 16
#: Fields of a chat, or of vLLM, that would change the meaning of the prompt or of the answer.
_REFUSED = ("messages", "prompt_embeds", "prompt_logprobs", "max_completion_tokens", "tools", "top_logprobs")


class CompletionsDialect(Dialect):
    """``POST /v1/completions``, one prompt per call (see :func:`prompts_of`); vLLM checks unknown fields."""

    path = "/v1/completions"
    id_prefix = "cmpl-"

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        check_depth(data)
        top = Fields(data)
        prompts = prompts_of(top.data)
        if len(prompts) != 1:
            refuse("prompt", f"one prompt per call here, not {len(prompts)}")
        (prompt,) = prompts
        top.take("prompt")
        choices, stream, include_usage = delivery(top)
        echo, logprobs = top.flag("echo"), top.integer("logprobs")
        if logprobs is not None and logprobs < 0:
            refuse("logprobs", "must not be negative")
        if echo and logprobs is not None:
            refuse("logprobs", "log-probabilities of the prompt cannot be given; leave 'echo' or 'logprobs' out")
        if echo and not isinstance(prompt, str):
            refuse("echo", "token ids cannot be given back as text; send the prompt as text")
        top.only("suffix", "")
        top.only("best_of", choices)
        for name in _REFUSED:
            top.only(name)
        sampling(shared := Fields(data))
        max_tokens = top.integer("max_tokens")
        if max_tokens is not None and max_tokens < 1:
            refuse("max_tokens", "must be at least 1")
        body = {**top.left(), **shared.read, "prompt": prompt, "max_tokens": max_tokens or _MAX_TOKENS}
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
        if choices > 1:
            body["n"] = choices
        if stream:
            options = data.get("stream_options") or {}
            body |= {"stream": True, "stream_options": {**options, "include_usage": include_usage}}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
        return LLMRequest(top.text("model"), messages, choices, stream, include_usage, body)

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        prompt, rest = _parted(completion)
        choices = [
            {
                **_common(choice),
                **prompt,
                "text": _echoed(data) + (choice["message"].get("content") or ""),
                "logprobs": _Logprobs().take(choice.get("logprobs")),
            }
            for choice in choices_of(completion)
        ]
        return {**rest, **_head(completion), "choices": choices}

    def stream(self, data: Mapping[str, Any]) -> CompletionStream:
        return CompletionStream(_echoed(data))

    def read(self, body: Body) -> SampledAnswer:
        return self.read_stream([body])

    def read_stream(self, events: Iterable[Body]) -> SampledAnswer:
        def as_chat(event: Body) -> Body:
            choices = [
                {"index": choice.get("index"), "delta": {"content": choice.get("text") or ""}}
                | {"finish_reason": choice.get("finish_reason")}
                for choice in event.get("choices") or []
            ]
            return {**event, "choices": choices}

        return answer_of_chunks(map(as_chat, events))


class CompletionStream(EventStream):
    """Chunks of text; those without content are left out.

    Args:
        echo: the beginning of each choice.
    """

    def __init__(self, echo: str) -> None:
        self._echo = echo
        self._logprobs: defaultdict[int, _Logprobs] = defaultdict(_Logprobs)
        self._prompt: dict[str, Any] = {}
        self._begun: set[int] = set()

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        choices: list[dict[str, Any]] = []
        prompt, rest = _parted(chunk)
        self._prompt = prompt or self._prompt
        for choice in cast("list[dict[str, Any]]", chunk.get("choices") or []):
            index: int = choice.get("index", 0)
            text = (choice.get("delta") or {}).get("content") or ""
            if index not in self._logprobs:
                text = self._echo + text
            logprobs = self._logprobs[index].take(choice.get("logprobs"))
            if text or logprobs or choice.get("token_ids") or choice.get("finish_reason") is not None:
                begins = {} if index in self._begun else self._prompt
                self._begun.add(index)
                choices.append({**_common(choice), **begins, "text": text, "logprobs": logprobs})
        if not choices and (chunk.get("choices") or not chunk.get("usage")):
            return b""
        rest.pop("swarm", None)
        return encode_event({**rest, **_head(chunk), "choices": choices})


def prompts_of(data: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts of a request, each a text or a list of token ids; at least one.

    Raises:
        RequestError: it has no prompt, or something else in its place.
    """
    prompt: Any = data.get("prompt")
    if _is_prompt(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(map(_is_prompt, cast("list[Any]", prompt))):
        return cast("list[str | list[int]]", prompt)
    refuse("prompt", "must be a text that is not empty, or a list of such texts (or of token ids)")


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        tokens = cast("list[Any]", value)
        return bool(tokens) and all(type(token) is int and token >= 0 for token in tokens)
    return isinstance(value, str) and value != ""


def _echoed(data: Mapping[str, Any]) -> str:
    """The beginning of each choice; empty for several prompts, whose choices differ."""
    prompt: Any = data.get("prompt") if Fields(data).flag("echo") else None
    prompts = cast("list[Any]", prompt) if isinstance(prompt, list) else [prompt]
    return prompts[0] if len(prompts) == 1 and isinstance(prompts[0], str) else ""


def _parted(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokens of the prompt, which stand in each choice here, and the other fields of a body in chat form."""
    rest = dict(body)
    return {name: rest.pop(name) for name in ("prompt_token_ids",) if name in rest}, rest


def _head(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": CompletionsDialect.id_prefix + str(body.get("id") or "").removeprefix(ChatDialect.id_prefix),
        "object": "text_completion",
        "created": body.get("created") or int(time.time()),
        "model": body.get("model"),
    }


def _common(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a choice has in both forms."""
    rest = {key: value for key, value in choice.items() if key not in ("message", "delta")}
    return {"index": 0, "finish_reason": None, **rest}


class _Logprobs:
    """Log-probabilities of one choice in the legacy form; offsets go on from chunk to chunk."""

    def __init__(self) -> None:
        self._offset = 0

    def take(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
        content: list[dict[str, Any]] = (logprobs or {}).get("content") or []
        if not content:
            return None
        legacy: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in content:
            # includes the sampled token, as OpenAI's and vLLM's own answers do
            best = {top["token"]: top["logprob"] for top in (*(entry.get("top_logprobs") or ()), entry)}
            for name, value in zip(legacy, (entry["token"], entry["logprob"], best, self._offset), strict=True):
                legacy[name].append(value)
            self._offset += len(entry["token"])
        return legacy
