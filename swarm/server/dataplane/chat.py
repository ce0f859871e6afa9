"""One chat call through vLLM, plain or streamed, and its record.

Invariant: ``finish_reason: "abort"`` (vLLM replaces its weights) never reaches a caller; what is recorded is what was
delivered, token for token, and it is on disk before the end of the answer is sent. A chunk with a finish reason is held
back until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from adapters.dialects.chat_answers import MessageAssembly
from swarm.errors import UpstreamError
from swarm.server.dataplane.answers import Body, Recorder, Shaper, as_chat, reader, with_aborts
from swarm.server.dataplane.calls import CallOwner, Continuation
from swarm.server.dataplane.replica_client import AbortedError, ReplicaClient, Retries, TransientError
from swarm.server.dataplane.replicas import Placement
from swarm.server.dataplane.requests import ChatCall, holds_text, stops_of
from swarm.tokens import ModelCall, WeightSyncs


class Attempt:
    """One attempt; feed it with :meth:`take`.

    Args:
        call: what is asked for.
        shaper: shared by all attempts of the call.
        version: the policy version that is served when the attempt begins.
        syncs: the weight syncs that it may run over.
    """

    def __init__(self, call: ChatCall, shaper: Shaper, version: int, syncs: WeightSyncs) -> None:
        self.recorder = Recorder(version, call.samples, syncs)
        #: whether the caller has seen anything of this attempt
        self.delivered = False
        self._call = call
        self._holds_text = holds_text(call.body)
        self._shaper = shaper
        self._opening: list[Body] = []
        self._ends: dict[int, Body] = {}
        # choices with a token that did not become plain text, so that the rest cannot be sampled as text
        self._parsed: set[int] = set()
        # choices with tokens whose text vLLM may not have sent yet, and those whose last token ends within a character
        self._held: set[int] = set()
        self._broken: set[int] = set()
        self._messages: dict[int, MessageAssembly] = {}

    def messages(self) -> dict[int, Body]:
        """What was said so far, by the index of the choice."""
        return {index: assembly.message() for index, assembly in self._messages.items()}

    def take(self, event: Body) -> list[Body]:
        """The chunks for the caller after vLLM's ``event``."""
        chunk = with_aborts(as_chat(event, "delta") if self._call.raw else event)
        self.recorder.add(chunk, str(event.get("id")))
        choices: list[Body] = chunk.get("choices") or []
        for choice in choices:
            self._look_at(choice)
        if not choices:
            self._shaper.closed(chunk)
            return []  # the usage: delivered at the end
        shaped = self._shaper.chunk(chunk)
        if len(choices) == 1:
            return self._choose(shaped, choices[0])
        return [out for choice in shaped["choices"] for out in self._choose(shaped | {"choices": [choice]}, choice)]

    def cut(self) -> list[int]:
        """The choices that have no end yet."""
        return [index for index in range(self._call.samples) if index not in self._ends]

    def take_continuation(self, index: int, event: Body, done: int) -> Body | None:
        """The chunk for the caller after ``event`` of a continuation of choice ``index`` that began after ``done``
        tokens; ``None`` if there is nothing to deliver yet."""
        choice, prompt_ids = self.recorder.choices[index], self.recorder.prompt_ids or []
        chunk = as_chat(event, "delta")
        choice.add_continuation(chunk, prompt_ids, str(event.get("id")))
        if event.get("usage"):
            choice.count_continuation(event["usage"], len(prompt_ids), done)
        if not chunk["choices"]:
            return None
        for part in chunk["choices"]:
            part["index"] = index
            self._look_at(part)
        shaped = _without_abort(self._shaper.continued(chunk["choices"]))
        if shaped["choices"][0]["finish_reason"] is None:
            return shaped
        self._ends[index] = shaped
        return None

    def end_at_length(self, index: int) -> None:
        """Choice ``index`` has all the tokens that it may have."""
        self.recorder.choices[index].finish_at("length")
        end = as_chat({"choices": [{"index": index, "finish_reason": "length"}]}, "delta")
        self._ends[index] = self._shaper.continued(end["choices"])

    def ends(self) -> list[Body]:
        """The chunks to deliver once the call is recorded, ends last."""
        return [*self._opening, *map(self._shaper.end, self._ends.values())]

    def continuable(self, index: int) -> bool:
        """Whether to sample on after the tokens of choice ``index`` gives what one call would have given, see
        :meth:`ChatCall.continuation`."""
        whole = not self.recorder.choices[index].problem and bool(self.recorder.prompt_ids)
        return self._call.continuable and index not in self._parsed and whole and self.says_all(index)

    def says_all(self, index: int) -> bool:
        """Whether the caller has the text of all tokens of choice ``index``, and it does not end as a stop text begins:
        who samples on would not know the rest for one. After half a character, vLLM would begin with all the prompt."""
        text = self._messages[index].message()["content"] or "" if index in self._messages else ""
        stops = [stop[: len(text) + 1] for stop in stops_of(self._call.body)]
        begun = any(text.endswith(stop[:end]) for stop in stops for end in range(1, len(stop)))
        return index not in self._held and index not in self._broken and not begun

    def _look_at(self, choice: Body) -> None:
        index: int = choice.get("index", 0)
        delta: Body = choice.get("delta") or {}
        self._messages.setdefault(index, MessageAssembly()).take(delta)
        if len(delta) != 1 or "content" not in delta:
            # a parser that holds text back sends tokens without content
            held_back = bool(choice.get("token_ids")) and "content" not in delta
            if held_back or any(delta.get(key) for key in delta.keys() - {"role", "content"}):
                self._parsed.add(index)
        if choice.get("token_ids"):
            last = _last_token(choice)
            if last is None and not self._holds_text:
                last = delta.get("content")
            if last and not last.endswith("\ufffd"):
                self._broken.discard(index)
            else:
                self._broken.add(index)
        if choice.get("finish_reason"):
            # with an abort, too, vLLM sends what it held back
            self._held.discard(index)
        elif choice.get("token_ids") and self._holds_text:
            self._held.add(index)

    def _choose(self, chunk: Body, choice: Body) -> list[Body]:
        """Deliver ``chunk``, whose only choice is ``choice``, or hold it back."""
        finish: str | None = choice.get("finish_reason")
        if finish not in (None, "abort"):
            self._ends[choice.get("index", 0)] = chunk
            return []
        says = _says_something(choice)
        if finish == "abort":
            chunk = _without_abort(chunk)
        # after an abort the call is repeated, if nothing is delivered yet
        if not self.delivered and (finish == "abort" or not says):
            self._opening.append(chunk)
            return []
        self.delivered = True
        ready, self._opening = [*self._opening, chunk], []
        return ready


def _last_token(choice: Body) -> str | None:
    """The text of the last token of a chunk's choice, by its log-probabilities: empty for a part of a character;
    ``None`` without any, or where they name tokens by their ids (``return_tokens_as_token_ids``)."""
    content: list[Any] = (choice.get("logprobs") or {}).get("content") or []
    token: Any = content[-1].get("token") if content else None
    return None if str(token).startswith("token_id:") else token


def _without_abort(chunk: Body) -> Body:
    """``chunk``, whose choices are not over although vLLM aborted them."""
    for choice in chunk["choices"]:
        if choice.get("finish_reason") == "abort":
            choice["finish_reason"] = choice["stop_reason"] = None
    return chunk


def _says_something(choice: Body) -> bool:
    """Whether a choice has more than the role."""
    return any(value for key, value in (choice.get("delta") or {}).items() if key != "role")


class StreamCutError(UpstreamError):
    """A stream was cut and could not be continued; the choices concerned are quarantined."""

    default_code = "stream_cut"


@dataclass(frozen=True, slots=True)
class Completion:
    """A plain answer, the policy version that finished it, and the number of tokens of each choice, in order."""

    answer: Body
    version: int
    tokens: list[int]


@dataclass(frozen=True)
class ChatSession:
    """One call, through as many attempts as it takes.

    Args:
        upstream: the client of vLLM.
        placement: chooses the replica of each attempt.
        call: what is asked for.
        attempts: how often the call, and each continuation of a choice, is tried.
        owner: gets the record, and knows the policy version that is served now.
        goes_on: what the conversation goes on from; without messages, ``None``.
        again: the caller's SDK repeats the call, whose answer did not reach it.
        syncs: the weight syncs that the call may run over.
    """

    upstream: ReplicaClient
    placement: Placement
    call: ChatCall
    attempts: int
    owner: CallOwner
    goes_on: Continuation | None
    again: bool
    syncs: WeightSyncs

    async def complete(self) -> Completion:
        """The plain answer; the call is recorded.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: no answer within the attempts.
            UnavailableError: no engine serves, or the record did not reach the disk in time.
        """
        call, retries = self.call, Retries(self.attempts)
        while True:
            recorder = Recorder(self.owner.version, call.samples, self.syncs)
            try:
                async with self.placement.lease(call.samples) as base_url:
                    answer = with_aborts(await self.upstream.post(base_url + call.path, call.body, reader(call)))
                    choices: list[Body] = answer.get("choices") or []
                    aborted = any(choice.get("finish_reason") in (None, "abort") for choice in choices)
                    if aborted or len(choices) < call.samples:
                        raise AbortedError
            except TransientError as exc:
                await retries.after(exc)
                continue
            request = str(answer.get("id"))
            answer = as_chat(answer, "message") if call.raw else answer
            recorder.add(answer, request)
            version = self.owner.version
            messages = {choice.get("index", 0): choice["message"] for choice in answer["choices"]}
            async with self._recorded(recorder, version, messages):
                shaped = Shaper(call).answer(answer)
            return Completion(shaped, version, [choice.span()[1] for choice in recorder.choices])

    async def stream(self) -> AsyncGenerator[list[Body]]:
        """The chunks for the caller, in lists of those that arrived together. The call is recorded before a chunk with
        a finish reason is yielded.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: the call could not be completed; chunks may have been yielded before.
            StreamCutError: some choices could not be completed, the others are.
            UnavailableError: no engine serves, or the record did not reach the disk in time.
        """
        call, retries = self.call, Retries(self.attempts)
        shaper = Shaper(call)
        while True:
            attempt = Attempt(call, shaper, self.owner.version, self.syncs)
            cut: TransientError = AbortedError()
            try:
                async with (
                    self.placement.lease(call.samples) as base_url,
                    aclosing(self.upstream.events(base_url + call.path, call.body)) as events,
                ):
                    async for together in events:
                        ready: list[Body] = []
                        for event in together:
                            ready += attempt.take(event)
                        if ready:
                            yield ready
                    # a choice that is aborted before its first token has no finish reason at all
                    if attempt.cut():
                        raise cut
            except TransientError as exc:
                if attempt.cut() and not attempt.delivered:
                    await retries.after(exc)
                    continue
                cut = exc
            break
        failures: dict[int, UpstreamError] = {}
        async with aclosing(self._continued(attempt, cut, failures)) as chunks:
            async for chunk in chunks:
                yield [chunk]
        async with self._recorded(attempt.recorder, self.owner.version, attempt.messages(), failures):
            if ends := attempt.ends():
                yield ends
        for failure in failures.values():
            raise StreamCutError(failure.message) from failure
        if call.wants.usage_chunk:
            yield [shaper.usage_chunk(attempt.recorder.usage())]

    async def _continued(
        self, attempt: Attempt, cut: TransientError, failures: dict[int, UpstreamError]
    ) -> AsyncGenerator[Body]:
        """Continue all choices that were cut, at the same time; ``failures`` gets those that cannot be continued."""
        chunks: asyncio.Queue[Body | None] = asyncio.Queue()

        async def run(index: int) -> None:
            attempt.recorder.choices[index].begin_continuation()
            try:
                if not attempt.continuable(index):
                    raise UpstreamError(f"the stream was cut and cannot be continued exactly: {cut.message}")
                await self._continue(attempt, index, cut, chunks.put_nowait)
            except UpstreamError as exc:
                # the agent has seen, and may act on, tokens that are in no record
                failures[index] = exc
                self.owner.quarantine(index, f"a stream was cut and could not be continued: {exc.message}")

        tasks = [asyncio.create_task(run(index)) for index in attempt.cut()]
        together: asyncio.Future[Any] = asyncio.gather(*tasks)
        together.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await together
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, together, return_exceptions=True)

    async def _continue(
        self, attempt: Attempt, index: int, cut: TransientError, deliver: Callable[[Body], None]
    ) -> None:
        """Sample on after the tokens that choice ``index`` has, until it has an end."""
        choice, prompt_ids = attempt.recorder.choices[index], attempt.recorder.prompt_ids or []
        retries = Retries(self.attempts)
        while index in attempt.cut():
            if not attempt.says_all(index):
                raise UpstreamError(f"the stream was cut again and cannot be continued exactly: {cut.message}")
            await retries.after(cut)
            done = len(choice.response_ids)
            if done >= self.call.room(len(prompt_ids)):
                attempt.end_at_length(index)
                return
            body = self.call.continuation(prompt_ids, choice.response_ids)
            choice.parts.append(self.syncs.begin(self.owner.version, done))
            try:
                async with (
                    self.placement.lease(1) as base_url,
                    aclosing(self.upstream.events(f"{base_url}/v1/completions", body)) as events,
                ):
                    async for together in events:
                        for event in together:
                            if (chunk := attempt.take_continuation(index, event, done)) is not None:
                                deliver(chunk)
                    if index in attempt.cut():
                        raise AbortedError
            except TransientError as exc:
                cut = exc

    @asynccontextmanager
    async def _recorded(
        self, recorder: Recorder, version: int, messages: Mapping[int, Body], failures: Collection[int] = ()
    ) -> AsyncGenerator[None]:
        """Record the choices that are not in ``failures`` and wait for the disk; the block sends the answer's end.

        Args:
            messages: what the caller gets, by the index of the choice.
        """
        if not self.call.record:
            self.owner.count(version, sum(choice.span()[1] for choice in recorder.choices))
            yield
            return
        calls: dict[int, ModelCall] = {}
        for index, call in enumerate(recorder.calls(version)):
            if index in failures:
                continue
            if self.call.not_text:
                call = (
                    f"the conversation holds a part that is not text ({self.call.not_text:.40}); only text is trained"
                )
            if isinstance(call, str):
                self.owner.quarantine(index, call)
                continue
            history = "again" if self.again else self.goes_on.history(call.prompt_ids) if self.goes_on else "new"
            calls[index] = structs.replace(call, history=history)
        self.owner.record(calls)
        try:
            await self.owner.synced()
            if self.goes_on is not None:
                self.goes_on.remember(calls, messages)
            yield
        except BaseException:
            # also when the caller leaves: it has not seen what is recorded
            self.owner.quarantine_all("an answer was recorded but could not be delivered")
            raise
