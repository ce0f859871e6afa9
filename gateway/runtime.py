"""``Gateway``: what one running gateway consists of, and how its configuration is exchanged.

Invariant: a configuration that is wrong changes nothing; the one before it goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope

from adapters.dialects.fields import INDEX
from gateway.api.response_store import ResponseStore
from gateway.api.seen import caller_of
from gateway.config import GatewayConfig
from gateway.keys.ring import KeyRing
from gateway.limits.admission import Admission
from gateway.limits.body_limits import Intake
from gateway.limits.retry_dedup import Joining
from gateway.observability.request import failed, note_left_out
from gateway.observability.telemetry import Telemetry
from gateway.pipeline import Pipeline
from gateway.routing.live import LiveRoutes
from gateway.routing.plan import Plan
from gateway.sessions.sessions import Sessions
from gateway.stats import Stats
from swarm.errors import ConfigError, ConflictError, RelayedError, SwarmGatewayError

logger = logging.getLogger(__name__)

#: Reads the configuration anew.
ConfigSource = Callable[[], GatewayConfig]
#: How many kinds of what was left out the log tells.
_MOST_KINDS = 200
#: What only a new process can change.
_FIXED = (
    "host",
    "port",
    "tls",
    "max_sessions",
    "session_memory_bytes",
    "response_store_bytes",
    "response_store_seconds",
    "access_log",
    "request_log",
    "tracing",
)


class Gateway:
    """One running gateway; an async context.

    Args:
        plan: what to run first.
        keys: who may ask.
        source: where :meth:`reload` reads the configuration; ``None`` where it was not given in a file.

    Attributes:
        routes: what is behind the model names.
        pipeline: answers requests.
        sessions: their conversations.
        responses: those that applications asked to keep.
        intake, admission, joining: what stands between requests and harm.
        door: counts of all requests, those without a route included; what a route did is counted there.
        telemetry: metrics, traces and logs of requests.
    """

    def __init__(self, plan: Plan, keys: KeyRing, source: ConfigSource | None = None) -> None:
        self._source = source
        self._keys = keys
        self._reloading = asyncio.Lock()
        self.routes = LiveRoutes(plan)
        self.sessions = Sessions(max_sessions=plan.config.max_sessions, max_bytes=plan.config.session_memory_bytes)
        self.intake = Intake()
        self.admission = Admission()
        self.joining = Joining()
        self.pipeline = Pipeline(self.routes, self.admission, self.joining, self.sessions)
        self.door = Stats()
        self.responses = ResponseStore(plan.config.response_store_bytes, plan.config.response_store_seconds)
        self.telemetry = Telemetry(plan.config)
        self._held = AsyncExitStack()
        self._left_out: set[str] = set()

    @property
    def config(self) -> GatewayConfig:
        """What runs now."""
        return self.routes.plan.config

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request, within the bounds of the configuration; errors as of :meth:`Intake.body`."""
        config = self.config
        return await self.intake.body(
            scope,
            receive,
            sender=caller_of(scope).key_id,
            limit=config.max_body_bytes,
            most=config.max_reading_bytes,
        )

    def count_error(self, error: SwarmGatewayError) -> None:
        """A caller gets to see ``error``."""
        code = error.code or error.type
        self.door.errors[code] += 1
        failed(code)
        if isinstance(error, RelayedError):
            logger.warning("a request is refused: %s", error)

    def leave_out(self, left_out: Sequence[str]) -> None:
        """A request's answer says what was ``left_out`` of it; the log does so once for each kind."""
        note_left_out(left_out)
        for note in left_out:
            kind = INDEX.sub(".*", note)
            if kind not in self._left_out and len(self._left_out) < _MOST_KINDS:
                self._left_out.add(kind)
                logger.warning("left out of a request, and of others like it without another line here: %s", note)

    async def reload(self) -> list[str]:
        """Read the configuration again and serve by it from the next request on.

        Returns:
            What has changed and needs a restart to matter.

        Raises:
            ConfigError: it is wrong; the old one stays.
            ConflictError: there is no file to read.
        """
        if self._source is None:
            raise ConflictError("this gateway was started without a configuration file", code="nothing_to_reload")
        async with self._reloading:
            try:
                # hooks are code of the operator's that may take its time
                plan = await asyncio.to_thread(_plan, self._source)
            except ConfigError as exc:
                raise _refused(exc.message) from exc
            old = self.config
            if _asks_for_keys(plan.config) != _asks_for_keys(old):
                raise _refused(
                    "whether keys are asked for cannot change while the gateway runs: restart it, or keep api_keys or "
                    "keys_file as they were"
                )
            try:
                self._keys.change(plan.config)
            except ConfigError as exc:
                raise _refused(exc.message) from exc
            await self.routes.change(plan)
        fixed = [name for name in _FIXED if getattr(plan.config, name) != getattr(old, name)]
        logger.warning("the configuration is reloaded: routes %s", ", ".join(one.name for one in plan.routes))
        if fixed:
            logger.warning("the configuration: %s have changed, which needs a restart", ", ".join(fixed))
        return fixed

    async def __aenter__(self) -> Self:
        # last to go: what ends with the gateway is still seen
        await self._held.enter_async_context(self.telemetry)
        await self._held.enter_async_context(self._keys.following())
        await self._held.enter_async_context(self.routes)
        await self._held.enter_async_context(self.sessions)
        await self._held.enter_async_context(self.joining)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._held.__aexit__(exc_type, exc, tb)


def _asks_for_keys(config: GatewayConfig) -> bool:
    return bool(config.api_keys) or config.keys_file is not None


def _refused(message: str) -> ConfigError:
    logger.error("the configuration was not reloaded, the old one stays: %s", message)
    return ConfigError(message)


def _plan(source: ConfigSource) -> Plan:
    return Plan.of(source())
