"""The port for clients that were written for another server: the points where a pack may answer them differently.

Invariant: a pack that serves such clients enters a subclass as ``foreign_clients`` in :mod:`swarm.packs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.errors import ConflictError
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.monitor import VerboseLog
from swarm.status import EngineStatus


@dataclass
class ForeignClients:
    """The six points; each does nothing here."""

    config: ServerConfig
    controller: Controller
    log: VerboseLog

    #: Seconds that a claim without ``wait_seconds`` waits for the next batch to open; ``None``: as other claims.
    held_seconds: ClassVar[float | None] = None

    def routes(self) -> list[BaseRoute]:
        """Further routes."""
        return []

    def status(self) -> EngineStatus:
        """What ``/get_engine_status`` shows."""
        return self.controller.engine_status()

    def until_forgotten(self) -> float:
        """Seconds until no client's cache shows OFFLINE any more."""
        return 0.0

    def without_effect(self, code: Path) -> str:
        """Why synced code changes nothing; empty for code that may.

        Raises:
            OSError: it cannot be read.
        """
        return ""

    def late_end(self, error: ConflictError) -> Response | None:
        """The answer in place of ``error`` to an end without a key that came too late."""
        return None
