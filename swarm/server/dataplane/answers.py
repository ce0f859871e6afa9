"""Take out of vLLM's answers what the caller did not ask for, and give a call one identity across its tries.

Invariant: token ids, log-probabilities, usage chunks and engine-side names reach the caller only if it asked for them.
"""

from __future__ import annotations

from typing import Any

from swarm.server.dataplane.raw import chat_logprobs
from swarm.server.dataplane.requests import Wants

_REASONING = ("reasoning", "reasoning_content")


class Shaper:
    """Shapes the answer, or all chunks, of one call in place."""

    def __init__(self, wants: Wants, model_name: str) -> None:
        self._wants = wants
        self._model_name = model_name
        self._identity: dict[str, Any] = {}

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A plain chat answer, or a chat chunk."""
        answer["model"] = self._model_name
        if not self._wants.token_ids:
            answer.pop("prompt_token_ids", None)
        for choice in answer.get("choices") or []:
            if not self._wants.token_ids:
                choice.pop("token_ids", None)
            if not self._wants.logprobs:
                choice["logprobs"] = None
            if not self._wants.reasoning:
                for message in (choice.get("message"), choice.get("delta")):
                    for key in _REASONING:
                        (message or {}).pop(key, None)
        return answer

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """A chat chunk; all chunks of a call carry the id and time of its first."""
        if not self._identity:
            self._identity = {key: chunk[key] for key in ("id", "created", "system_fingerprint") if key in chunk}
        chunk.update(self._identity)
        return self.answer(chunk)

    def continued(self, chunk: dict[str, Any], index: int) -> dict[str, Any]:
        """A /v1/completions chunk as the chat chunk that continues choice ``index``."""
        choices = [
            {
                "index": index,
                "delta": {"content": choice.get("text") or ""},
                "logprobs": chat_logprobs(choice.get("logprobs")),
                "finish_reason": choice.get("finish_reason"),
                "stop_reason": choice.get("stop_reason"),
                "token_ids": choice.get("token_ids"),
            }
            for choice in chunk.get("choices") or []
        ]
        return self.answer({**self._identity, "object": "chat.completion.chunk", "choices": choices})

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a caller that asked for the usage."""
        return self.answer({**self._identity, "object": "chat.completion.chunk", "choices": [], "usage": usage})
