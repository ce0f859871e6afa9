"""What is said below ``/episodes/`` and ``/groups/`` where there is no route: which address was probably meant.

Invariant: nothing here depends on which episodes there are, so a caller without a key learns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapters.dialects import MessagesDialect
from swarm.errors import NotFoundError, RequestError
from swarm.http.asgi import error_response
from swarm.server.dataplane.wires import DialectWire


class Elsewhere:
    """The ASGI application behind the data plane's ``routes``."""

    def __init__(self, routes: Iterable[Route]) -> None:
        #: (``episodes`` or ``groups``, path below the address) -> methods
        self._served: dict[tuple[str, str], str] = {}
        for route in routes:
            _, kind, _, rest = route.path.split("/", 3)
            self._served[kind, rest] = ", ".join(sorted((route.methods or set()) - {"HEAD"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        error = self._error(scope["method"], scope["path"])
        if "/messages" in scope["path"]:
            # whoever asks there reads Anthropic's errors
            answer = DialectWire(MessagesDialect()).refusal(error)
        else:
            answer = error_response(error)
        await answer(scope, receive, send)

    def _error(self, method: str, path: str) -> RequestError:
        parts = path.split("/", 3)
        kind, rest = parts[1], parts[3] if len(parts) == 4 else ""
        asked = f"{method} {path[:200]}"
        if allowed := self._served.get((kind, rest)):
            error = RequestError(f"{asked}: use {allowed}", code="method_not_allowed")
            error.status = 405
            return error
        return NotFoundError(f"{asked}: {self._hint(kind, rest)}", code="route_not_found")

    def _hint(self, kind: str, rest: str) -> str:
        name = rest.removeprefix("v1/")
        if rest.startswith("v1/v1/"):
            return "the SDK adds /v1 itself: give it the base_url without its last part"
        if name in ("messages/count_tokens", "responses/input_tokens"):
            return (
                "an episode does not count tokens: each answer tells its usage, and the server's own POST /tokenize "
                "counts without sampling (with a token of the scope claim)"
            )
        if kind == "groups" and ("episodes", rest) in self._served:
            return "a group's address takes chat/completions only: use the addresses of its episodes"
        served = (rest for where, rest in self._served if where == kind)
        return f"there are {', '.join(sorted(served))}"
