"""The audit log: who changed the engine, its code or its job, and who read or deleted what people said:
``run_dir/audit.jsonl``.

Invariant: an entry is one line, appended at once and on disk before the command is answered. Secrets are in none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from swarm.credentials import RepeatedReads, append_audit
from swarm.errors import SwarmGatewayError
from swarm.server.auth import TokenHolder

_MOST_SENDER = 200


class AuditLog:
    """The log of one server."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "audit.jsonl"
        self._reads = RepeatedReads()

    async def read(self, request: Request, what: str, about: Mapping[str, Any]) -> None:
        """Log that the caller reads something; a page that looks again and again has a line a minute."""
        entry = _entry(request, what, dict(about))
        if self._reads.due(entry):
            await append_audit(self.path, {**entry, "result": "done"})

    @asynccontextmanager
    async def command(
        self, request: Request, what: str, about: Mapping[str, Any] = MappingProxyType({})
    ) -> AsyncGenerator[dict[str, Any]]:
        """Log the command that the block carries out, ``about`` what, and how it ends; the block adds details to what
        is yielded."""
        details: dict[str, Any] = dict(about)
        entry = _entry(request, what, details)
        try:
            yield details
        except SwarmGatewayError as exc:
            await append_audit(self.path, {**entry, "result": f"refused: {exc.message}"})
            raise
        except BaseException as exc:
            await append_audit(self.path, {**entry, "result": f"failed: {type(exc).__name__}: {exc}"})
            raise
        await append_audit(self.path, {**entry, "result": "done"})


def _entry(request: Request, what: str, details: dict[str, Any]) -> dict[str, Any]:
    caller: TokenHolder = request.scope["caller"]
    return {"who": caller.name, "sender": sender_of(request), "what": what, "details": details}


def sender_of(request: Request) -> str:
    """On whose behalf the caller acts, as it tells."""
    sender = request.query_params.get("sender", "")
    return "".join(char for char in sender if char.isprintable())[:_MOST_SENDER]
