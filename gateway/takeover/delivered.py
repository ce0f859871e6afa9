"""``DeliveredAnswers``: which side gave which answer, so that what its user says of it later is evidence.

Invariant: a key rates its own answers alone, and only those whose conversation was drawn by chance: whoever chose a
side would rate their choice. An answer is known by a digest: no name and no text is kept or sent.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from gateway.rollout.server import Swarm, Training
from gateway.takeover.incumbent import CHALLENGER, SOURCE
from gateway.takeover.shadow import Shadow
from gateway.takeover.sides import Draw
from gateway.types import Incoming, Outcome, Relayed
from swarm.concurrency import Latest
from swarm.evidence.pairs import Side, Terms
from swarm.evidence.ratings import SideRating
from swarm.protocol import POLICY_VERSION

#: Answers that may be rated, the latest; and terms that they share.
_MOST, _MOST_TERMS = 100_000, 1000


class _Answer(NamedTuple):
    name: str
    swarm: Swarm
    terms: Terms
    side: Side
    #: how often its engine had gone back by then
    falls: int

    @property
    def is_lost(self) -> bool:
        """Whether the weights that gave it are: what comes again under their number is other weights."""
        version = self.terms.challenger if self.side == CHALLENGER else None
        return version is not None and any(fall < version for fall in self.swarm.falls[self.falls :])


class DeliveredAnswers:
    """The latest answers of both sides, of all routes."""

    def __init__(self) -> None:
        self._answers = Latest[str, _Answer](_MOST)
        self._terms = Latest[Terms, Terms](_MOST_TERMS)

    def note(self, incoming: Incoming, training: Training, shadow: Shadow, draw: Draw, outcome: Outcome) -> None:
        """Remember that ``outcome`` answers ``incoming``, where it may be compared; what stood in for its side is
        left out, and so is an error of the incumbent's, for one of the challenger's reaches nobody."""
        if draw.position is None or outcome.headers.get(SOURCE) != draw.side or not incoming.consent.granted:
            return
        if isinstance(outcome, Relayed) and outcome.status != 200:
            return
        report = training.swarm.report
        version = outcome.headers.get(POLICY_VERSION, "") if draw.side == CHALLENGER else ""
        terms = shadow.terms(training, draw.stage).model_copy(
            update={
                "challenger": int(version) if version.isdecimal() else report.policy_version,
                "num_repeat": training.settings.num_repeat or report.num_repeat or 1,
            }
        )
        terms = self._terms.setdefault(terms, terms)
        name = _digest(incoming.caller.key_id, incoming.request_id)
        self._answers[name] = _Answer(name, training.swarm, terms, draw.side, len(training.swarm.falls))

    def share(self, incoming: Incoming, request_id: str) -> None:
        """``incoming`` repeats the request ``request_id`` of its key and shares its answer."""
        key_id = incoming.caller.key_id
        if (answer := self._answers.get(_digest(key_id, request_id))) is not None:
            self._answers[_digest(key_id, incoming.request_id)] = answer

    def rate(self, key_id: str, request_id: str, rating: float | None) -> bool:
        """Whether this key has such an answer; its rating is recorded behind the caller's back."""
        answer = self._answers.get(_digest(key_id, request_id))
        if answer is not None and answer.is_lost:
            return False
        if answer is not None and rating is not None:
            side_rating = SideRating(answer=answer.name, terms=answer.terms, side=answer.side, rating=rating)
            answer.swarm.record_rating(side_rating)
        return answer is not None


def _digest(key_id: str, request_id: str) -> str:
    return blake2b(f"{key_id}\0{request_id}".encode(errors="replace"), digest_size=16).hexdigest()
