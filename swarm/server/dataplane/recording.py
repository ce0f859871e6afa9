"""What vLLM reports of one call's tokens, collected from whole responses or stream chunks and checked choice by choice.

Invariant: a :class:`ModelCall` is made only if token ids, log-probabilities and usage agree.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct

from swarm.errors import UpstreamError
from swarm.tokens import CallPart, ModelCall, TokenIds, WeightSyncs, join_runs, logprobs, token_ids

#: vLLM reports this where it has no log-probability of the sampled token.
_NO_LOGPROB = -9999.0


class TokenEntry(Struct, gc=False):
    """What the record needs of a token's entry in an answer; a struct, because an answer has thousands of entries."""

    logprob: Any = None


@dataclass
class ChoiceTokens:
    """The tokens of one choice of a call, as vLLM sends them; :meth:`Recorder.calls` checks them."""

    response_ids: list[Any] = field(default_factory=list[Any])
    logprobs: list[Any] = field(default_factory=list[Any])
    finish_reason: str | None = None
    problem: str = ""
    #: the requests that continued the first call
    parts: list[CallPart] = field(default_factory=list[CallPart])
    #: how many ids and log-probabilities the first call gave, once other calls continue it
    _before: tuple[int, int] | None = None
    #: tokens of the choice according to the usage of its last continuation
    _counted: int | None = None

    def add_chat(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a chat response or chat chunk."""
        content: list[Any] = (choice.get("logprobs") or {}).get("content") or []
        if content and isinstance(content[0], TokenEntry):
            self._add(choice, [entry.logprob for entry in content])
        else:
            self._add(choice, [entry.get("logprob") for entry in content])

    @property
    def cut(self) -> bool:
        """Whether other calls continue the first one."""
        return self._before is not None

    def begin_continuation(self) -> None:
        """The first call was cut; from now on other calls sample, and their usage counts."""
        self._before = (len(self.response_ids), len(self.logprobs))

    def add_continuation(self, choice: Mapping[str, Any], prompt_ids: list[int], request: str) -> None:
        """Add a choice of a /v1/completions chunk of ``request`` that continues this one after ``prompt_ids``."""
        if self.parts:
            self.parts[-1].request = request
        prompt: list[int] | None = choice.get("prompt_token_ids")
        if prompt is not None and prompt != [*prompt_ids, *self.response_ids]:
            self._disagree("the continuation was sampled after another prompt")
        self._add(choice, (choice.get("logprobs") or {}).get("token_logprobs") or [])

    def count_continuation(self, usage: Mapping[str, Any], prompt_tokens: int, done: int) -> None:
        """Add the usage of a continuation that began after ``prompt_tokens`` and ``done`` tokens of the answer."""
        self._counted = done + int(usage.get("completion_tokens") or 0)
        if int(usage.get("prompt_tokens") or 0) != prompt_tokens + done:
            self._disagree("the continuation's usage tells of another prompt")

    def finish_at(self, finish_reason: str) -> None:
        """No more tokens will come."""
        self.finish_reason = finish_reason
        self._counted = len(self.response_ids)

    def span(self) -> tuple[int, int]:
        """The fewest and the most tokens that the first call may have counted for this choice."""
        ids, values = self._before or (len(self.response_ids), len(self.logprobs))
        return min(ids, values), max(ids, values)

    def check(self, usage: Mapping[str, Any], *, alone: bool) -> str:
        """What is wrong with the counts of this choice; empty: nothing.

        Args:
            usage: the first call's.
            alone: whether that call had only this choice.
        """
        if self.problem:
            return self.problem
        counted: int | None = self._counted if self.cut else usage.get("completion_tokens")
        if counted is None:
            return "vLLM sent no usage"
        if not self.cut and not alone:
            counted = None
        sampled = len(self.response_ids)
        if sampled == len(self.logprobs) and counted in (None, sampled):
            return ""
        by_usage = "" if counted is None else f" and {counted} tokens by usage"
        return f"{sampled} token ids, {len(self.logprobs)} log-probabilities{by_usage}"

    def _add(self, choice: Mapping[str, Any], values: list[Any]) -> None:
        self.response_ids += choice.get("token_ids") or ()
        self.logprobs += values
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _disagree(self, message: str) -> None:
        self.problem = self.problem or message


class Recorder:
    """The tokens of one call with ``samples`` choices, begun while ``version`` was served, perhaps over ``syncs``."""

    def __init__(self, version: int, samples: int, syncs: WeightSyncs | None = None) -> None:
        self.choices = [ChoiceTokens() for _ in range(samples)]
        self.prompt_ids: list[int] | None = None
        self._syncs = syncs or WeightSyncs()
        self._first = self._syncs.begin(version)
        self._name = secrets.token_hex(16)
        self._usage: dict[str, Any] = {}
        self._problem = ""

    def add(self, answer: Mapping[str, Any], request: str) -> None:
        """Add a chat response or a chat chunk; ``request`` is the id that vLLM gave it.

        Raises:
            UpstreamError: it has a choice that was not asked for.
        """
        self._first.request = request
        prompt: list[int] | None = answer.get("prompt_token_ids")
        if prompt is not None:
            if self.prompt_ids not in (None, prompt):
                self._problem = "the choices were sampled after different prompts"
            self.prompt_ids = prompt
        if answer.get("usage"):
            self._usage = answer["usage"]
        for choice in answer.get("choices") or ():
            index: Any = choice.get("index", 0)
            if not isinstance(index, int) or not 0 <= index < len(self.choices):
                raise UpstreamError(f"vLLM sent choice {index!r} of {len(self.choices)}", code="engine_failed")
            self.choices[index].add_chat(choice)

    def usage(self) -> dict[str, Any]:
        """The usage for the caller: vLLM's own, or the sum over all calls that made this one."""
        if not any(choice.cut for choice in self.choices):
            return self._usage
        prompt, completion = len(self.prompt_ids or ()), sum(len(choice.response_ids) for choice in self.choices)
        total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**self._usage, **total}

    def calls(self, max_version: int) -> list[ModelCall | str]:
        """For each choice the finished call, or what disagrees in it.

        A choice that disagrees with itself concerns only itself. The usage counts all choices together: it is compared
        with their sum, where a choice that disagrees with itself may count as either of its numbers.
        """
        alone, shared = len(self.choices) == 1, self._shared_problem()
        try:
            # read once: the calls share the array
            prompt_ids = token_ids(self.prompt_ids or ())
        except ValueError as exc:
            shared = shared or f"vLLM sent prompt token ids that are {exc}"
            prompt_ids = token_ids(())
        return [
            choice.check(self._usage, alone=alone) or shared or self._call(index, prompt_ids, max_version)
            for index, choice in enumerate(self.choices)
        ]

    def _shared_problem(self) -> str:
        if self._problem:
            return self._problem
        if self.prompt_ids is None:
            return "vLLM sent no prompt token ids"
        counted: int | None = self._usage.get("completion_tokens")
        if counted is None:
            return ""  # each choice checks for it
        spans = [choice.span() for choice in self.choices]
        fewest, most = sum(low for low, _ in spans), sum(high for _, high in spans)
        if not fewest <= counted <= most:
            return f"{most} tokens in all choices but {counted} by usage"
        prompt = self._usage.get("prompt_tokens")
        if len(self.prompt_ids) != prompt:
            return f"{len(self.prompt_ids)} prompt token ids but {prompt} prompt tokens by usage"
        return ""

    def _call(self, index: int, prompt_ids: TokenIds, max_version: int) -> ModelCall | str:
        choice = self.choices[index]
        try:
            response_ids, values = token_ids(choice.response_ids), logprobs(choice.logprobs)
        except ValueError as exc:
            return f"vLLM sent token ids or log-probabilities that are {exc}"
        if not ((values > _NO_LOGPROB) & np.isfinite(values)).all():
            return "a sampled token has no log-probability"
        runs = join_runs(self._syncs.runs([self._first, *choice.parts], index, len(response_ids), max_version))
        # where it is not known: whatever was served meanwhile
        sampled_by = [version for _, version in runs] or [self._first.version, max_version]
        return ModelCall(
            call_id=f"call-{self._name}-{index}",
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            logprobs=values,
            min_policy_version=min(sampled_by),
            max_policy_version=max(sampled_by),
            versions=runs if len(runs) > 1 else [],
            finish_reason=choice.finish_reason or "",
        )
