"""vLLM's answers: the tokens of one call, collected from whole responses or stream chunks and checked choice by choice;
and the form that the caller asked for.

Invariant: a :class:`ModelCall` is made only if token ids, log-probabilities and usage agree. Token ids,
log-probabilities, usage chunks and engine-side names reach the caller only if it asked for them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypedDict

import numpy as np
from msgspec import Struct
from msgspec.json import Decoder

from adapters.dialects import ChatDialect, CompletionsDialect
from adapters.dialects.jsons import decode
from swarm.errors import UpstreamError
from swarm.server.dataplane.requests import ChatCall
from swarm.tokens import ABORTED, CallPart, ModelCall, TokenIds, WeightSyncs, join_runs, logprobs, token_ids

Body = dict[str, Any]

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

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a chat response or chat chunk."""
        content: list[Any] = (choice.get("logprobs") or {}).get("content") or []
        if content and isinstance(content[0], TokenEntry):
            self.logprobs += [entry.logprob for entry in content]
        else:
            self.logprobs += [entry.get("logprob") for entry in content]
        self.response_ids += choice.get("token_ids") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def cut(self) -> bool:
        """Whether other calls continue the first one."""
        return self._before is not None

    def begin_continuation(self) -> None:
        """The first call was cut; from now on other calls sample, and their usage counts."""
        self._before = (len(self.response_ids), len(self.logprobs))

    def add_continuation(self, chunk: Mapping[str, Any], prompt_ids: list[int], request: str) -> None:
        """Add a chat chunk of ``request``, which continues this choice after ``prompt_ids``."""
        if self.parts:
            self.parts[-1].request = request
        prompt: list[int] | None = chunk.get("prompt_token_ids")
        if prompt is not None and prompt != [*prompt_ids, *self.response_ids]:
            self._disagree("the continuation was sampled after another prompt")
        for choice in chunk["choices"]:
            self.add(choice)

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
            self.choices[index].add(choice)

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


# ---------------------------------------------------------------------- the form that the caller asked for

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

    def continued(self, choices: list[Body]) -> Body:
        """The chat chunk with these ``choices`` of a continuation."""
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
                **_token(token or "", value),
                # vLLM always adds the sampled token to the completions' list; the chat form has only the best
                "top_logprobs": [_token(other, logprob) for other, logprob in (best or {}).items()],
            }
            # a list that is shorter than the others has to be told by the record
            for token, value, best in zip_longest(tokens, values, tops)
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
