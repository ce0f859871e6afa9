"""The memory of conversations: keeping a turn costs the same however many there are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

from gateway.sessions.conversation import Conversation, Scope
from gateway.sessions.memory import Memory
from gateway.sessions.turns import DeliveredTurn


def remembered(name: str) -> tuple[Conversation, DeliveredTurn]:
    """A conversation of one turn, which is nobody's route."""
    conversation = Conversation(Scope("route", "key", "session", name), name, cast(Any, None))
    turn = DeliveredTurn(name, "key", {}, {}, None, f"asked {name}".encode(), f"answered {name}".encode(), None, size=1)
    return conversation, turn


class Counting(OrderedDict[int, Conversation]):
    """Counts the conversations that are looked at one after the other."""

    looked = 0

    def values(self) -> Any:
        def counted() -> Iterator[Conversation]:
            for one in super(Counting, self).values():
                self.looked += 1
                yield one

        return counted()


def test_a_turn_is_kept_without_a_look_at_all_others() -> None:
    memory = Memory(max_sessions=1000, max_bytes=10**9)
    everyone = Counting()
    cast(Any, memory)._all = everyone
    for number in range(100):
        assert memory.add(*remembered(str(number))) == []
    assert (len(memory), everyone.looked) == (100, 100)


def test_the_longest_silent_leave() -> None:
    memory = Memory(max_sessions=2, max_bytes=10**9)
    conversations = [remembered(str(number)) for number in range(3)]
    leaving = [memory.add(conversation, turn) for conversation, turn in conversations]
    assert leaving == [[], [], [conversations[0][0]]]
