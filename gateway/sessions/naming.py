"""Which conversation a request says that it belongs to, by header or body.

Invariant: a name counts only together with the caller's key and the route.
"""

from __future__ import annotations

from typing import Any, cast

from gateway.sessions.conversation import Scope
from gateway.types import Incoming
from swarm.errors import RequestError

#: Names the session; any text of the application's choice.
SESSION = "x-swarm-session"
#: ``true``: the session is over once this request is answered.
SESSION_END = "x-swarm-session-end"
_LONGEST = 256


def scope_of(incoming: Incoming, route: str) -> Scope:
    """By the header, else by ``metadata.session_id`` of the body; else the end user named in the body tells apart.

    Raises:
        RequestError: the header is longer than 256 characters.
    """
    key_id = incoming.caller.key_id
    if name := incoming.headers.get(SESSION, "").strip():
        if len(name) > _LONGEST:
            raise RequestError(f"the header {SESSION} is longer than {_LONGEST} characters", param=SESSION)
        return Scope(route, key_id, "session", name)
    body = incoming.call.body
    metadata: Any = body.get("metadata")
    named = cast("dict[str, Any]", metadata).get("session_id") if isinstance(metadata, dict) else None
    if isinstance(named, str) and 0 < len(named) <= _LONGEST:
        return Scope(route, key_id, "session", named)
    for field in ("safety_identifier", "user"):
        user = body.get(field)
        if isinstance(user, str) and user:
            return Scope(route, key_id, "user", user)
    return Scope(route, key_id, "anyone", "")


def ends(incoming: Incoming) -> bool:
    """Whether the session is over after this request.

    Raises:
        RequestError: the header is neither ``true`` nor ``false``.
    """
    said = incoming.headers.get(SESSION_END, "false").strip().lower()
    if said not in ("true", "false"):
        raise RequestError(f"the header {SESSION_END} must be true or false", param=SESSION_END)
    return said == "true"
