"""Raw prompts: a chat whose conversation is a ``prompt`` (a text, or token ids), which vLLM continues as it is.

Invariant: such a call is recorded like any other: token ids and log-probabilities are those that vLLM told, of the very
prompt that it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from swarm.errors import RequestError

#: Of vLLM, below its ``/v1``.
COMPLETIONS = "/completions"
#: vLLM's own, where a request does not say.
MAX_TOKENS = 16
#: What only a chat has.
_CHATS = ("include_reasoning", "top_logprobs", "max_completion_tokens")


def has_prompt(body: Mapping[str, Any]) -> bool:
    """Whether ``body`` is a raw prompt and no chat.

    Raises:
        RequestError: it is both, or its prompt is neither a text nor token ids.
    """
    if "prompt" not in body:
        return False
    if body.get("messages") is not None:
        raise RequestError("prompt: messages and a raw prompt exclude each other", param="prompt")
    prompt: Any = body["prompt"]
    if isinstance(prompt, str) and prompt:
        return True
    ids = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise RequestError("prompt: must be one text that is not empty, or its token ids", param="prompt")
    return True


def completions_body(chat: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The body for vLLM's ``/v1/completions`` that asks for what ``chat`` asks of a chat."""
    sent = {name: value for name, value in chat.items() if name not in _CHATS}
    return sent | {"logprobs": chat["top_logprobs"], "max_tokens": max_tokens}


def chat_of(answer: Mapping[str, Any], part: str) -> dict[str, Any]:
    """An answer or a chunk of ``/v1/completions`` in the form of a chat.

    Args:
        part: of a choice that has the text: ``message`` of an answer, ``delta`` of a chunk.
    """
    choices: list[dict[str, Any]] = answer.get("choices") or []
    told = {key: value for key, value in answer.items() if key not in ("id", "object", "choices")}
    prompt_ids = next((ids for choice in choices if (ids := choice.get("prompt_token_ids")) is not None), None)
    said = {"role": "assistant"} if part == "message" else {}
    return {
        "id": "chatcmpl-" + str(answer.get("id") or "").removeprefix("cmpl-"),
        "object": "chat.completion" if part == "message" else "chat.completion.chunk",
        **told,
        **({} if prompt_ids is None else {"prompt_token_ids": prompt_ids}),
        "choices": [
            {
                "index": choice.get("index", 0),
                part: {**said, "content": choice.get("text") or ""},
                "logprobs": chat_logprobs(choice.get("logprobs")),
                "finish_reason": choice.get("finish_reason"),
                "stop_reason": choice.get("stop_reason"),
                "token_ids": choice.get("token_ids"),
            }
            for choice in choices
        ],
    }


def chat_logprobs(logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Log-probabilities of ``/v1/completions`` in the form of a chat."""
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


def _token(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}
