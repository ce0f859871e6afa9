"""``POST /v1/feedback`` and ``POST /v1/sessions/{id}/end``: what the application says of answers and conversations.

Invariant: only the key that got an answer, or began a session, can speak of it; to other keys it does not exist.
Feedback replaces earlier feedback to the same answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field
from starlette.requests import Request

from gateway.sessions.feedback_body import GivenFeedback, SessionFeedback
from gateway.types import Caller
from swarm.errors import NotFoundError, RequestError

if TYPE_CHECKING:
    from gateway.sessions.sessions import Sessions


class FeedbackTaken(BaseModel):
    """What became of the feedback."""

    completion_id: str
    trains: bool = Field(description="whether the group is still open for it")
    replaced: bool


class SessionEnded(BaseModel):
    """The session is over."""

    session_id: str
    ended: bool


async def give_feedback(request: Request, given: GivenFeedback) -> FeedbackTaken:
    """What the user says of an answer.

    ``trains`` in the response says whether the answer's group is still open for it.
    """
    sessions, caller = _sessions(request), _caller(request)
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
    return FeedbackTaken(completion_id=given.completion_id, trains=turn.open, replaced=replaced)


async def end_session(request: Request, id: str, said: SessionFeedback) -> SessionEnded:
    """A conversation is over.

    It ends on all routes; its hook runs after the response. The body, which may be left out, rates the session.
    """
    feedback = said.feedback() if said.model_fields_set else None
    if not _sessions(request).end(id, _caller(request).key_id, feedback):
        raise NotFoundError(f"session {id!r} is not known, or is over", code="session_not_found")
    return SessionEnded(session_id=id, ended=True)


def _sessions(request: Request) -> Sessions:
    return request.state.gateway.sessions


def _caller(request: Request) -> Caller:
    return getattr(request.state, "caller", None) or Caller()
