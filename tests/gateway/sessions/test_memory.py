"""The memory of conversations is bounded; the least recently used leave first."""

from __future__ import annotations

from typing import Any, cast

from gateway.sessions.conversation import Conversation, DeliveredTurn, Memory, Scope

NOTHING = cast(Any, None)


def remembered(name: str) -> tuple[Conversation, DeliveredTurn]:
    """A conversation of one turn."""
    conversation = Conversation(Scope("route", "key", "session", name), name, NOTHING, NOTHING)
    turn = DeliveredTurn(name, "key", {}, {}, None, f"asked {name}".encode(), f"answered {name}".encode(), None, size=1)
    return conversation, turn


def test_the_least_recently_used_leave_first() -> None:
    memory = Memory(max_sessions=2, max_bytes=10**9)
    conversations = [remembered(str(number)) for number in range(3)]
    leaving = [memory.add(conversation, turn) for conversation, turn in conversations]
    assert leaving == [[], [], [conversations[0][0]]]
