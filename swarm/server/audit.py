"""The audit log: who changed the engine, its code or its job, when, and with what result: ``run_dir/audit.jsonl``.

Invariant: an entry is one line, appended at once and on disk before the command is answered. Secrets are in none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request

from swarm.credentials import append_private
from swarm.errors import SwarmGatewayError
from swarm.server.auth import Caller

logger = logging.getLogger(__name__)

_MOST_SENDER = 200


class AuditLog:
    """The log of one server."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "audit.jsonl"

    @asynccontextmanager
    async def command(self, request: Request, what: str) -> AsyncGenerator[dict[str, Any]]:
        """Log the command that the block carries out, and how it ends; the block adds details to what is yielded."""
        details: dict[str, Any] = {}
        caller: Caller = request.scope["caller"]
        entry = {"who": caller.name, "sender": sender_of(request), "what": what, "details": details}
        try:
            yield details
        except SwarmGatewayError as exc:
            await self._append(entry, f"refused: {exc.message}")
            raise
        except BaseException as exc:
            await self._append(entry, f"failed: {type(exc).__name__}: {exc}")
            raise
        await self._append(entry, "done")

    async def _append(self, entry: dict[str, Any], result: str) -> None:
        line = {"when": datetime.now(UTC).isoformat(), **entry, "result": result}
        try:
            await asyncio.shield(asyncio.to_thread(self._write, line))
        except OSError as exc:
            logger.error("the audit log %s cannot be written (%s): %s", self.path, exc, line)

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_private(self.path, line)


def sender_of(request: Request) -> str:
    """On whose behalf the caller acts, as it tells."""
    told = request.query_params.get("sender", "")
    return "".join(char for char in told if char.isprintable())[:_MOST_SENDER]
