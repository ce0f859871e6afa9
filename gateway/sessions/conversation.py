"""Conversations: their delivered turns, which form a tree where the user went back, and a new request's place in one,
found by digests of what messages mean.

Invariant: two conversations have one digest exactly when they mean the same, whatever form a client gave an answer when
it sent it back (parts for a string, absent for null, other white space or field order in a call's arguments). A
conversation belongs to one caller and one route, and a caller finds only its own. Feedback after a group's
submission stays visible to hooks of later requests, and never trains. At most ``max_sessions`` conversations and
``max_bytes`` of their turns are kept; the least recently used leave first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple, cast

import orjson

from gateway.config.route import RouteSettings
from gateway.sessions.open_groups import Closing, Hold, OpenGroups
from reward_hooks import Feedback, HookRunner, Session, Turn

#: Instructions do not count: applications put the time of day into them.
_INSTRUCTIONS = frozenset({"system", "developer"})
_BYTES = 16
_START = b"\0" * _BYTES
_WORD = re.compile(r"\w+|[^\w\s]")
_WORDS = 200
#: Below it a text is a different one, not an edit.
_EDITED = 0.5
#: Conversations kept under one digest; only what comes next tells them apart.
_SAME = 8


class Scope(NamedTuple):
    """Who may continue a conversation: callers with one key on one route that name the same session or user."""

    route: str
    key_id: str
    kind: Literal["session", "user", "anyone"]
    name: str


@dataclass(eq=False)
class DeliveredTurn:
    """One request of a conversation (in Chat Completions form) and the message that was delivered for it.

    Attributes:
        completion_id: names the answer, without its dialect's prefix.
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
        turns: list[DeliveredTurn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
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
_Index = dict[tuple[Scope, bytes], _Found]


class Memory:
    """Bounded by count and bytes (of requests and answers as JSON, what turns share counted once).

    Attributes:
        named: conversations by the session that they are.
        by_id: turns by the id of their answer, without its dialect's prefix.
    """

    def __init__(self, max_sessions: int, max_bytes: int) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._all: OrderedDict[int, Conversation] = OrderedDict()
        self.named: dict[Scope, Conversation] = {}
        self._by_answer: _Index = {}
        self._by_question: _Index = {}
        self.by_id: dict[str, DeliveredTurn] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._all.values()))

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
        if (conversation := self.named.get(scope)) is not None:
            return Place(conversation, conversation.turns[-1] if conversation.turns else None, "name")
        return None

    def add(self, conversation: Conversation, turn: DeliveredTurn) -> list[Conversation]:
        """Keep ``turn``; returns the conversations that have to leave for it."""
        scope = conversation.scope
        if scope.kind == "session":
            self.named[scope] = conversation
        self._all[id(conversation)] = conversation
        self._all.move_to_end(id(conversation))
        conversation.turns.append(turn)
        conversation.size += turn.size
        self.size += turn.size
        _note(self._by_answer, (scope, turn.answered), (conversation, turn))
        _note(self._by_question, (scope, turn.asked), (conversation, turn))
        self.by_id[turn.completion_id] = turn
        leaving: list[Conversation] = []
        size = self.size
        # not over a copy, whose cost would grow with what is remembered
        for oldest in self._all.values():
            few = len(self._all) - len(leaving) <= self._max_sessions
            if (size <= self._max_bytes and few) or oldest is conversation:
                break
            leaving.append(oldest)
            size -= oldest.size
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
        if self.named.get(conversation.scope) is conversation:
            del self.named[conversation.scope]
        for turn in conversation.turns:
            _drop(self._by_answer, (conversation.scope, turn.answered), turn)
            _drop(self._by_question, (conversation.scope, turn.asked), turn)
        late = [turn.completion_id for turn in conversation.turns if turn.open]
        self.forget([turn.completion_id for turn in conversation.turns if not turn.open])
        return late

    def forget(self, completion_ids: list[str]) -> None:
        """No more feedback for these."""
        for completion_id in completion_ids:
            self.by_id.pop(completion_id, None)


def _placed(found: _Found, known: Any) -> Place:
    """Of conversations with one digest, the newest that nobody has continued."""
    fresh = [entry for entry in found if not entry[0].after(entry[1])]
    conversation, turn = (fresh or found)[-1]
    return Place(conversation, turn, known)


def _note(index: _Index, key: tuple[Scope, bytes], entry: tuple[Conversation, DeliveredTurn]) -> None:
    index[key] = [*index.get(key, []), entry][-_SAME:]


def _drop(index: _Index, key: tuple[Scope, bytes], turn: DeliveredTurn) -> None:
    index[key] = [entry for entry in index.get(key, []) if entry[1] is not turn]
    if not index[key]:
        del index[key]


@dataclass(frozen=True, slots=True)
class Digests:
    """A conversation as digests.

    Attributes:
        digest: of all of it.
        answers: per assistant message, oldest first, the digests of the conversation before and with it.
        sizes: bytes per message, as JSON of its meaning; 0 for instructions.
    """

    digest: bytes
    answers: tuple[tuple[bytes, bytes], ...]
    sizes: tuple[int, ...]


def digests_of(messages: Sequence[Mapping[str, Any]]) -> Digests:
    """The digests of ``messages``, in Chat Completions form."""
    digest = _START
    answers: list[tuple[bytes, bytes]] = []
    sizes: list[int] = []
    for message in messages:
        if message.get("role") in _INSTRUCTIONS:
            sizes.append(0)
            continue
        meaning = _bytes(_meaning(message))
        before, digest = digest, _chained(digest, meaning)
        sizes.append(len(meaning))
        if message.get("role") == "assistant":
            answers.append((before, digest))
    return Digests(digest, tuple(answers), tuple(sizes))


def answered(digest: bytes, message: Mapping[str, Any]) -> tuple[bytes, int]:
    """The digest of a conversation with the assistant's ``message`` appended, and the bytes of that message."""
    meaning = _bytes(_meaning({**message, "role": "assistant"}))
    return _chained(digest, meaning), len(meaning)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def similarity(one: str, other: str, least: float = _EDITED) -> float:
    """How similar the words of two texts are: the ratio 2 M / T of :mod:`difflib` (Ratcliff and Metzener 1988) over at
    most 200 words of each, or 0 where it is below ``least``."""
    words, others = words_of(one), words_of(other)
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    # an upper bound first: most texts have nothing in common, and the ratio costs the product of their lengths
    ratio = matcher.ratio() if words and others and matcher.quick_ratio() >= least else 0.0
    return ratio if ratio >= least else 0.0


def words_of(text: str) -> list[str]:
    """The first words of a text, in lower case."""
    return _WORD.findall(text[: _WORDS * 40].lower())[:_WORDS]


def size_of(value: object) -> int:
    """Bytes of ``value`` as JSON."""
    return len(_bytes(value))


def _chained(digest: bytes, meaning: bytes) -> bytes:
    return hashlib.blake2b(digest + meaning, digest_size=_BYTES).digest()


def _meaning(message: Mapping[str, Any]) -> list[Any]:
    """A message's role, text, calls, and parts that are not text."""
    calls: Any = message.get("tool_calls")
    meaning: list[Any] = [message.get("role"), text_of(message).strip()]
    if isinstance(calls, list) and calls:
        meaning.append([_call(call) for call in cast("list[Any]", calls)])
    content: Any = message.get("content")
    if isinstance(content, list):
        meaning += [part for part in cast("list[Any]", content) if not _is_text(part)]
    return meaning


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)


def _call(call: object) -> list[Any]:
    """Name and arguments; clients may change ids."""
    match call:
        case {"function": {**named}}:
            arguments = cast("Any", named.get("arguments"))
        case _:
            return [call]
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except ValueError:
            arguments = arguments.strip()
    return [named.get("name"), arguments]


def _bytes(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer of more than 64 bits, or deeper nesting than orjson follows
        return json.dumps(value, sort_keys=True).encode()
