"""Which side answers a request: the incumbent, or the challenger that has a share of the conversations.

Invariant: a conversation that this gateway knows keeps its side, whatever the share becomes, until a rollback: then the
incumbent answers everybody. The hash of a conversation is the same at every gateway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

from gateway.config.takeover import ServeConfig
from gateway.rollout.reference import Drawn
from gateway.sessions.conversation import INSTRUCTIONS, names_of
from gateway.types import Incoming
from reward_hooks.contract import texts_of
from swarm.concurrency import Latest
from swarm.errors import RequestError
from swarm.evidence.pairs import Side
from swarm.evidence.stages import ServingStage

#: Asks for a side, where it serves.
SIDE = "x-swarm-side"
#: Seconds for which a request of the challenger's waits for its turn; then the incumbent answers.
LONGEST_WAIT = 1.0
#: Conversations whose side is remembered, the latest.
_MOST = 100_000
#: Seconds for which a conversation that is not known may have begun before the last move of the share.
_LONGEST_CONVERSATION = 3600.0


@dataclass(frozen=True, slots=True)
class Draw:
    """Who answers a request, in which stage (``None``: not known), and its conversation's position, if it was drawn."""

    side: Side
    stage: ServingStage | None
    position: float | None = None


class Sides:
    """The sides of one route's conversations; ``stage`` gives its stage, as far as it is known."""

    def __init__(
        self,
        route: str,
        serve: ServeConfig,
        stage: Callable[[], ServingStage | None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._route = route
        self._sticky = serve.canary.sticky
        self._stage = stage
        self._wall = wall
        #: of each conversation, and whether somebody chose it
        self._sides = Latest[str, tuple[Side, bool]](_MOST)
        self._share = 0.0
        self._begun: dict[Side, int] = {"challenger": 0, "incumbent": 0}

    def go_on_from(self, before: Sides) -> None:
        """Know the conversations that ``before`` knows, which has the same route under earlier settings."""
        self._sides, self._share = before._sides, before._share
        if self._sticky == before._sticky:
            self._begun, before._begun = before._begun, self._begun

    @property
    def stage(self) -> ServingStage | None:
        """The stage now."""
        stage = self._stage()
        share = stage.share if stage is not None else 0.0
        if share < self._share:
            self._sides.clear()
        if share != self._share:
            self._share = share
            self._begun = dict.fromkeys(self._begun, 0)
        return stage

    def draw(self, incoming: Incoming) -> Draw:
        """Who answers ``incoming``."""
        stage = self.stage
        if stage is None or stage.share == 0:
            return Draw("incumbent", stage)
        conversation = blake2b(self._conversation(incoming).encode(errors="replace"), digest_size=16).hexdigest()
        if (pinned := _pinned(incoming)) is not None:
            self._sides[conversation] = pinned, True
            return Draw(pinned, stage)
        unit = {"session": conversation, "key": incoming.caller.key_id or conversation, "request": incoming.request_id}
        position = position_of(unit[self._sticky], stage.salt)
        if self._sticky == "request":
            side = _side(position, stage.share)
            self._begun[side] += 1
            return Draw(side, stage, position)
        side, chosen = self._sides.get(conversation, (None, False))
        if side is None:
            messages = incoming.call.messages
            goes_on = any(message.get("role") == "assistant" for message in messages)
            recent = self._wall() - stage.at < _LONGEST_CONVERSATION
            side = _side(position, stage.before if goes_on and recent else stage.share)
            # a key is no chance: few of them may make any ratio
            if not goes_on and self._sticky == "session":
                self._begun[side] += 1
        self._sides[conversation] = side, chosen
        return Draw(side, stage, None if chosen else position)

    @contextmanager
    def taken(self, draw: Draw) -> Generator[Drawn]:
        """Who answered, with the conversations that have begun since the last block, while the stage of ``draw`` is
        that of now; they wait for another pair where the block fails."""
        begun: dict[Side, int] = dict.fromkeys(self._begun, 0)
        if self._counts(draw.stage):
            begun, self._begun = self._begun, begun
        try:
            yield Drawn(draw.side, draw.position, (begun["challenger"], begun["incumbent"]))
        except BaseException:
            if self._counts(draw.stage):
                self._begun = {side: self._begun[side] + count for side, count in begun.items()}
            raise

    def _counts(self, stage: ServingStage | None) -> bool:
        """Whether what has begun began in the share of ``stage``."""
        return stage is not None and stage.share == self._share

    def _conversation(self, incoming: Incoming) -> str:
        key_id = incoming.caller.key_id
        try:
            scope, _, _ = names_of(incoming, self._route)
        except RequestError:
            scope = None
        if scope is not None and scope.kind in ("session", "agent"):
            return f"{key_id}\0{scope.kind}\0{scope.name}"
        # without a name it is known by its first words
        for message in incoming.call.messages:
            if message.get("role") not in INSTRUCTIONS:
                return "\0".join((key_id, "first", *texts_of(message)))
        return f"{key_id}\0request\0{incoming.request_id}"


def position_of(unit: str, salt: str) -> float:
    """In [0, 1): the challenger answers those below its share."""
    drawn = blake2b(unit.encode(errors="replace"), key=salt.encode()[:64], digest_size=6)
    return int.from_bytes(drawn.digest()) / 2**48


def _side(position: float, share: float) -> Side:
    return "challenger" if position < share else "incumbent"


def _pinned(incoming: Incoming) -> Side | None:
    for pin in (incoming.headers.get(SIDE), incoming.caller.side):
        if pin == "challenger" or pin == "incumbent":
            return pin
    return None
