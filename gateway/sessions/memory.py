"""The open conversations, found by name, by digest and by completion id.

Invariant: at most ``max_sessions`` conversations and ``max_bytes`` of their turns are kept; the least recently used
leave first. A caller finds only its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from gateway.sessions.conversation import Conversation, DeliveredTurn, Place, Scope
from gateway.sessions.digest import Digests, text_of
from gateway.sessions.signals import alike

#: Conversations kept under one digest; only what comes next tells them apart.
_SAME = 8
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
                if strength := alike(text_of(turn.message), text_of(answer)):
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
