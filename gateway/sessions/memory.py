"""The conversations that are remembered. Digests of what messages mean tell a new request's position in one.

Invariant: two conversations have one digest exactly when their messages, but for instructions and reasoning, mean the
same (:func:`adapters.dialects.chat.meaning_of`). A conversation belongs to one caller and one route, and a caller finds
only its own. At most ``max_sessions`` conversations and ``max_bytes`` of their turns are kept; the least recently used
leave first, and one that is too large by itself leaves, too.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson

from adapters.dialects.chat import canonical, meaning_of
from adapters.dialects.dialect import is_text, text_of
from gateway.sessions.conversation import INSTRUCTIONS, Conversation, DeliveredTurn, Scope
from reward_hooks.contract import texts_of

#: Conversations kept under one digest; only what comes next tells them apart.
_SAME = 8
#: Begins the names of sub-agents that have none of their own.
_CHILD = "of-"
#: Sub-agents of one session that may have sub-agents of their own.
_CHILDREN = 1000
#: Characters; a shorter text may be said twice by chance. And how many are kept of one answer.
_SHORTEST_PROMPT, _TEXTS = 16, 16
#: Characters; a shorter answer may stand in a text by chance.
_SHORTEST_SUMMARY = 40
_BYTES = 16
_START = b"\0" * _BYTES
_INNER = b"\1" * _BYTES
#: The least bytes of a first message that counts as an agent's context (its folder, the date), which changes between
#: runs of one conversation.
_LEAST_CONTEXT = 200
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Digests:
    """A conversation as digests.

    Attributes:
        digest, inner: of all of it, and of what follows a first message that is long, such as what an agent says of the
            project as it is now; where the first is short, ``inner`` is empty.
        answers: per assistant message, oldest first, the digests of the conversation with it, and with it as ``inner``.
        sizes: bytes per message, as JSON of its meaning; 0 for instructions.
    """

    digest: bytes
    inner: bytes
    answers: tuple[tuple[bytes, bytes], ...]
    sizes: tuple[int, ...]


def digests_of(messages: Sequence[Mapping[str, Any]]) -> Digests:
    """The digests of ``messages``, in Chat Completions form.

    They tell which turn a request continues. An agent that has changed its instructions since continues the same turn,
    so instructions do not count here. :class:`swarm.server.dataplane.calls.Conversations` tells with which tokens a
    prompt may begin; instructions and tools are among these tokens, and count there.
    """
    digest = inner = b""
    answers: list[tuple[bytes, bytes]] = []
    sizes: list[int] = []
    for message in messages:
        if message.get("role") in INSTRUCTIONS:
            sizes.append(0)
            continue
        meaning, size = _meant(message)
        if not digest:
            digest, inner = _START, b"" if len(meaning) < _LEAST_CONTEXT else _INNER
        elif inner:
            inner = _chained(inner, meaning)
        digest = _chained(digest, meaning)
        sizes.append(size)
        if message.get("role") == "assistant":
            answers.append((digest, inner if inner != _INNER else b""))
    return Digests(digest or _START, inner, tuple(answers), tuple(sizes))


def answered(prompt: Digests, message: Mapping[str, Any]) -> tuple[bytes, bytes, int]:
    """The digests of a conversation with the assistant's ``message`` appended (all, and ``inner``), and the bytes of
    that message."""
    meaning, size = _meant({**message, "role": "assistant"})
    # an answer to the first message alone is the same in many conversations
    inner = _chained(prompt.inner, meaning) if prompt.inner not in (b"", _INNER) else b""
    return _chained(prompt.digest, meaning), inner, size


def spoken(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without reasoning at the head of an assistant's text: some applications put it there, and others leave
    it out."""
    if message.get("role") != "assistant" or not (thought := _THOUGHT.match(text := text_of(message))):
        return message
    content: Any = message["content"]
    others = [part for part in content if not is_text(part)] if isinstance(content, list) else []
    return {**message, "content": [{"type": "text", "text": text[thought.end() :]}, *others]}


def _meant(message: Mapping[str, Any]) -> tuple[bytes, int]:
    """What a message means without its reasoning, and the bytes of all of it."""
    meaning, speech = meaning_of(message), spoken(message)
    return meaning if speech is message else meaning_of(speech), len(meaning)


def digest_of(text: str) -> bytes:
    """The digest of a text."""
    return _chained(_START, text.encode("utf-8", "replace"))


def size_of(value: object) -> int:
    """Bytes of ``value`` as JSON."""
    return len(canonical(value))


def _chained(digest: bytes, meaning: bytes) -> bytes:
    return hashlib.blake2b(digest + meaning, digest_size=_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Position:
    """Where a request stands: it continues ``parent``.

    Attributes:
        linked_by: ``answer``: its messages hold the answer; ``question``: the same request came before;
            ``name``: it names the session, and nothing else tells; ``compacted``: a user's message holds the answer;
            ``branch``: an agent asks in the session for something of its own.
        agent: the sub-agent that asks; empty: the main one.
    """

    conversation: Conversation
    parent: DeliveredTurn | None
    linked_by: Literal["answer", "question", "name", "compacted", "branch"]
    agent: str = ""


_Entries = list[tuple[Conversation, DeliveredTurn]]
#: Of a turn: the digest of its conversation with the answer; of the conversation before it; and of a text that may come
#: back in a user's place: its answer, or what its calls pass on.
_Key = tuple[Literal["answer", "question", "text"], Scope, bytes]


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
        #: of sub-agents with a session's name of their own: the session's
        self._roots: dict[Scope, Scope] = {}
        self._entries: dict[_Key, _Entries] = {}
        self.by_id: dict[str, DeliveredTurn] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._all.values()))

    def locate(self, scope: Scope, agent: str, digests: Digests, messages: list[dict[str, Any]]) -> Position | None:
        """Where a request of ``agent`` with ``messages`` stands, ``None`` where a conversation begins."""
        spots = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        for index, (whole, inner) in zip(reversed(spots), reversed(digests.answers), strict=True):
            entries = self._entries.get(("answer", scope, whole)) or self._entries.get(("answer", scope, inner))
            if entries := entries or self._left_in(scope, agent, digests.digest, messages, index):
                return _position_in(entries, agent)
        # without the name of a session or user, the same question may come from two users
        if scope.kind != "anyone":
            for conversation, turn in reversed(self._entries.get(("question", scope, digests.digest), [])):
                if turn.agent == agent:
                    return Position(conversation, turn.parent, "question", agent)
        if (conversation := self.named.get(scope)) is None:
            return self._asked_through_tool(scope, messages)
        if scope.kind == "session":
            return Position(conversation, conversation.turns[-1] if conversation.turns else None, "name", agent)
        return Position(conversation, None, "branch", agent)

    def _left_in(self, scope: Scope, agent: str, digest: bytes, messages: list[dict[str, Any]], index: int) -> _Entries:
        """The turns whose question and answer stand in ``messages``, the answer at ``index``, behind the answer before
        them, whatever else does: applications cut the beginning of a long history off, and leave out calls with their
        results, and what they had added to a question. What another request goes on from may be an example that all
        requests have, and what two conversations have may be that of either."""
        answer = spoken(messages[index])
        if (entries := self._entries.get(("text", scope, digest_of(text_of(answer).strip())))) is None:
            return []
        question = _question_in(messages[:index])
        entries = [
            (conversation, turn)
            for conversation, turn in entries
            if meaning_of(_answer_of(turn)) == meaning_of(answer)
            and _was_asked(question, _question_in(turn.body.get("messages", ())))
            and all(later.asked == digest for later in conversation.after(turn, agent or turn.agent))
        ]
        return entries if len({id(conversation) for conversation, _ in entries}) == 1 else []

    def _asked_through_tool(self, scope: Scope, messages: list[dict[str, Any]]) -> Position | None:
        """The conversation that started this sub-agent: a text of ``messages`` equals an argument of its tool calls, or
        its summary."""
        for message in reversed(messages):
            for text in texts_of(message) if message.get("role") == "user" else ():
                for conversation, turn in reversed(self._entries.get(("text", scope, digest_of(text.strip())), [])):
                    if text.strip() == text_of(_answer_of(turn)).strip():
                        return Position(conversation, turn, "compacted", turn.agent)
                    # a call that has its result asks nobody any more
                    if not conversation.after(turn, turn.agent):
                        return Position(conversation, None, "branch", f"{_CHILD}{turn.completion_id}")
        return None

    def adopt(self, scope: Scope, child: str) -> Scope:
        """The scope of the session that ``child``, a sub-agent with a session's name of its own, belongs to; ``scope``
        is of the session that began it, which may be a sub-agent's itself."""
        root = self._roots.get(scope, scope)
        conversation = self.named.get(root)
        if conversation is not None and len(conversation.children) < _CHILDREN:
            own = scope._replace(name=child)
            conversation.children.add(own)
            self._roots[own] = root
        return root

    def add(self, conversation: Conversation, turn: DeliveredTurn) -> list[Conversation]:
        """Keep ``turn``; returns the conversations that have to leave for it."""
        scope = conversation.scope
        if scope.session:
            self.named[scope] = conversation
        self._all[id(conversation)] = conversation
        self._all.move_to_end(id(conversation))
        conversation.turns.append(turn)
        conversation.size += turn.size
        self.size += turn.size
        for key in _keys_of(scope, turn):
            self._entries[key] = [*self._entries.get(key, []), (conversation, turn)][-_SAME:]
        self.by_id[turn.completion_id] = turn
        leaving: list[Conversation] = []
        size = self.size
        # not over a copy, whose cost would grow with what is remembered
        for oldest in self._all.values():
            few = len(self._all) - len(leaving) <= self._max_sessions
            if size <= self._max_bytes and few:
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
        for child in conversation.children:
            self._roots.pop(child, None)
        for turn in conversation.turns:
            for key in _keys_of(conversation.scope, turn):
                if entries := [entry for entry in self._entries.pop(key, []) if entry[1] is not turn]:
                    self._entries[key] = entries
        late = [turn.completion_id for turn in conversation.turns if turn.open]
        self.forget([turn.completion_id for turn in conversation.turns if not turn.open])
        return late

    def forget(self, completion_ids: list[str]) -> None:
        """No more feedback for these."""
        for completion_id in completion_ids:
            self.by_id.pop(completion_id, None)


def _keys_of(scope: Scope, turn: DeliveredTurn) -> list[_Key]:
    """The keys under which ``turn`` stands."""
    inner: list[_Key] = [("answer", scope, turn.inner)] if turn.inner else []
    texts: list[_Key] = [("text", scope, text) for text in _texts_in(turn)]
    return [("answer", scope, turn.answered), ("question", scope, turn.asked), *inner, *texts]


def _position_in(entries: _Entries, agent: str) -> Position:
    """Of conversations with one digest, the newest turn of the same agent, or of any, that nobody has continued."""
    own = [entry for entry in entries if entry[1].agent == agent] or entries
    fresh = [entry for entry in own if not entry[0].after(entry[1], agent or entry[1].agent)]
    conversation, turn = (fresh or own)[-1]
    return Position(conversation, turn, "answer", agent or turn.agent)


class _Question(NamedTuple):
    """What a user asked last, and the text of the assistant before it, by which users who are thanked alike differ."""

    text: str
    before: str


def _question_in(messages: Sequence[Mapping[str, Any]]) -> _Question:
    text = before = ""
    for message in reversed(messages):
        if message.get("role") == "user":
            text = text or text_of(message).strip()
        elif text and message.get("role") == "assistant" and (before := text_of(spoken(message)).strip()):
            break
    return _Question(text, before)


def _was_asked(question: _Question, asked: _Question) -> bool:
    """Whether ``asked`` is ``question``, maybe with documents before it, or a reminder behind it; ``question`` may lack
    what came before."""
    is_asked = question.text == asked.text != "" or (
        len(question.text) >= _SHORTEST_PROMPT and question.text in asked.text
    )
    return is_asked and question.before in ("", asked.before)


def _answer_of(turn: DeliveredTurn) -> Mapping[str, Any]:
    return spoken({**turn.message, "role": "assistant"})


def _texts_in(turn: DeliveredTurn) -> list[bytes]:
    """Digests of the answer's text and of the texts in the arguments of its calls. Short texts are left out, and so is
    the turn's own question: another user may ask the same."""
    message = turn.message
    summary = text_of(_answer_of(turn)).strip()
    digests = [digest_of(summary)] if len(summary) >= _SHORTEST_SUMMARY else []
    for call in message.get("tool_calls") or ():
        try:
            arguments: Any = orjson.loads(call["function"]["arguments"])
        except (ValueError, KeyError, TypeError):
            continue
        values = list(arguments.values()) if isinstance(arguments, dict) else []
        texts = {text for value in values if isinstance(value, str) and len(text := value.strip()) >= _SHORTEST_PROMPT}
        for asked in turn.body.get("messages", ()) if texts else ():
            texts.difference_update(text.strip() for text in texts_of(asked))
        digests += [digest_of(text) for text in sorted(texts)]
    return digests[:_TEXTS]


def sharing(body: dict[str, Any], sizes: tuple[int, ...], parent: DeliveredTurn | None) -> tuple[dict[str, Any], int]:
    """``body`` with the objects that it has in common with the turn before it, and the bytes of the rest: a
    conversation of n turns is then kept, and copied for hooks, in the size of its last request and not n times it."""
    earlier: dict[str, Any] = parent.body if parent is not None else {}
    shared = dict(body)
    size = 0
    for name, value in body.items():
        if name == "messages":
            continue
        if name in earlier and earlier[name] == value:
            shared[name] = earlier[name]
        else:
            size += size_of(value)
    before: list[Any] = [*earlier.get("messages", []), parent.message] if parent is not None else []
    # a raw prompt has none
    messages: list[Any] = list(body.get("messages") or ())
    for index, message in enumerate(messages):
        if index < len(before) and before[index] == message:
            messages[index] = before[index]
        else:
            size += sizes[index] or size_of(message)
    if messages:
        shared["messages"] = messages
    return shared, size
