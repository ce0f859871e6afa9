"""vLLM's answers in the form that the caller asked for.

Invariant: token ids, log-probabilities, usage chunks and engine-side names reach the caller only if it asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from msgspec.json import Decoder

from adapters.dialects import ChatDialect, CompletionsDialect
from adapters.dialects.jsons import decode
from swarm.server.dataplane.recording import TokenEntry
from swarm.server.dataplane.requests import ChatCall
from swarm.tokens import ABORTED

Body = dict[str, Any]

_REASONING = ("reasoning", "reasoning_content")


class _LogProbs(TypedDict, total=False):
    content: list[TokenEntry] | None


class _Choice(TypedDict, total=False):
    index: Any
    message: Any
    logprobs: _LogProbs | None
    finish_reason: Any
    stop_reason: Any
    token_ids: Any
    routed_experts: Any


class _Answer(TypedDict, total=False):
    """vLLM's plain answer, with all its fields."""

    id: Any
    object: Any
    created: Any
    model: Any
    choices: list[_Choice]
    usage: Any
    service_tier: Any
    system_fingerprint: Any
    prompt_token_ids: Any
    prompt_logprobs: Any
    prompt_text: Any
    kv_transfer_params: Any
    ec_transfer_params: Any
    metrics: Any


_ANSWER = Decoder(_Answer)


def reader(call: ChatCall) -> Callable[[bytes], Any]:
    """Reads vLLM's plain answer to ``call``, without what neither the record nor the caller needs of each token."""
    if call.raw or call.wants.logprobs:
        return decode
    return _ANSWER.decode


class Shaper:
    """Shapes the answer, or all chunks, of one call in place; the chunks of all its attempts get one identity."""

    def __init__(self, call: ChatCall) -> None:
        self._wants = call.wants
        self._model_name = call.model_name
        self._identity: Body = {}
        #: choices that have begun to say something: what comes before it without a text may be reasoning
        self._speaking: set[int] = set()

    def answer(self, answer: Body) -> Body:
        """A plain chat answer, or a chat chunk."""
        answer["model"] = self._model_name
        if not self._wants.token_ids:
            answer.pop("prompt_token_ids", None)
        for choice in answer.get("choices") or []:
            index, message = choice.get("index", 0), choice.get("message") or choice.get("delta") or {}
            if message.get("content") or message.get("tool_calls"):
                self._speaking.add(index)
            reasons = index not in self._speaking or any(message.get(key) for key in _REASONING)
            hides = reasons and not self._wants.reasoning
            # tokens would tell the reasoning that is hidden
            if hides or not self._wants.token_ids:
                choice.pop("token_ids", None)
            if hides or not self._wants.logprobs:
                choice["logprobs"] = None
            if hides:
                for key in _REASONING:
                    message.pop(key, None)
        return answer

    def chunk(self, chunk: Body) -> Body:
        """A chat chunk; it gets the id and time of the call's first chunk."""
        if not self._identity:
            self._identity = {key: chunk[key] for key in ("id", "created", "system_fingerprint") if key in chunk}
        chunk.update(self._identity)
        return self.answer(chunk)

    def closed(self, usage: Body) -> None:
        """Take what only vLLM's last chunk has, the one with the usage."""
        if (fingerprint := usage.get("system_fingerprint")) is not None:
            self._identity["system_fingerprint"] = fingerprint

    def end(self, chunk: Body) -> Body:
        """The last chunk of a choice, held back until vLLM's stream was over."""
        return chunk | self._identity

    def continued(self, chunk: Body, index: int) -> Body:
        """A /v1/completions chunk as the chat chunk that continues choice ``index``."""
        choices = [{**_chat_choice(choice, "delta", {}), "index": index} for choice in chunk.get("choices") or []]
        return self.answer({**self._identity, "object": "chat.completion.chunk", "choices": choices})

    def usage_chunk(self, usage: Body) -> Body:
        """The last chunk for a caller that asked for the usage."""
        return self.answer({**self._identity, "object": "chat.completion.chunk", "choices": [], "usage": usage})


def with_aborts(answer: Body) -> Body:
    """vLLM's ``answer``, or a chunk, in which each choice that was aborted has that for its finish reason: with a tool
    call that has begun, vLLM gives it another."""
    for choice in answer.get("choices") or []:
        if choice.get("stop_reason") == ABORTED:
            choice["finish_reason"] = "abort"
    return answer


def as_chat(answer: Body, part: str) -> Body:
    """An answer or a chunk of ``/v1/completions`` in the form of a chat.

    Args:
        part: the field of a choice that holds the text: ``message`` of an answer, ``delta`` of a chunk.
    """
    choices: list[Body] = answer.get("choices") or []
    kept = {key: value for key, value in answer.items() if key not in ("id", "object", "choices")}
    prompt_ids = next((ids for choice in choices if (ids := choice.get("prompt_token_ids")) is not None), None)
    role = {"role": "assistant"} if part == "message" else {}
    return {
        "id": ChatDialect.id_prefix + str(answer.get("id") or "").removeprefix(CompletionsDialect.id_prefix),
        "object": "chat.completion" if part == "message" else "chat.completion.chunk",
        **kept,
        **({} if prompt_ids is None else {"prompt_token_ids": prompt_ids}),
        "choices": [_chat_choice(choice, part, role) for choice in choices],
    }


def _chat_choice(choice: Body, part: str, role: Body) -> Body:
    return {
        "index": choice.get("index", 0),
        part: {**role, "content": choice.get("text") or ""},
        "logprobs": _chat_logprobs(choice.get("logprobs")),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids"),
    }


def _chat_logprobs(logprobs: Mapping[str, Any] | None) -> Body | None:
    if not logprobs:
        return None
    tokens: list[str] = logprobs.get("tokens") or []
    values: list[float | None] = logprobs.get("token_logprobs") or []
    tops: list[dict[str, float] | None] = logprobs.get("top_logprobs") or [None] * len(tokens)
    return {
        "content": [
            {
                **_token(token, value),
                # vLLM always adds the sampled token to the completions' list; the chat form has only the best
                "top_logprobs": [_token(*top) for top in (best or {}).items()],
            }
            for token, value, best in zip(tokens, values, tops, strict=False)
        ]
    }


def _token(token: str, logprob: float | None) -> Body:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}


def chunks_of(answer: Body, *, usage: bool) -> list[Body]:
    """A chat completion with one choice as the chunks of a stream; ``usage``: with one for the usage."""
    head: Body = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = answer["choices"]
    first: Body = {"index": 0, "delta": choice["message"], "logprobs": None, "finish_reason": None}
    last = {**first, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [{**head, "choices": [part]} for part in (first, last)]
    return [*chunks, {**head, "choices": [], "usage": answer["usage"]}] if usage else chunks
