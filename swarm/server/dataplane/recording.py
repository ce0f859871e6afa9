"""What vLLM says it sampled in one call, gathered from plain answers and stream chunks, and checked choice by choice.

Invariant: a :class:`ModelCall` comes out only if token ids, log-probabilities and usage agree.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from swarm.errors import TokenTruthError, UpstreamError
from swarm.tokens import ModelCall, TokenIds, token_ids

#: vLLM reports this where it has no log-probability of the sampled token
_NO_LOGPROB = -9999.0


class Sampled(NamedTuple):
    """All that a plain answer says of one choice, in numbers that are certain to be some.

    Attributes:
        number: of the choice.
        ids: of its tokens.
        logprobs: of these, finite.
        finish_reason: see :attr:`Choice.finish_reason`.
    """

    number: int
    ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


@dataclass
class Choice:
    """The tokens of one choice of a call."""

    response_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    problem: TokenTruthError | None = None
    #: that the lists hold numbers only is certain; they are others', and not to be changed
    typed: bool = False
    #: numbers of ids and of log-probabilities that the first call gave, once other calls continue it
    _before: tuple[int, int] | None = None
    #: tokens of the choice by the usage of its last continuation
    _counted: int | None = None

    def add_chat(self, choice: Mapping[str, Any]) -> None:
        """Take in a choice of a chat answer or chat chunk."""
        content: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or []
        self._add(choice.get("token_ids"), [entry.get("logprob") for entry in content])
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def take(self, sampled: Sampled) -> None:
        """Take in all there is."""
        if self.response_ids or min(sampled.logprobs, default=0.0) <= _NO_LOGPROB:
            self._add(sampled.ids, sampled.logprobs)
        else:
            self.response_ids, self.logprobs, self.typed = sampled.ids, sampled.logprobs, True
        self.finish_reason = sampled.finish_reason

    def begin_continuation(self) -> None:
        """The first call was cut: what comes now is sampled by other calls, which count for themselves."""
        self._before = (len(self.response_ids), len(self.logprobs))

    def add_continuation(self, choice: dict[str, Any], prompt_ids: list[int]) -> None:
        """Take in a choice of a /v1/completions chunk that continues this one after ``prompt_ids``."""
        prompt: list[int] | None = choice.get("prompt_token_ids")
        if prompt is not None and prompt != [*prompt_ids, *self.response_ids]:
            self._disagree("the continuation was sampled after another prompt", "prompt_mismatch")
        self._add(choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs") or [])
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def count_continuation(self, usage: dict[str, Any], prompt_tokens: int, done: int) -> None:
        """Take in the usage of a continuation whose prompt were ``prompt_tokens`` and ``done`` tokens of the answer."""
        self._counted = done + int(usage.get("completion_tokens") or 0)
        if int(usage.get("prompt_tokens") or 0) != prompt_tokens + done:
            self._disagree("the continuation's usage tells of another prompt", "prompt_mismatch")

    def finish_at(self, finish_reason: str) -> None:
        """The tokens that are there are all there will be."""
        self.finish_reason = finish_reason
        self._counted = len(self.response_ids)

    def span(self) -> tuple[int, int]:
        """The fewest and the most tokens that the first call may have counted for this choice."""
        ids, logprobs = self._before or (len(self.response_ids), len(self.logprobs))
        return min(ids, logprobs), max(ids, logprobs)

    def check(self, usage: dict[str, Any], *, alone: bool) -> TokenTruthError | None:
        """What is wrong with this choice by itself; ``usage`` is the first call's, ``alone`` if that had no others."""
        if self.problem is not None:
            return self.problem
        counted: int | None = self._counted if self._before is not None else usage.get("completion_tokens")
        if counted is None:
            return TokenTruthError("vLLM sent no usage", code="usage_missing")
        if self._before is None and not alone:
            counted = None
        sampled = len(self.response_ids)
        if sampled == len(self.logprobs) and counted in (None, sampled):
            return None
        by_usage = "" if counted is None else f" and {counted} tokens by usage"
        return TokenTruthError(f"{sampled} token ids, {len(self.logprobs)} log-probabilities{by_usage}", code="counts")

    def _add(self, ids: list[int] | None, logprobs: list[Any]) -> None:
        if self.typed:
            self.response_ids, self.logprobs, self.typed = [*self.response_ids], [*self.logprobs], False
        self.response_ids += ids or []
        for value in logprobs:
            # not isinstance: this runs for each token sampled, and JSON gives exactly these types
            if (type(value) is float or type(value) is int) and _NO_LOGPROB < value < math.inf:
                self.logprobs.append(value)
            else:
                self._disagree("a sampled token has no log-probability", "logprob_missing")
                self.logprobs.append(_NO_LOGPROB)

    def _disagree(self, message: str, code: str) -> None:
        self.problem = self.problem or TokenTruthError(message, code=code)


class Recorder:
    """The tokens of one call with ``samples`` choices; no weights older than ``min_version`` sampled them."""

    def __init__(self, min_version: int, samples: int) -> None:
        self.choices = [Choice() for _ in range(samples)]
        self.prompt_ids: list[int] | None = None
        self._min_version = min_version
        self._usage: dict[str, Any] = {}
        self._cut = False
        self._problem: TokenTruthError | None = None

    def add(self, answer: Mapping[str, Any], sampled: Iterable[Sampled] | None = None) -> None:
        """Take in a chat answer or a chat chunk.

        Args:
            sampled: what the choices of an answer say, where that is known already.

        Raises:
            UpstreamError: it has a choice that was not asked for.
        """
        prompt: list[int] | None = answer.get("prompt_token_ids")
        if prompt is not None:
            if self.prompt_ids not in (None, prompt):
                self._problem = TokenTruthError("the choices were sampled after different prompts", code="prompts")
            self.prompt_ids = prompt
        if answer.get("usage"):
            self._usage = answer["usage"]
        if sampled is not None:
            for one in sampled:
                self.choice(one.number).take(one)
            return
        for choice in answer.get("choices") or ():
            self.choice(choice.get("index", 0)).add_chat(choice)

    def choice(self, index: Any) -> Choice:
        """The choice of this number.

        Raises:
            UpstreamError: it was not asked for.
        """
        if not isinstance(index, int) or not 0 <= index < len(self.choices):
            raise UpstreamError(f"vLLM sent choice {index!r} of {len(self.choices)}", code="engine_failed")
        return self.choices[index]

    def begin_continuation(self, index: int) -> None:
        """Choice ``index`` was cut."""
        self._cut = True
        self.choices[index].begin_continuation()

    def usage(self) -> dict[str, Any]:
        """The usage for the caller: vLLM's own, or that of all its calls for this one."""
        if not self._cut:
            return self._usage
        prompt, completion = len(self.prompt_ids or ()), sum(len(choice.response_ids) for choice in self.choices)
        total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**self._usage, **total}

    def calls(self, max_version: int) -> list[ModelCall | TokenTruthError]:
        """For each choice the finished call, or what disagrees in it.

        A choice that disagrees with itself concerns only itself. The usage is about all choices together: it is held
        against their sum, where a choice that disagrees with itself may count as either of its numbers.
        """
        alone = len(self.choices) == 1
        shared = self._shared_problem()
        prompt_ids = token_ids(self.prompt_ids or ())
        return [
            choice.check(self._usage, alone=alone) or shared or self._call(choice, prompt_ids, max_version)
            for choice in self.choices
        ]

    def _shared_problem(self) -> TokenTruthError | None:
        if self._problem is not None:
            return self._problem
        if self.prompt_ids is None:
            return TokenTruthError("vLLM sent no prompt token ids", code="prompt_missing")
        counted: int | None = self._usage.get("completion_tokens")
        if counted is None:
            return None  # each choice has been asked for it
        spans = [choice.span() for choice in self.choices]
        fewest, most = sum(low for low, _ in spans), sum(high for _, high in spans)
        if not fewest <= counted <= most:
            return TokenTruthError(f"{most} tokens in all choices but {counted} by usage", code="counts")
        prompt = self._usage.get("prompt_tokens")
        if len(self.prompt_ids) != prompt:
            return TokenTruthError(
                f"{len(self.prompt_ids)} prompt token ids but {prompt} prompt tokens by usage", code="prompt_counts"
            )
        return None

    def _call(self, choice: Choice, prompt_ids: TokenIds, max_version: int) -> ModelCall:
        return ModelCall(
            call_id=f"call-{secrets.token_hex(16)}",
            prompt_ids=prompt_ids,
            response_ids=token_ids(choice.response_ids),
            logprobs=np.asarray(choice.logprobs, np.float32),
            min_policy_version=min(self._min_version, max_version),
            max_policy_version=max_version,
            finish_reason=choice.finish_reason or "",
        )
