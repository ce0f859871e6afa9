"""``POST /v1/feedback``: what the user says of an answer.

Invariant: only the key that got an answer can speak of it; to others it does not exist. Said again, it replaces what
was said before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.sessions.feedback_body import GivenFeedback
from gateway.types import Caller
from swarm.errors import NotFoundError, RequestError
from swarm.http.asgi import read_model

if TYPE_CHECKING:
    from gateway.sessions.sessions import Sessions

_LONGEST_BODY = 64 * 1024


async def give_feedback(request: Request) -> Response:
    """Note the feedback; ``trains`` in the answer tells whether the group is still open for it.

    Raises:
        RequestError: the body makes no sense, or names a choice that was not delivered.
        NotFoundError: no answer of that id that trains was delivered to this key, or it is forgotten.
    """
    given = await read_model(request, GivenFeedback, _LONGEST_BODY)
    sessions: Sessions = request.state.gateway.sessions
    caller: Caller = getattr(request.state, "caller", None) or Caller()
    turn = sessions.turn(given.completion_id, caller.key_id)
    if turn is None:
        raise NotFoundError(
            f"completion {given.completion_id!r} is not known: it was not delivered to this key, was not judged "
            "(passed straight through, or answered by an upstream), or its session is over",
            code="completion_not_found",
            param="completion_id",
        )
    if given.choice >= turn.choices:
        raise RequestError(f"the completion has {turn.choices} choices, numbered from 0", param="choice")
    replaced = turn.say(given.choice, given.feedback())
    sessions.counts.feedback["counts" if turn.open else "late"] += 1
    return JSONResponse({"completion_id": given.completion_id, "trains": turn.open, "replaced": replaced})
