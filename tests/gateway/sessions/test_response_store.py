"""Kept responses: whose they are, how long, and that there is an end to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.response_store import ResponseStore, StoredResponse
from swarm.errors import NotFoundError


def stored(name: str, size: int = 1) -> StoredResponse:
    return StoredResponse({"id": name}, [name], size)


def test_only_the_key_that_made_a_response_sees_it() -> None:
    store = ResponseStore(10, 60.0)
    store.put("a", stored("r"))
    assert store.get("a", "r").items == ["r"]
    for use in (store.get, store.delete):
        with pytest.raises(NotFoundError, match="r"):
            use("b", "r")
    store.delete("a", "r")
    with pytest.raises(NotFoundError):
        store.get("a", "r")


def test_a_response_is_gone_after_its_time() -> None:
    now = [0.0]
    store = ResponseStore(10, 60.0, lambda: now[0])
    store.put("a", stored("old"))
    now[0] = 30.0
    store.put("a", stored("new"))
    now[0] = 60.0
    assert store.get("a", "new")
    with pytest.raises(NotFoundError):
        store.get("a", "old")
    assert (len(store), store.size) == (1, 1)


def test_the_oldest_leave_for_want_of_room() -> None:
    store = ResponseStore(10, 60.0)
    for number in range(4):
        store.put("a", stored(f"r{number}", 3))
    assert [name for name in ("r0", "r1", "r2", "r3") if _has(store, "a", name)] == ["r1", "r2", "r3"]
    store.put("a", stored("huge", 11))
    assert not _has(store, "a", "huge") and _has(store, "a", "r1")


def test_a_response_that_is_stored_again_takes_its_room_once() -> None:
    store = ResponseStore(10, 60.0)
    for _ in range(3):
        store.put("a", stored("r", 6))
    assert (len(store), store.size) == (1, 6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 30), st.integers(0, 40))))
def test_there_is_never_more_than_there_is_room_for(steps: list[tuple[str, int, int, int]]) -> None:
    now = [0.0]
    store = ResponseStore(50, 60.0, lambda: now[0])
    for number, (key, passed, size, deleted) in enumerate(steps):
        now[0] += passed
        store.put(key, stored(f"r{number}", size))
        assert store.size <= 50 and _has(store, key, f"r{number}")
        if _has(store, key, f"r{deleted}"):
            store.delete(key, f"r{deleted}")
            assert not _has(store, key, f"r{deleted}")
    now[0] += 60.0
    assert not _has(store, "a", "r0") and (len(store), store.size) == (0, 0)


def _has(store: ResponseStore, key: str, name: str) -> bool:
    try:
        store.get(key, name)
    except NotFoundError:
        return False
    return True
