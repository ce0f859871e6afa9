"""Who answers: a conversation keeps its side, at every gateway, until a rollback."""

from __future__ import annotations

import random
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import ChatDialect
from gateway.config.takeover import ServeConfig
from gateway.takeover.sides import Draw, Sides, position_of
from gateway.types import Caller, Incoming
from swarm.evidence.stages import ServingStage, StageRules

SALT = "salt"


class Route:
    """The stage of a route on a clock of its own, and its gateways."""

    def __init__(self, gateways: int = 1, sticky: str = "session") -> None:
        self.now = 1e9
        self.stage: ServingStage | None = ServingStage.begun("chat", "gpt", StageRules(), self.now, SALT)
        upstream = {"base_url": "http://api.example/v1"}
        fields: dict[str, Any] = {"incumbent": {"upstream": upstream}, "canary": {"sticky": sticky}}
        serve = ServeConfig.model_validate(fields)
        self.gateways = [Sides("chat", serve, lambda: self.stage, lambda: self.now) for _ in range(gateways)]

    def move(self, share: float) -> None:
        assert self.stage is not None
        self.stage = self.stage.moved(share, self.now, "ann", "because")

    def draw(self, session: str = "", turn: int = 0, gateway: int = 0, text: str = "hi", **more: Any) -> str:
        return self.drawn(session, turn, gateway, text, **more).side

    def drawn(self, session: str = "", turn: int = 0, gateway: int = 0, text: str = "hi", **more: Any) -> Draw:
        messages: list[dict[str, Any]] = [{"role": "system", "content": str(random.random())}]
        for number in range(turn + 1):
            messages.append({"role": "user", "content": f"{text} {number}"})
            messages.append({"role": "assistant", "content": "yes"})
        caller = Caller(**{name: more.pop(name) for name in ("key_id", "side") if name in more})
        headers = {"x-swarm-session": session} if session else {}
        incoming = Incoming(
            call=ChatDialect().parse({"model": "m", "messages": messages[:-1]}),
            headers=headers | more.pop("headers", {}),
            caller=caller,
            path="/v1/chat/completions",
            raw=b"",
            request_id=more.pop("request_id", "r"),
        )
        return self.gateways[gateway].draw(incoming)


def begun(sides: Sides, stage: ServingStage | None) -> tuple[int, int]:
    with sides.taken(Draw("incumbent", stage)) as drawn:
        return drawn.begun


def between(low: float, high: float) -> str:
    """A session whose position is there."""
    for number in range(10_000):
        unit = blake2b(f"\0session\0s{number}".encode(), digest_size=16).hexdigest()
        if low <= position_of(unit, SALT) < high:
            return f"s{number}"
    raise AssertionError


def test_nobody_is_the_challengers_before_the_stage_is_known_or_in_the_shadow() -> None:
    route = Route()
    assert route.draw("a", headers={"x-swarm-side": "challenger"}) == "incumbent"
    route.stage = None
    assert route.draw("a", headers={"x-swarm-side": "challenger"}) == "incumbent"


@given(
    moves=st.lists(st.sampled_from([0.05, 0.25, 0.5, 1.0]), min_size=1, max_size=4, unique=True).map(sorted),
    asked=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60),
)
def test_a_conversation_never_changes_sides_while_the_share_rises(
    moves: list[float], asked: list[tuple[int, bool]]
) -> None:
    route = Route()
    sides: dict[int, str] = {}
    turns: dict[int, int] = {}
    for number, (session, moves_on) in enumerate(asked):
        if moves_on and moves:
            route.now += 7200
            route.move(moves.pop(0))
        turn = turns[session] = turns.get(session, -1) + 1
        side = route.draw(f"s{session}", turn, request_id=f"r{number}")
        shadow = route.stage is not None and route.stage.share == 0
        if not shadow:
            assert sides.setdefault(session, side) == side
    route.move(0.0)
    assert {route.draw(f"s{session}", turn=5) for session in range(30)} == {"incumbent"}


def test_a_conversation_that_began_before_the_share_rose_stays_also_at_another_gateway() -> None:
    route = Route(gateways=2)
    route.move(0.05)
    early, late = between(0, 0.05), between(0.05, 0.25)
    assert (route.draw(early), route.draw(late)) == ("challenger", "incumbent")
    route.move(0.25)
    for gateway in (0, 1):
        assert route.draw(early, 1, gateway) == "challenger"
        assert route.draw(late, 1, gateway) == "incumbent"
    # what begins now is drawn by the share of now, and what goes on for hours began after it
    another = next(name for name in (between(0.1, 0.15), between(0.15, 0.2)) if name != late)
    assert route.draw(another) == "challenger"
    route.now += 7200
    assert route.draw(another, 3, 1) == "challenger"


def test_a_rollback_moves_everybody_and_who_was_moved_is_not_moved_back() -> None:
    route = Route()
    route.move(0.25)
    session = between(0, 0.05)
    assert route.draw(session) == "challenger"
    route.move(0.0)
    assert route.draw(session, 1) == "incumbent"
    route.move(0.25)
    assert route.draw(session, 2) == "incumbent"
    assert route.draw(between(0.05, 0.1)) == "challenger"


def test_a_conversation_whose_side_was_chosen_is_drawn_by_no_chance_later_either() -> None:
    route = Route()
    route.move(0.25)
    chosen, left = between(0, 0.25), between(0.5, 1)
    assert route.draw(chosen, headers={"x-swarm-side": "incumbent"}) == "incumbent"
    # what users say of it, and its pairs, are no evidence of sides that were drawn
    for turn in (1, 2):
        later = route.drawn(chosen, turn)
        assert (later.side, later.position) == ("incumbent", None)
    assert route.drawn(left, 1).position is not None
    assert begun(route.gateways[0], route.stage) == (0, 0)


def test_a_header_or_a_key_pins_a_side() -> None:
    route = Route()
    route.move(0.25)
    ours, theirs = between(0, 0.25), between(0.25, 1)
    assert route.draw(ours, headers={"x-swarm-side": "incumbent"}) == "incumbent"
    assert route.draw(ours, 1) == "incumbent"
    assert route.draw(theirs, headers={"x-swarm-side": "challenger"}) == "challenger"
    assert route.draw(theirs, 1) == "challenger"
    assert route.draw(theirs, key_id="k", side="challenger") == "challenger"
    assert route.draw(theirs, key_id="k", headers={"x-swarm-side": "odd"}) in ("challenger", "incumbent")
    assert begun(route.gateways[0], route.stage) in ((0, 0), (1, 0), (0, 1))


def test_the_sides_are_counted_once_for_each_conversation_and_come_in_the_share() -> None:
    route = Route()
    route.move(0.25)
    for number in range(2000):
        for turn in range(2):
            route.draw(text=f"hello {number}", turn=turn)
    ours, theirs = begun(route.gateways[0], route.stage)
    assert ours + theirs == 2000 and abs(ours / 2000 - 0.25) < 0.04
    assert begun(route.gateways[0], route.stage) == (0, 0)
    # the pair that was to tell of them never comes
    route.draw(text="first")
    before, sides = route.stage, route.gateways[0]
    with suppress(LookupError), sides.taken(Draw("incumbent", before)) as lost:
        assert sum(lost.begun) == 1
        raise LookupError
    assert sum(begun(sides, before)) == 1
    route.draw(text="second")
    with suppress(LookupError), sides.taken(Draw("incumbent", before)) as lost:
        route.move(0.5)
        route.draw(text="new")
        raise LookupError
    assert begun(route.gateways[0], before) == (0, 0), "they began in another share"
    assert sum(begun(route.gateways[0], route.stage)) == 1


def test_conversations_that_began_before_the_settings_were_read_anew_are_counted_once() -> None:
    route = Route(gateways=2)
    route.move(0.25)
    for number in range(100):
        route.draw(text=f"hello {number}")
    before, after = route.gateways
    after.go_on_from(before)
    route.draw(text="new", gateway=1)
    assert sum(begun(after, route.stage)) == 101 and begun(before, route.stage) == (0, 0)


def test_a_key_keeps_its_side_and_a_request_has_one_of_its_own() -> None:
    route = Route(sticky="key")
    route.move(0.5)
    for key in ("a", "b", "c"):
        assert len({route.draw(f"s{number}", key_id=key) for number in range(20)}) == 1
    assert begun(route.gateways[0], route.stage) == (0, 0)
    route = Route(sticky="request")
    route.move(0.5)
    drawn = [route.draw("same", request_id=f"r{number}") for number in range(40)]
    assert set(drawn) == {"challenger", "incumbent"}
