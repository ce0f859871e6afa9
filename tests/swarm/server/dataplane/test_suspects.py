"""Who is suspected of a death, sampled alone, and refused: whatever the order of things."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import FatalRequestError
from swarm.server.dataplane.suspects import ALONE_SECONDS, Arrival, Door, Identity, Suspects

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "secret words"}], "temperature": 0.5, "max_tokens": 9}


def request(name: object) -> Identity:
    return Identity("model", {"prompt": str(name)})


def refused(suspects: Suspects, identity: Identity) -> bool:
    try:
        suspects.check(identity)
    except FatalRequestError:
        return True
    return False


# ---------------------------------------------------------------------- any order of things


@dataclass
class World:
    """One replica that dies of ``poisons`` alone; requests are numbers."""

    poisons: frozenset[int]
    suspects: Suspects = field(default_factory=Suspects)
    now: float = 0.0
    deaths: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.door = Door(self.suspects)
        self.at: dict[int, Arrival] = {}

    def send(self, number: int) -> None:
        identity = request(number)
        if number not in self.at and not refused(self.suspects, identity):
            self.at[number] = self.door.arrive(identity)
            self.admit()

    def admit(self) -> None:
        for arrival in list(self.at.values()):
            if not arrival.inside:
                self.door.admits(arrival, self.now)

    def inside(self) -> list[int]:
        return [number for number, arrival in self.at.items() if arrival.inside]

    def end(self, number: int, *, answered: bool) -> None:
        arrival = self.at.pop(number)
        if answered and arrival.inside:
            assert number not in self.poisons
            self.suspects.cleared(arrival.identity)
        self.door.leave(arrival)
        self.admit()

    def die(self) -> None:
        """All calls end with the replica; whoever waited waits at the next one."""
        inside = self.inside()
        for number in inside:
            self.deaths[number] = self.deaths.get(number, 0) + 1
        self.suspects.died([self.at[number].identity for number in inside])
        for number in inside:
            self.door.leave(self.at.pop(number))
        self.admit()


@given(
    st.frozensets(st.integers(0, 9), max_size=4),
    st.lists(
        st.tuples(st.sampled_from(["send", "send", "answer", "leave", "die", "wait"]), st.integers(0, 9)), max_size=150
    ),
)
def test_only_what_kills_is_refused(poisons: frozenset[int], moves: list[tuple[str, int]]) -> None:
    world = World(poisons)
    for move, number in moves:
        if move == "send":
            world.send(number)
        elif move == "wait":
            world.now += number * ALONE_SECONDS / 3
            world.admit()
        elif move == "die":
            # a replica dies of a poison alone
            if poisons.intersection(world.inside()):
                world.die()
        elif number in world.at and (move == "leave" or (world.at[number].inside and number not in poisons)):
            world.end(number, answered=move == "answer")
        for other in set(range(10)) - poisons:
            assert not refused(world.suspects, request(other)), "it is in flight at deaths by chance"


@given(
    st.frozensets(st.integers(0, 9), max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_what_kills_does_so_twice_and_all_others_are_answered(
    poisons: frozenset[int], asked: list[int], chance: Any
) -> None:
    """Everybody sends a request again until there is an answer or a refusal, as SDKs and the gateway do."""
    world = World(poisons)
    waiting, rounds = set(asked), 0
    while waiting:
        rounds += 1
        assert rounds < 1000, "it does not end"
        for number in chance.sample(sorted(waiting), len(waiting)):
            world.send(number)
        if poisons.intersection(world.inside()):
            world.die()
        elif inside := world.inside():
            number = chance.choice(inside)
            world.end(number, answered=True)
            waiting.discard(number)
        waiting = {number for number in waiting if not refused(world.suspects, request(number))}
    assert all(world.deaths[number] == 2 for number in poisons.intersection(asked))


# ---------------------------------------------------------------------- one at a time


def test_a_suspect_waits_until_its_replica_is_empty_and_the_others_wait_for_it() -> None:
    suspects = Suspects()
    door = Door(suspects)
    suspects.died([request("a"), request("b")])
    fresh, b, a, late = (door.arrive(request(name)) for name in ("fresh", "b", "a", "late"))
    assert not door.admits(fresh, 0.0), "a suspect has its turn first"
    assert door.admits(b, 0.0) and not door.admits(a, 0.0) and not door.admits(late, 0.0)
    suspects.cleared(b.identity)
    door.leave(b)
    assert not door.admits(late, 1.0) and door.admits(a, 1.0)
    suspects.cleared(a.identity)
    door.leave(a)
    assert door.admits(fresh, 2.0) and door.admits(late, 2.0)
    assert not suspects


def test_the_others_wait_for_a_slow_suspect_for_a_while_and_longer_after_each_death() -> None:
    suspects = Suspects()
    suspects.died([request("slow"), request("other")])
    for deaths in (1, 2):
        door = Door(suspects)
        slow, fresh = door.arrive(request("slow")), door.arrive(request(f"fresh {deaths}"))
        assert door.admits(slow, 0.0) and not door.admits(fresh, 0.0)
        opens = door.opens(0.0)
        assert opens == ALONE_SECONDS * deaths
        assert door.admits(fresh, opens)
        suspects.died(door.inside())
        assert not refused(suspects, request("slow")), "it was not alone"


def test_who_leaves_while_it_waits_holds_nobody() -> None:
    suspects = Suspects()
    door = Door(suspects)
    suspects.died([request("a"), request("b")])
    a, fresh = door.arrive(request("a")), door.arrive(request("fresh"))
    assert not door.admits(fresh, 0.0)
    door.leave(a)
    assert door.admits(fresh, 0.0)


# ---------------------------------------------------------------------- what a request is, and its record


def test_tries_of_a_request_are_one_request() -> None:
    one = Identity("m", BODY).digest
    for more in ({"stream": True}, {"n": 8}, {"model": "other"}, {"stream_options": {}}, {"logprobs": True}):
        assert Identity("m", BODY | more).digest == one
    for more in ({"temperature": 0.6}, {"tools": []}, {"messages": []}):
        assert Identity("m", BODY | more).digest != one
    assert Identity("another", BODY).digest != one


def test_the_record_has_no_text(tmp_path: Path) -> None:
    told: list[int] = []
    folder = tmp_path / "refused"
    suspects = Suspects(folder, refused=told.append)
    asked = Identity("m", BODY)
    suspects.died([asked])
    assert not refused(suspects, asked) and not told
    suspects.died([Identity("m", BODY | {"stream": True}), asked])
    assert refused(suspects, asked) and told == [2]
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = json.loads(path.read_text())
    assert (record["digest"], record["deaths"], path.stem) == (asked.digest, 2, asked.digest)
    assert record["fields"]["temperature"] == 0.5 and record["fields"]["messages"]["items"] == 1
    assert "secret" not in path.read_text()
    # the next server refuses it too, until somebody removes the file
    following = Suspects(folder)
    assert refused(following, asked)
    path.unlink()
    assert not refused(following, asked) and not refused(suspects, asked)


def test_a_disk_that_fails_does_not_allow_the_request(tmp_path: Path) -> None:
    (tmp_path / "refused").write_text("a file where a folder should be")
    suspects = Suspects(tmp_path / "refused")
    for _ in range(2):
        suspects.died([request("a")])
    assert refused(suspects, request("a"))
