"""Conversations: their delivered turns, which form a tree where the user went back, and a new request's place in one.

Invariant: a conversation belongs to one caller and one route, and a caller finds only its own. Feedback after a group's
submission stays visible to hooks of later requests, and never trains. At most ``max_sessions`` conversations and
``max_bytes`` of their turns are kept; the least recently used leave first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from gateway.config.route import RouteSettings
from gateway.sessions.messages import Digests, similarity, text_of
from gateway.sessions.open_groups import Hold, OpenGroups
from gateway.types import Incoming
from reward_hooks import Feedback, HookRunner, Session, Turn
from swarm.errors import RequestError

#: Names the session; any text of the application's choice.
SESSION = "x-swarm-session"
#: ``true``: the session is over once this request is answered.
SESSION_END = "x-swarm-session-end"
_LONGEST = 256
#: Conversations kept under one digest; only what comes next tells them apart.
_SAME = 8


class Scope(NamedTuple):
    """Who may continue a conversation: callers with one key on one route that name the same session or user."""

    route: str
    key_id: str
    kind: Literal["session", "user", "anyone"]
    name: str


def scope_of(incoming: Incoming, route: str) -> Scope:
    """Named by the header, else by ``metadata.session_id`` of the body, else by the end user in the body.

    Raises:
        RequestError: the header is longer than 256 characters.
    """
    key_id = incoming.caller.key_id
    if name := incoming.headers.get(SESSION, "").strip():
        if len(name) > _LONGEST:
            raise RequestError(f"the header {SESSION} is longer than {_LONGEST} characters", param=SESSION)
        return Scope(route, key_id, "session", name)
    body = incoming.call.body
    metadata: Any = body.get("metadata")
    named = cast("dict[str, Any]", metadata).get("session_id") if isinstance(metadata, dict) else None
    if isinstance(named, str) and 0 < len(named) <= _LONGEST:
        return Scope(route, key_id, "session", named)
    for name in ("safety_identifier", "user"):
        user = body.get(name)
        if isinstance(user, str) and user:
            return Scope(route, key_id, "user", user)
    return Scope(route, key_id, "anyone", "")


def ends(incoming: Incoming) -> bool:
    """Whether the session is over after this request.

    Raises:
        RequestError: the header is neither ``true`` nor ``false``.
    """
    value = incoming.headers.get(SESSION_END, "false").strip().lower()
    if value not in ("true", "false"):
        raise RequestError(f"the header {SESSION_END} must be true or false", param=SESSION_END)
    return value == "true"


@dataclass(frozen=True, slots=True)
class Closing:
    """What became known of a group's delivered answers while it was open.

    Attributes:
        feedback: by the answer's place among the delivered ones (0: the best). If there is any, ask the hook again,
            with it as ``Candidate.feedback``.
        credit: added to the reward of the best delivered answer for the session as a whole.
    """

    feedback: Mapping[int, Feedback]
    credit: float


@dataclass(eq=False)
class DeliveredTurn:
    """One request of a conversation and the answer that was delivered for it.

    Attributes:
        completion_id: names the answer, without its dialect's prefix.
        key_id: of the caller that got it.
        body, message: the request in Chat Completions form and the answer's message.
        reward: of the answer, ``None`` where it was not scored.
        asked, answered: digests of the conversation before and with the answer.
        parent: the turn that this one continues.
        choices: how many answers were delivered.
        size: bytes that only this turn needs.
        said: the caller's feedback, by place among the delivered answers.
        observed: signals about the best delivered answer, by name.
        credit: from the end of the session.
    """

    completion_id: str
    key_id: str
    body: dict[str, Any]
    message: dict[str, Any]
    reward: float | None
    asked: bytes
    answered: bytes
    parent: DeliveredTurn | None
    choices: int = 1
    size: int = 0
    said: dict[int, Feedback] = field(default_factory=dict[int, Feedback])
    observed: dict[str, float] = field(default_factory=dict[str, float])
    credit: float = 0.0
    _open: bool = True
    _feedback_until: float = float("-inf")
    _session_until: float = float("-inf")
    _hold: Hold | None = None

    @property
    def open(self) -> bool:
        """Whether feedback may still train."""
        return self._open

    def waits(self, feedback_until: float, session_until: float) -> None:
        """Set how long the group stays open for feedback and for the session's end (on the loop's clock)."""
        self._feedback_until = feedback_until
        self._session_until = session_until
        self._open = max(feedback_until, session_until) > asyncio.get_running_loop().time()

    def session_over(self) -> None:
        """Stop waiting for the session's end."""
        self._session_until = float("-inf")
        if self._hold is not None:
            self._hold.until = self._feedback_until

    async def closing(self, groups: OpenGroups) -> Closing:
        """Wait until the group is to be submitted; later feedback does not count."""
        try:
            if self._open:
                self._hold = Hold()
                self._hold.until = max(self._feedback_until, self._session_until)
                await groups.keep(self._hold)
        finally:
            self._open = False
            self._hold = None
        return Closing(self.feedback(), self.credit)

    def feedback(self) -> dict[int, Feedback]:
        """Feedback and signals, by place among the delivered answers; the caller's own signals take precedence."""
        feedback = dict(self.said)
        if self.observed:
            best = feedback.get(0) or Feedback()
            feedback[0] = best.model_copy(update={"signals": {**self.observed, **best.signals}})
        return feedback

    def say(self, choice: int, feedback: Feedback) -> bool:
        """Note the caller's feedback to a delivered answer; returns whether it replaces earlier feedback."""
        replaces = choice in self.said
        self.said[choice] = feedback
        return replaces

    def observe(self, signal: str, strength: float) -> None:
        """Note a signal; of one signal the strongest observation stands."""
        self.observed[signal] = max(strength, self.observed.get(signal, 0.0))

    def as_turn(self) -> Turn:
        """For hooks."""
        return Turn(
            completion_id=self.completion_id,
            request=self.body,
            message=self.message,
            reward=self.reward,
            feedback=self.feedback().get(0),
        )

    def path(self) -> list[DeliveredTurn]:
        """The turns up to and with this one, oldest first."""
        turns: list[DeliveredTurn] = []
        turn: DeliveredTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(eq=False)
class Conversation:
    """``settings`` and ``hooks`` are of its route; ``feedback`` is about the whole of it; ``size`` is in bytes;
    ``ending`` ends it when it idles."""

    scope: Scope
    session_id: str
    settings: RouteSettings
    hooks: HookRunner
    turns: list[DeliveredTurn] = field(default_factory=list[DeliveredTurn])
    size: int = 0
    over: bool = False
    feedback: Feedback | None = None
    ending: asyncio.TimerHandle | None = None

    def session(self, turns: list[DeliveredTurn]) -> Session:
        """``turns`` for hooks."""
        return Session(session_id=self.session_id, turns=[turn.as_turn() for turn in turns], feedback=self.feedback)

    def after(self, parent: DeliveredTurn | None) -> list[DeliveredTurn]:
        """The turns that continue ``parent`` (``None``: that begin), oldest first."""
        return [turn for turn in self.turns if turn.parent is parent]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands: it continues ``parent``.

    Attributes:
        known: how that is known. ``answer``: its messages hold the answer; ``altered``: they hold another answer in its
            place; ``question``: the same request came before; ``name``: it names the session, and nothing else tells.
        strength: of ``altered``: how similar the two answers are.
    """

    conversation: Conversation
    parent: DeliveredTurn | None
    known: Literal["answer", "altered", "question", "name"]
    strength: float = 1.0


_Found = list[tuple[Conversation, DeliveredTurn]]


class Memory:
    """Bounded by count and bytes (of requests and answers as JSON, what turns share counted once)."""

    def __init__(self, max_sessions: int, max_bytes: int) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._all: OrderedDict[int, Conversation] = OrderedDict()
        self._named: dict[Scope, Conversation] = {}
        self._by_answer: dict[tuple[Scope, bytes], _Found] = {}
        self._by_question: dict[tuple[Scope, bytes], _Found] = {}
        self._by_id: dict[str, tuple[Conversation, DeliveredTurn]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._all.values()))

    def named(self, scope: Scope) -> Conversation | None:
        """The conversation with that name."""
        return self._named.get(scope)

    def turn(self, completion_id: str) -> tuple[Conversation, DeliveredTurn] | None:
        """The turn whose answer has that id (without its dialect's prefix)."""
        return self._by_id.get(completion_id)

    def place(self, scope: Scope, said: Digests, messages: list[dict[str, Any]]) -> Place | None:
        """Where a request with ``messages`` stands, ``None`` where a conversation begins."""
        answers = [message for message in messages if message.get("role") == "assistant"]
        for (before, whole), answer in zip(reversed(said.answers), reversed(answers), strict=True):
            if found := self._by_answer.get((scope, whole)):
                return _placed(found, "answer")
            for conversation, turn in reversed(self._by_question.get((scope, before), [])):
                if strength := similarity(text_of(turn.message), text_of(answer)):
                    return Place(conversation, turn, "altered", strength)
        # without the name of a session or user, the same question may come from two users
        if scope.kind != "anyone" and (found := self._by_question.get((scope, said.digest))):
            conversation, turn = found[-1]
            return Place(conversation, turn.parent, "question")
        if (conversation := self._named.get(scope)) is not None:
            return Place(conversation, conversation.turns[-1] if conversation.turns else None, "name")
        return None

    def add(self, conversation: Conversation, turn: DeliveredTurn) -> list[Conversation]:
        """Keep ``turn``; returns the conversations that have to leave for it."""
        scope = conversation.scope
        if scope.kind == "session":
            self._named[scope] = conversation
        self._all[id(conversation)] = conversation
        self._all.move_to_end(id(conversation))
        conversation.turns.append(turn)
        conversation.size += turn.size
        self.size += turn.size
        _note(self._by_answer, (scope, turn.answered), (conversation, turn))
        _note(self._by_question, (scope, turn.asked), (conversation, turn))
        self._by_id[turn.completion_id] = (conversation, turn)
        leaving: list[Conversation] = []
        size, count = self.size, len(self._all)
        # not over a copy, whose cost would grow with what is remembered
        for oldest in self._all.values():
            if (size <= self._max_bytes and count <= self._max_sessions) or oldest is conversation:
                break
            leaving.append(oldest)
            size -= oldest.size
            count -= 1
        return leaving

    def touch(self, conversation: Conversation) -> None:
        """The conversation was used."""
        if id(conversation) in self._all:
            self._all.move_to_end(id(conversation))

    def remove(self, conversation: Conversation) -> list[str]:
        """Forget the conversation; returns the ids of answers that can still get feedback, see :meth:`forget`."""
        if self._all.pop(id(conversation), None) is None:
            return []
        self.size -= conversation.size
        if self._named.get(conversation.scope) is conversation:
            del self._named[conversation.scope]
        for turn in conversation.turns:
            _drop(self._by_answer, (conversation.scope, turn.answered), turn)
            _drop(self._by_question, (conversation.scope, turn.asked), turn)
        late = [turn.completion_id for turn in conversation.turns if turn.open]
        self.forget([turn.completion_id for turn in conversation.turns if not turn.open])
        return late

    def forget(self, completion_ids: list[str]) -> None:
        """No more feedback for these."""
        for completion_id in completion_ids:
            self._by_id.pop(completion_id, None)


def _placed(found: _Found, known: Any) -> Place:
    """Of conversations with one digest, the newest that nobody has continued."""
    fresh = [entry for entry in found if not entry[0].after(entry[1])]
    conversation, turn = (fresh or found)[-1]
    return Place(conversation, turn, known)


def _note(
    index: dict[tuple[Scope, bytes], _Found], key: tuple[Scope, bytes], entry: tuple[Conversation, DeliveredTurn]
) -> None:
    found = index.setdefault(key, [])
    found.append(entry)
    if len(found) > _SAME:
        del found[0]


def _drop(index: dict[tuple[Scope, bytes], _Found], key: tuple[Scope, bytes], turn: DeliveredTurn) -> None:
    left = [entry for entry in index.get(key, []) if entry[1] is not turn]
    if left:
        index[key] = left
    else:
        index.pop(key, None)
