"""One request's place in its conversation, from its arrival to the submission of its group.

Invariant: nothing is remembered of a request that was not answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.sessions.conversation import Place, Scope
from gateway.sessions.digest import Spoken
from gateway.sessions.ports import Route
from gateway.sessions.turns import Closing, DeliveredTurn
from gateway.types import Incoming
from reward_hooks import Session

if TYPE_CHECKING:
    from gateway.sessions.sessions import Sessions


class SessionLink:
    """What a return policy uses of a session.

    It calls :meth:`delivered` when the answer is decided (or has been streamed), and when the group is sampled and
    scored it awaits :meth:`closing` before it submits, in the background. :meth:`closing` returns at once where
    nothing is waited for.
    """

    def __init__(
        self, sessions: Sessions, incoming: Incoming, route: Route, scope: Scope, said: Spoken, place: Place | None
    ) -> None:
        self._sessions = sessions
        self._turn: DeliveredTurn | None = None
        self.incoming = incoming
        self.route = route
        self.scope = scope
        self.said = said
        self.place = place
        #: the turns before this one, for ``Candidate.session``; ``None`` where a conversation begins
        self.session: Session | None = None
        if place is not None:
            earlier = place.parent.path() if place.parent is not None else []
            self.session = place.conversation.session(earlier)

    @property
    def holds(self) -> bool:
        """Whether :meth:`closing` may wait, so that a hook which cannot tell yet may be asked again then."""
        return self.route.window_seconds > 0

    def delivered(self, completion_id: str, message: dict[str, Any], reward: float | None, *, choices: int = 1) -> None:
        """This message is the answer (the best of ``choices``); call it once, before the last of it goes out.

        Args:
            completion_id: of the ``chat.completion`` body.
            message: in OpenAI's form.
            reward: of the answer; ``None`` where it has none (yet).
        """
        self._turn = self._sessions.remember(self, completion_id, message, reward, choices)

    def scored(self, reward: float) -> None:
        """The delivered answer got its reward after it was delivered."""
        if self._turn is not None:
            self._turn.reward = reward

    def abandoned(self) -> None:
        """The user hung up on the answer."""
        if self._turn is not None:
            self._sessions.observed(self._turn, "abandoned")

    async def closing(self) -> Closing:
        """Wait until the group is to be submitted: at once, when its windows are over, or when it has to go."""
        if self._turn is None or self.route.swarm is None:
            return Closing({}, 0.0)
        return await self._turn.closing(self.route.swarm.open_groups)
