"""``POST /v1/sessions/{id}/end``: the application says that a conversation is over, and may rate it.

Invariant: a key ends its own sessions only; another key's do not exist to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.sessions.feedback_body import SessionFeedback
from gateway.types import Caller
from swarm.errors import NotFoundError
from swarm.http.asgi import read_model

if TYPE_CHECKING:
    from gateway.sessions.sessions import Sessions

_LONGEST_BODY = 64 * 1024


async def end_session(request: Request) -> Response:
    """End the session on all routes where it goes on; its hook is asked behind the answer. The body may be left out,
    or say what :class:`~gateway.sessions.feedback_body.Said` can.

    Raises:
        RequestError: the body makes no sense.
        NotFoundError: this key has no such session, or it is over.
    """
    said: SessionFeedback | None = None
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        said = await read_model(request, SessionFeedback, _LONGEST_BODY)
    sessions: Sessions = request.state.gateway.sessions
    caller: Caller = getattr(request.state, "caller", None) or Caller()
    session_id: str = request.path_params["id"]
    feedback = said.feedback() if said is not None and said.model_fields_set else None
    if not sessions.end(session_id, caller.key_id, feedback):
        raise NotFoundError(f"session {session_id!r} is not known, or is over", code="session_not_found")
    return JSONResponse({"session_id": session_id, "ended": True})
