"""OpenAI's legacy Completions on the wire: a raw prompt in, text out.

Invariant: the prompt reaches the model as it is, without a chat template: in the internal form it stands as ``prompt``
where a chat has ``messages``, and vLLM continues it. Nothing is dropped in silence; what the internal form cannot say
is a 400 that names the field.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

from adapters.dialects.chat import delivery, sampling
from adapters.dialects.dialect import LLMRequest, choices_of
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.sse import COMMENT, DONE, encode_event
from swarm.errors import SwarmGatewayError

#: How long an answer may be where the request does not say: OpenAI's and vLLM's own default.
_MAX_TOKENS = 16
#: Fields of a chat, or of vLLM's own, that would change the meaning of the prompt or of the answer.
_REFUSED = ("messages", "prompt_embeds", "prompt_logprobs", "max_completion_tokens", "tools", "top_logprobs")


class CompletionsDialect:
    """``POST /v1/completions``, one prompt per call; see :func:`prompts_of`."""

    path = "/v1/completions"

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of a request body; unknown fields travel on, for vLLM to judge.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
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
        sampling(Fields(data))
        max_tokens = top.integer("max_tokens")
        if max_tokens is not None and max_tokens < 1:
            refuse("max_tokens", "must be at least 1")
        body = {**top.left(), "prompt": prompt, "max_tokens": max_tokens or _MAX_TOKENS}
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
        if choices > 1:
            body["n"] = choices
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": include_usage}}
        return LLMRequest(
            model=top.text("model"),
            messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else [],
            choices=choices,
            stream=stream,
            include_usage=include_usage,
            body=body,
        )

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        """The ``text_completion`` for a ``chat.completion``, the answer to request ``data``.

        Raises:
            UpstreamError: it is no chat completion.
        """
        return {
            **completion,
            **_head(completion),
            "choices": [
                {
                    **_common(choice),
                    "text": _echoed(data) + (choice["message"].get("content") or ""),
                    "logprobs": _Logprobs().take(choice.get("logprobs")),
                }
                for choice in choices_of(completion)
            ],
        }

    def stream(self, data: Mapping[str, Any]) -> CompletionStream:
        """Makes the bytes of a streamed answer to request ``data``."""
        return CompletionStream(_echoed(data))

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        """The error body for ``exc``."""
        return exc.body()


class CompletionStream:
    """The bytes of a streamed text completion.

    Args:
        echo: what each choice begins with.
    """

    keepalive = COMMENT

    def __init__(self, echo: str = "") -> None:
        self._echo = echo
        self._logprobs: defaultdict[int, _Logprobs] = defaultdict(_Logprobs)

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        """See :class:`adapters.dialects.dialect.EventStream`; chunks that say nothing are left out."""
        choices: list[dict[str, Any]] = []
        for choice in cast("list[dict[str, Any]]", chunk.get("choices") or []):
            index: int = choice.get("index", 0)
            text = (choice.get("delta") or {}).get("content") or ""
            if index not in self._logprobs:
                text = self._echo + text
            logprobs = self._logprobs[index].take(choice.get("logprobs"))
            if text or logprobs or choice.get("finish_reason") is not None:
                choices.append({**_common(choice), "text": text, "logprobs": logprobs})
        if not choices and not chunk.get("usage"):
            return b""
        rest = {key: value for key, value in chunk.items() if key != "swarm"}
        return encode_event({**rest, **_head(chunk), "choices": choices})

    def end(self) -> bytes:
        return DONE

    def fail(self, exc: SwarmGatewayError) -> bytes:
        return encode_event(exc.body())


def prompts_of(data: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts of a request, each a text or a list of token ids; at least one.

    Raises:
        RequestError: there are none, or something else.
    """
    given: Any = data.get("prompt")
    if _is_prompt(given):
        return [given]
    if isinstance(given, list) and given and all(map(_is_prompt, cast("list[Any]", given))):
        return cast("list[str | list[int]]", given)
    refuse("prompt", "must be a text that is not empty, or a list of such texts (or of token ids)")


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        tokens = cast("list[Any]", value)
        return bool(tokens) and all(type(token) is int and token >= 0 for token in tokens)
    return isinstance(value, str) and value != ""


def _echoed(data: Mapping[str, Any]) -> str:
    """What each choice begins with; of several prompts each has its own, which is none here."""
    given: Any = data.get("prompt") if data.get("echo") else None
    prompts = cast("list[Any]", given) if isinstance(given, list) else [given]
    return prompts[0] if len(prompts) == 1 and isinstance(prompts[0], str) else ""


def _head(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-" + str(body.get("id") or "").removeprefix("chatcmpl-"),
        "object": "text_completion",
        "created": body.get("created") or int(time.time()),
        "model": body.get("model"),
    }


def _common(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What a choice has in both forms."""
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
            # the sampled token is among the best here, as in OpenAI's and vLLM's own answers
            best = {top["token"]: top["logprob"] for top in (*(entry.get("top_logprobs") or ()), entry)}
            for name, value in zip(legacy, (entry["token"], entry["logprob"], best, self._offset), strict=True):
                legacy[name].append(value)
            self._offset += len(entry["token"])
        return legacy
