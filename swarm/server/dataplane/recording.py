"""What vLLM says it sampled in one call, gathered from plain answers and stream chunks, and checked.

Invariant: a :class:`ModelCall` comes out only if token ids, log-probabilities and usage agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import TokenTruthError
from swarm.types import ModelCall

#: vLLM reports this where it has no log-probability of the sampled token
_NO_LOGPROB = -9999.0


@dataclass
class Recorder:
    """The tokens of one call; ``min_version`` is the oldest weights that may have sampled one."""

    min_version: int
    prompt_ids: list[int] | None = None
    response_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    finish_reason: str | None = None
    problem: str = ""

    def add_choice(self, choice: dict[str, Any]) -> None:
        """Take in a choice of a chat answer or chat chunk."""
        content: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or []
        self._add(choice.get("token_ids"), [entry.get("logprob") for entry in content])
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def add_completion_choice(self, choice: dict[str, Any]) -> None:
        """Take in a choice of a /v1/completions chunk that continues this call."""
        prompt: list[int] | None = choice.get("prompt_token_ids")
        if prompt is not None and prompt != [*(self.prompt_ids or []), *self.response_ids]:
            self.problem = self.problem or "the continuation was sampled after another prompt"
        self._add(choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs") or [])
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def add_usage(self, usage: dict[str, Any], already_sampled: int = 0) -> None:
        """Take in the usage; ``already_sampled`` tokens of a continuation's prompt belong to the answer."""
        self.usage = dict(usage)
        self.usage["prompt_tokens"] = int(usage.get("prompt_tokens") or 0) - already_sampled
        self.usage["completion_tokens"] = int(usage.get("completion_tokens") or 0) + already_sampled

    def _add(self, ids: list[int] | None, logprobs: list[Any]) -> None:
        self.response_ids += ids or []
        if any(not isinstance(p, int | float) or not math.isfinite(p) or p <= _NO_LOGPROB for p in logprobs):
            self.problem = self.problem or "a sampled token has no log-probability"
        self.logprobs += [p if isinstance(p, int | float) else _NO_LOGPROB for p in logprobs]

    def call(self, call_id: str, max_version: int) -> ModelCall:
        """The finished call.

        Raises:
            TokenTruthError: says which of ids, log-probabilities and usage disagree.
        """
        if self.problem:
            raise TokenTruthError(self.problem)
        if self.prompt_ids is None or not self.usage:
            raise TokenTruthError("vLLM sent no prompt token ids or no usage")
        prompt, completion = self.usage["prompt_tokens"], self.usage["completion_tokens"]
        sampled = len(self.response_ids)
        if not sampled == len(self.logprobs) == completion:
            raise TokenTruthError(
                f"{sampled} token ids, {len(self.logprobs)} log-probabilities and {completion} tokens by usage"
            )
        if len(self.prompt_ids) != prompt:
            raise TokenTruthError(f"{len(self.prompt_ids)} prompt token ids but {prompt} prompt tokens by usage")
        return ModelCall(
            call_id=call_id,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            logprobs=self.logprobs,
            min_policy_version=min(self.min_version, max_version),
            max_policy_version=max_version,
            finish_reason=self.finish_reason or "",
        )
