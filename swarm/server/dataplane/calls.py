"""The owner of one call: the episodes that it is counted and recorded for, or none; and the recorded answers that a
conversation may go on from.

Invariant: a call in flight keeps all its episodes alive. It ends with the first of them that is over, unless its caller
asked to have the answer all the same, untrained. A call without episodes leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from adapters.dialects.chat import meaning_of
from adapters.dialects.dialect import text_of
from adapters.dialects.jsons import encode
from swarm.concurrency import Interruptible, Latest
from swarm.errors import ConflictError, NotFoundError, SwarmGatewayError, UnavailableError
from swarm.kept_adapters import has_adapter, kept_model, merges_adapter
from swarm.protocol import EpisodeType
from swarm.server.batching.collection import Collection
from swarm.server.dataplane.replica_client import UpstreamRefusalError
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import DELETED, LiveEpisode
from swarm.states import EngineState
from swarm.tokens import History, ModelCall, TokenIds

T = TypeVar("T")

#: ``retry-after`` while the engine sleeps, in seconds
_ASLEEP_SECONDS = 5.0
#: tokens of remembered answers and their prompts, at most: 4 bytes each
_MOST_TOKENS = 8_000_000
#: answers of one text that are remembered, and calls whose conversation is, at most
_MOST_ALIKE, _MOST_ASKED = 64, 100_000
#: what decides with the messages how a prompt is written
_WRITTEN_BY = ("tools", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents")


class CallOwner:
    """The episodes of one call, one or all of a group in the order of its choices; a context manager for as long as the
    call is in flight."""

    def __init__(self, controller: Controller, episodes: Sequence[LiveEpisode]) -> None:
        self.episodes = episodes
        self._controller = controller
        self._recorded: list[tuple[LiveEpisode, ModelCall]] = []
        self._outlives = False
        self._counted: Collection | None = None

    @property
    def episode_type(self) -> EpisodeType | None:
        """The type of the episodes; ``None`` without any."""
        return self.episodes[0].episode_type if self.episodes else None

    @property
    def engine_model(self) -> str:
        """What vLLM is asked for; raises :class:`UnavailableError` if no engine serves."""
        return self._controller.engine.served.engine_model

    @property
    def version(self) -> int:
        """The policy version that samples now."""
        return self._controller.engine.policy_version

    def __enter__(self) -> Self:
        if self.episodes:
            self._counted = self._controller.pool.begin_call(self.episodes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted is not None:
            self._controller.pool.end_call(self.episodes, self._counted)
            self._controller.episodes.pool_changed()

    def check(self) -> None:
        """Raise why one of the episodes is over, if one is."""
        for episode in self.episodes:
            if episode.over.happened:
                raise self._over_error(episode)

    def explain(self, refusal: UpstreamRefusalError) -> SwarmGatewayError | None:
        """The error that the caller gets in the place of vLLM's ``refusal``; ``None``: the refusal stands."""
        return None

    def refuse(self, error: SwarmGatewayError) -> None:
        """Note that the caller gets ``error`` in the place of an answer."""
        for episode in self.episodes:
            episode.refused += error.should_retry

    def answer_is_lost(self) -> bool:
        """Whether a call that its caller repeats was answered before, unless it may be one that was refused."""
        refused = [episode for episode in self.episodes if episode.refused]
        for episode in refused:
            episode.refused -= 1
        return not refused

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        """Keep what was sampled, by the index of the choice."""
        recorded = [(self.episodes[choice], call) for choice, call in calls.items()]
        self._controller.pool.record(recorded)
        self._recorded += recorded

    def count(self, version: int, tokens: int) -> None:
        """Note a call that is not recorded: the weights that sampled it, and how many tokens."""
        for episode in self.episodes:
            episode.unrecorded.append((version, tokens))

    def quarantine(self, choice: int, problem: str) -> None:
        """Never train the episode of this choice; the first problem is kept."""
        # an eval episode may have several choices
        for episode in self.episodes[choice : choice + 1]:
            self._controller.pool.quarantine(episode, problem)

    def quarantine_all(self, problem: str) -> None:
        """Train none of the episodes."""
        for choice in range(len(self.episodes)):
            self.quarantine(choice, problem)

    async def synced(self) -> None:
        """Return when what was recorded is on disk; raises :class:`UnavailableError` if it is not in time, or the disk
        refuses it: the caller can be answered without a record."""
        await self._controller.episodes.caught_up()
        recorded, self._recorded = self._recorded, []
        for episode, call in recorded:
            self._controller.pool.keep(episode, call)

    def outlive(self) -> None:
        """From now on the call continues, untrained, although the engine closes a batch and deletes its episodes."""
        self._outlives = True

    async def while_open(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``work()``, which is cancelled when an episode ends (but see :meth:`outlive`) or the engine
        that serves it is gone.

        Raises:
            SwarmGatewayError: why the episode is over, or that no engine serves.
        """
        engine_gone = self._controller.engine.served.gone
        with Interruptible() as working:

            def closed() -> None:
                for episode in self.episodes:
                    if episode.over.happened and not self._survives(episode):
                        working.interrupt(self._over_error(episode))
                        return

            def gone() -> None:
                # a moment later the pool knows too, and has the better error for an episode that ends with the engine
                asyncio.get_running_loop().call_soon(lambda: working.interrupt(self._gone_error()))

            for episode in self.episodes:
                episode.over.tell(closed)
            engine_gone.tell(gone)
            try:
                return await work()
            finally:
                engine_gone.forget(gone)
                for episode in self.episodes:
                    episode.over.forget(closed)

    def _survives(self, episode: LiveEpisode) -> bool:
        """Whether the call continues although the episode is over: the reader has seen the beginning of the answer."""
        return self._outlives and episode.over_error is not None and episode.over_error.code == DELETED

    def _gone_error(self) -> SwarmGatewayError:
        try:
            self.check()
            served = self._controller.engine.served
        except SwarmGatewayError as exc:
            return exc
        # the next engine is up already
        return UnavailableError(
            f"the engine was started again while it served the call (policy version {served.policy_version} now)",
            code="engine_offline",
            retry_after=1.0,
        )

    def _over_error(self, episode: LiveEpisode) -> SwarmGatewayError:
        error = episode.over_error or UnavailableError("the episode is over")
        if len(self.episodes) == 1:
            return error
        message = f"episode {episode.episode_uuid} of the group is over, so its group is not sampled: {error.message}"
        if isinstance(error, UnavailableError):
            return UnavailableError(message, code=error.code, retry_after=error.retry_after or 5.0)
        return ConflictError(message, code=error.code)


class UnrecordedCall(CallOwner):
    """A call for no episode: never recorded, never trained. ``kept`` is the version that answers, whose adapter is in
    ``run_dir``, or ``None`` for the newest."""

    def __init__(self, controller: Controller, run_dir: Path, kept: int | None = None) -> None:
        super().__init__(controller, ())
        self._run_dir = run_dir
        self._kept = kept

    @property
    def engine_model(self) -> str:
        """With a kept version, the name of that."""
        model = super().engine_model
        return model if self._kept is None else kept_model(model, self._kept)

    @property
    def version(self) -> int:
        """A kept version stays what it is."""
        return super().version if self._kept is None else self._kept

    def check(self) -> None:
        """Raise why it is not answered now: no engine serves, or it sleeps while it trains, or lacks the version.

        Raises:
            UnavailableError: later it may be.
            NotFoundError: the job trains no adapter, so that one version fits into its engine.
        """
        controller = self._controller
        if not controller.engine.served.stays_awake and controller.engine.state is EngineState.WEIGHT_SYNCING:
            raise UnavailableError(
                "the engine trains and does not serve meanwhile", code="engine_syncing", retry_after=_ASLEEP_SECONDS
            )
        if self._kept is None:
            return
        if controller.job.lora is None or merges_adapter(controller.job):
            raise NotFoundError(
                "the job trains all weights, or merges its adapter into them: its engine serves the newest alone"
            )
        if not has_adapter(self._run_dir, self._kept):
            raise self._not_kept("its adapter is not there")

    def explain(self, refusal: UpstreamRefusalError) -> SwarmGatewayError | None:
        """vLLM has no such model: it could not load the adapter; or (409) it has no room for it now. The newest one
        never answers in its place."""
        if self._kept is None or refusal.status not in (404, 409):
            return None
        return self._not_kept(refusal.words, "engine_busy" if refusal.status == 409 else "version_not_kept")

    def _not_kept(self, why: str, code: str = "version_not_kept") -> UnavailableError:
        return UnavailableError(f"version {self._kept} does not answer: {why}", code=code, retry_after=_ASLEEP_SECONDS)


class Conversations:
    """The latest recorded answers, by the conversation that each of them ends.

    A conversation is known by what its messages mean, so that the next call finds the answer in whichever episode it
    was sampled. Whether the prompt can begin with those tokens is for the engine to see.

    They tell with which tokens a prompt may begin, so all that a prompt is written from counts: the model, instructions
    and tools. :func:`gateway.sessions.memory.digests_of` tells which turn a request continues, whatever became of
    the instructions since.

    Args:
        most_tokens: what is remembered; the oldest is forgotten first.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        #: after a conversation's messages with the answer: prompt, answer and its words, by episode, the latest last
        self._answers: OrderedDict[bytes, dict[str, tuple[TokenIds, TokenIds, bytes]]] = OrderedDict()
        #: conversations before the answer, and the episodes that asked
        self._asked = Latest[tuple[bytes, str], None](_MOST_ASKED)

    def begin(self, model: str, body: Mapping[str, Any], episodes: Sequence[LiveEpisode]) -> Continuation:
        """How the conversation of a chat's ``body`` goes on, for ``episodes`` of a job that trains ``model``."""
        state = blake2b(encode([model, *(body.get(name) for name in _WRITTEN_BY)]), digest_size=16)
        messages: list[Any] = body["messages"]
        # each message of the assistant, the conversation before it, and with it
        steps: list[tuple[Any, bytes, bytes]] = []
        earlier = state
        for message in messages:
            earlier = state.copy()
            state.update(meaning_of(message))
            if isinstance(message, dict) and cast("dict[str, Any]", message).get("role") == "assistant":
                steps.append((message, earlier.digest(), state.digest()))
        begun, beginning = "", None
        if body.get("continue_final_message") and steps and steps[-1][0] is messages[-1]:
            # the answer is the rest of that message, and comes back with it as one
            beginning = messages[-1]
            state, begun = earlier, "" if body.get("echo") else text_of(beginning)
        names = [episode.episode_uuid for episode in episodes]
        continuation = Continuation(self, names, state, begun)
        for message, before, after in reversed(steps):
            if (answers := self._answers.get(after)) is not None:
                words = _words(message)
                # of answers that mean the same, the one that came back: each may have had its own reasoning
                latest = max(reversed(answers), key=lambda name: (answers[name][2] == words, name in names))
                continuation.earlier = answers[latest][:2]
                break
            continuation.edited |= message is not beginning and any((before, name) in self._asked for name in names)
        return continuation

    def remember(self, before: bytes, after: bytes, episode_uuid: str, call: ModelCall, words: bytes) -> None:
        """Keep an answer to the conversation ``before``."""
        self._forget(after, episode_uuid)
        answers = self._answers.setdefault(after, {})
        self._answers.move_to_end(after)
        answers[episode_uuid] = (call.prompt_ids, call.response_ids, words)
        self._tokens += len(call.prompt_ids) + len(call.response_ids)
        if len(answers) > _MOST_ALIKE:
            self._forget(after, next(iter(answers)))
        while self._tokens > self._most_tokens:
            oldest, alike = next(iter(self._answers.items()))
            self._forget(oldest, next(iter(alike)))
        self._asked[before, episode_uuid] = None

    def forget(self, episode_uuids: Iterable[str]) -> None:
        """Forget what was sampled in these episodes."""
        names = set(episode_uuids)
        for after, alike in list(self._answers.items()):
            for name in names.intersection(alike):
                self._forget(after, name)

    def _forget(self, after: bytes, episode_uuid: str) -> None:
        alike = self._answers.get(after, {})
        if (answer := alike.pop(episode_uuid, None)) is not None:
            self._tokens -= len(answer[0]) + len(answer[1])
            if not alike:
                del self._answers[after]


def _words(message: Mapping[str, Any]) -> bytes:
    """What a message of the assistant says and thinks, to the letter."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    return blake2b(encode([text_of(message), thought]), digest_size=16).digest()


@dataclass
class Continuation:
    """What one chat call goes on from.

    Attributes:
        earlier: prompt and answer of the latest answer in it that is remembered.
        edited: an episode of the call was given another answer than the messages have, after ``earlier``.
    """

    _conversations: Conversations
    _episodes: Sequence[str]
    _state: Any = field(repr=False)
    _begun: str = field(default="", repr=False)
    earlier: tuple[TokenIds, TokenIds] | None = None
    edited: bool = False

    @property
    def earlier_ids(self) -> list[int]:
        """The tokens with which the prompt shall begin, if its text allows it; none if no answer is remembered."""
        return [] if self.earlier is None else np.concatenate(self.earlier).tolist()

    def history(self, prompt_ids: TokenIds) -> History:
        """How ``prompt_ids``, the call's prompt, treats the earlier answer."""
        if self.edited:
            return "edited"
        if self.earlier is None:
            return "new"
        begins = np.concatenate(self.earlier)
        return "kept" if np.array_equal(prompt_ids[: len(begins)], begins) else "lost"

    def remember(self, calls: Mapping[int, ModelCall], messages: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep what was sampled and on disk, by the index of the choice, with the message that the caller gets."""
        before = self._state.digest()
        for choice, call in calls.items():
            if (message := messages.get(choice)) is not None:
                if self._begun:
                    message = {**message, "content": self._begun + text_of(message)}
                state = self._state.copy()
                state.update(meaning_of(message))
                after, episode_uuid = state.digest(), self._episodes[choice]
                self._conversations.remember(before, after, episode_uuid, call, _words(message))
