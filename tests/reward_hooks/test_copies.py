"""What hooks get is what ``copy.deepcopy`` would have given them, of whatever it is made."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr

from reward_hooks import Candidate, Session, Task, UserRequest
from reward_hooks.contract import Turn
from reward_hooks.copies import copied

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


class Open(BaseModel):
    """Has more to it than its fields."""

    model_config = ConfigDict(extra="allow")
    known: list[int] = []
    _own: list[int] = PrivateAttr(default_factory=lambda: [1])


class Odd(BaseModel):
    """Is copied as it likes."""

    value: int = 0

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Odd:
        return Odd(value=self.value + 1)


def containers(value: Any) -> list[Any]:
    """All lists and dictionaries in ``value``."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, dict | list) else []) + [one for part in inner for one in containers(part)]


@given(JSON)
def test_json_is_equal_and_shares_nothing_that_can_be_changed(value: Any) -> None:
    made = copied(value)
    assert made == value
    assert not {id(one) for one in containers(made)} & {id(one) for one in containers(value)}


@given(JSON, JSON)
def test_models_are_equal_and_share_nothing_that_can_be_changed(body: Any, message: Any) -> None:
    turn = Turn(completion_id="1", request={"a": body}, message={"b": message})
    one = Candidate(index=0, message={"c": message}, request={"d": body}, session=Session(session_id="s", turns=[turn]))
    made = copied(one)
    assert made == one and type(made) is Candidate
    assert made.model_fields_set == one.model_fields_set
    assert made.model_dump_json() == one.model_dump_json()
    assert made.session is not None and one.session is not None
    for mine, original in ((made.message, one.message), (made.session.turns, one.session.turns)):
        assert mine is not original
    made.message["c"] = "changed"
    assert one.message["c"] == message
    assert made != one


def test_what_is_shared_stays_shared() -> None:
    session, request = Session(session_id="s", turns=[]), {"messages": [{"role": "user", "content": "why?"}]}
    group = [Candidate(index=index, message={}, request=request, session=session) for index in range(3)]
    made = copied(group)
    assert len({id(one.session) for one in made}) == 1 and made[0].session is not session
    # pydantic has copied the outer dictionary of each, so only what is inside is one
    assert len({id(one.request["messages"]) for one in made}) == 1
    assert made[0].request["messages"] is not request["messages"]


def test_what_holds_itself_can_be_copied() -> None:
    ring: list[Any] = []
    ring.append({"ring": ring})
    made = copied(ring)
    assert made is not ring and made[0]["ring"] is made


@pytest.mark.parametrize(
    "value",
    [
        (1, [2]),
        {3, 4},
        OrderedDict(a=[1]),
        bytearray(b"x"),
        {"nested": ({"deep": [1]},), 5: "five", (6, 7): [8]},
        Open(known=[1], more=[2]),  # type: ignore[call-arg]
        Task(task_id="t", metadata={"set": {1}, "list": [1]}),
        UserRequest(request_id="r", body={"m": [1.5, None, True, b"x"]}, headers={"a": "b"}),
    ],
)
def test_whatever_else_there_is_is_copied_as_by_deepcopy(value: Any) -> None:
    made = copied(value)
    assert (made, type(made)) == (copy.deepcopy(value), type(value))
    assert made is not value


def test_models_of_another_make_are_copied_as_they_say() -> None:
    made = copied({"odd": [Odd(value=1)], "open": Open(more=[2])})  # type: ignore[call-arg]
    assert cast(Any, made)["odd"][0].value == 2
    original = cast(Any, Open())
    assert copied(original)._own == [1] and copied(original)._own is not original._own


def test_what_cannot_be_copied_is_said() -> None:
    with pytest.raises(TypeError):
        copied({"lock": [threading.Lock()]})
