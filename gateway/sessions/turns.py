"""One delivered answer and everything that is learnt of it later, until its group is submitted.

Invariant: what comes after the group's submission stays visible to hooks of later requests, and never trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.sessions.open_groups import Hold, OpenGroups
from reward_hooks import Feedback, Turn


@dataclass(frozen=True, slots=True)
class Closing:
    """What became known of a group's delivered answers while it was open.

    Attributes:
        feedback: by the answer's place among the delivered ones (0: the best, and the only one unless more were asked
            for). Not empty: ask the hook again, with it as ``Candidate.feedback``.
        credit: what the end of the session adds to the reward of the best delivered answer.
    """

    feedback: Mapping[int, Feedback]
    credit: float


@dataclass(eq=False)
class DeliveredTurn:
    """One request of a conversation and the answer that was delivered for it.

    Attributes:
        completion_id: names the answer, without what a dialect puts before it.
        key_id: of the caller that got it.
        body, message: the request in Chat Completions form and the answer's message.
        reward: of the answer, ``None`` where it was not scored.
        asked, answered: digests of the conversation before and with the answer.
        parent: the turn that this one goes on from.
        choices: how many answers were delivered.
        size: bytes that only this turn needs.
        said: by place among the delivered answers, what the caller told.
        observed: by name of the signal, of the best delivered answer.
        credit: what the end of the session gave.
    """

    completion_id: str
    key_id: str
    body: dict[str, Any]
    message: dict[str, Any]
    reward: float | None
    asked: bytes
    answered: bytes
    parent: DeliveredTurn | None
    choices: int = 1
    size: int = 0
    said: dict[int, Feedback] = field(default_factory=dict[int, Feedback])
    observed: dict[str, float] = field(default_factory=dict[str, float])
    credit: float = 0.0
    _open: bool = True
    _feedback_until: float = float("-inf")
    _session_until: float = float("-inf")
    _hold: Hold | None = None

    @property
    def open(self) -> bool:
        """Whether what is said now may still train."""
        return self._open

    def waits(self, feedback_until: float, session_until: float) -> None:
        """Set how long the group is to stay open for feedback and for the session's end (loop's clock)."""
        self._feedback_until = feedback_until
        self._session_until = session_until
        self._open = max(feedback_until, session_until) > asyncio.get_running_loop().time()

    def session_over(self) -> None:
        """No longer wait for the session's end."""
        self._session_until = float("-inf")
        if self._hold is not None:
            self._hold.until = self._feedback_until

    async def closing(self, groups: OpenGroups) -> Closing:
        """Wait until the group is to be submitted; what is said later does not count."""
        try:
            if self._open:
                self._hold = Hold()
                self._hold.until = max(self._feedback_until, self._session_until)
                await groups.keep(self._hold)
        finally:
            self._open = False
            self._hold = None
        return Closing(self.feedback(), self.credit)

    def feedback(self) -> dict[int, Feedback]:
        """What was said and observed, by place among the delivered answers; what was said of a signal goes first."""
        feedback = dict(self.said)
        if self.observed:
            best = feedback.get(0) or Feedback()
            feedback[0] = best.model_copy(update={"signals": {**self.observed, **best.signals}})
        return feedback

    def say(self, choice: int, feedback: Feedback) -> bool:
        """Note what the caller says of a delivered answer; returns whether it replaces what was said before."""
        replaces = choice in self.said
        self.said[choice] = feedback
        return replaces

    def observe(self, signal: str, strength: float) -> None:
        """Note what the user did; of one signal the strongest observation stands."""
        self.observed[signal] = max(strength, self.observed.get(signal, 0.0))

    def as_turn(self) -> Turn:
        """What hooks see."""
        return Turn(
            completion_id=self.completion_id,
            request=self.body,
            message=self.message,
            reward=self.reward,
            feedback=self.feedback().get(0),
        )

    def path(self) -> list[DeliveredTurn]:
        """The turns up to and with this one, oldest first."""
        turns: list[DeliveredTurn] = []
        turn: DeliveredTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]
