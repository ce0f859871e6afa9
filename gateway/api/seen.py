"""What the stages may see of a request's head.

Invariant: nothing that tells of a secret goes beyond the edge.
"""

from __future__ import annotations

import re

from starlette.types import Scope

from gateway.types import Caller
from swarm.http.asgi import RawHeaders

#: Headers whose name says so much never reach a hook; one too many dropped is the lesser mistake.
_SECRET_HEADER = re.compile(r"^(?!x-swarm-|idempotency-key$).*(auth|cookie|credential|key|passw|secret|session|token)")
_NOBODY = Caller()


def caller_of(scope: Scope) -> Caller:
    """Who asks, as the keys' middleware has found."""
    return scope["state"].get("caller") or _NOBODY


def public_headers(headers: RawHeaders) -> dict[str, str]:
    """What anyone may see of a request's headers; names in lower case, and of one name the last value."""
    return {
        name: value.decode("latin-1")
        for key, value in headers
        if not _SECRET_HEADER.search(name := key.decode("latin-1"))
    }
