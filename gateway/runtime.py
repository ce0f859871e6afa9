"""``Gateway``: the parts of one running gateway, and the reload of its configuration.

Invariant: a wrong configuration changes nothing; the old one stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from adapters.dialects.fields import INDEX
from gateway.config.gateway import GatewayConfig
from gateway.keys.ring import KeyRing
from gateway.limits import Admission, RetryDedup
from gateway.observability.request import note
from gateway.observability.telemetry import Telemetry
from gateway.pipeline import Pipeline
from gateway.routing.plan import Plan
from gateway.routing.table import LiveRoutes
from gateway.sessions.response_store import ResponseStore
from gateway.sessions.sessions import Sessions
from gateway.stats import Stats
from gateway.takeover.delivered import DeliveredAnswers
from reward_hooks.runner import HookThreads
from swarm.errors import ConfigError, ConflictError, RelayedError, SwarmGatewayError

logger = logging.getLogger(__name__)

#: Reads the configuration anew.
ConfigSource = Callable[[], GatewayConfig]
#: Kinds of left-out fields that are logged.
_MOST_KINDS = 200
#: Seconds that a reload may take to read the configuration and to load the hooks.
LOAD_SECONDS = 300.0
#: Settings that only a restart changes.
_FIXED = (
    "host",
    "port",
    "tls",
    "max_sessions",
    "session_memory_bytes",
    "response_store_bytes",
    "response_store_seconds",
    "cors_origins",
    "access_log",
    "request_log",
    "tracing",
    "ui",
)


class Gateway:
    """One running gateway; an async context.

    Args:
        plan: what to run first.
        keys: of the callers.
        source: where :meth:`reload` reads the configuration; ``None`` if there is no file.

    Attributes:
        delivered: answers of both sides, which users may rate.
        responses: stored for the Responses API.
        door: counts of all requests, those without a route included; each route has its own.
        reload_failures, reload_error: how many reloads failed, and why the last one did; empty once one succeeds.
    """

    def __init__(self, plan: Plan, keys: KeyRing, source: ConfigSource | None = None) -> None:
        self._source = source
        self._keys = keys
        self._reloading = asyncio.Lock()
        self.routes = LiveRoutes(plan)
        self.sessions = Sessions(max_sessions=plan.config.max_sessions, max_bytes=plan.config.session_memory_bytes)
        self.admission = Admission()
        self.retries = RetryDedup()
        self.delivered = DeliveredAnswers()
        self.pipeline = Pipeline(self.routes, keys, self.admission, self.retries, self.sessions, self.delivered)
        self.door = Stats()
        self.responses = ResponseStore(plan.config.response_store_bytes, plan.config.response_store_seconds)
        self.telemetry = Telemetry(plan.config)
        self._held = AsyncExitStack()
        self._left_out: set[str] = set()
        self.reload_failures, self.reload_error = 0, ""

    def count_error(self, error: SwarmGatewayError) -> None:
        """Count an error that a caller sees."""
        code = error.code or error.type
        self.door.errors[code] += 1
        note(error_code=code)
        if isinstance(error, RelayedError):
            logger.warning("a request was refused: %s", error)

    def leave_out(self, left_out: Sequence[str]) -> None:
        """Note the fields of a request that its answer does not heed; each kind is logged once."""
        note(left_out=left_out)
        for line in left_out:
            kind = INDEX.sub(".*", line)
            if kind not in self._left_out and len(self._left_out) < _MOST_KINDS:
                self._left_out.add(kind)
                logger.warning("a field was left out of a request (logged once for its kind): %s", line)

    async def reload(self) -> tuple[list[str], list[str]]:
        """Read the configuration again, for all requests from now on; hooks are loaded anew in any case, and a failure
        is counted.

        Returns:
            The settings that changed, those of a route as ``routes.NAME.setting``; and which of them need a restart to
            take effect.

        Raises:
            ConfigError: it is wrong; the old one stays.
            ConflictError: there is no file to read.
        """
        source = self._source
        if source is None:
            raise ConflictError("this gateway was started without a configuration file", code="nothing_to_reload")
        try:
            done = await self._reload(source)
        except ConfigError as exc:
            self.reload_failures, self.reload_error = self.reload_failures + 1, exc.message
            logger.error("the configuration is not reloaded, the one before stays: %s", exc)
            raise
        self.reload_error = ""
        return done

    async def _reload(self, source: ConfigSource) -> tuple[list[str], list[str]]:
        async with self._reloading:
            # loading hooks runs the operator's code: in a thread of its own, which may hang for ever
            try:
                done = await HookThreads(1).call(lambda: Plan.of(source()), timeout=LOAD_SECONDS)
            except TimeoutError as exc:
                raise ConfigError(
                    f"it was not read within {LOAD_SECONDS:g} s: what does a file of hooks wait for as it is loaded?"
                ) from exc
            if isinstance(done.error, OSError):
                # such as a folder into which this user may not look
                raise ConfigError(str(done.error)) from done.error
            if done.error is not None:
                raise done.error
            plan: Plan = done.value
            old = self.routes.plan
            if self._keys.open == bool(plan.config.api_keys or plan.config.keys_file):
                raise ConfigError(
                    "a reload cannot switch between a gateway with keys and one without: restart it, or keep api_keys "
                    "or keys_file as they were"
                )
            self._keys.change(plan.config)
            await self.routes.change(plan)
        changed = _changed(old, plan)
        fixed = [name for name in changed if name in _FIXED]
        names = ", ".join(route.name for route in plan.routes)
        logger.warning("the configuration is reloaded: routes %s; changed: %s", names, ", ".join(changed) or "nothing")
        if fixed:
            logger.warning("the configuration: %s needs a restart to change", ", ".join(fixed))
        return changed, fixed

    async def __aenter__(self) -> Self:
        # last to go, so that it observes the shutdown of the rest
        await self._held.enter_async_context(self.telemetry)
        await self._held.enter_async_context(self._keys.following())
        await self._held.enter_async_context(self.routes)
        await self._held.enter_async_context(self.sessions)
        await self._held.enter_async_context(self.retries)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._held.__aexit__(*exc)


def _settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """The settings by the beginnings of their names, those of the gateway and of each route; with digests of the hooks
    and suites that they name."""
    config = plan.config
    settings_of = {"": {name: getattr(config, name) for name in type(config).model_fields if name != "routes"}}
    for route in plan.routes:
        own = {name: getattr(route.settings, name) for name in type(route.settings).model_fields}
        settings = settings_of.setdefault(f"routes.{route.name}.", own) if config.routes else settings_of[""]
        named = {"hooks": route.hooks, "serve.gate.hook": route.gate_hooks}
        settings |= {name: (settings.get(name), hooks.code) for name, hooks in named.items() if hooks is not None}
        if route.suites:
            settings["serve.gate.suites"] = [suite.key for suite in route.suites]
    return settings_of


def _changed(old: Plan, new: Plan) -> list[str]:
    """The settings that differ; of a route that is new or gone, its name."""
    before, after = _settings(old), _settings(new)
    changed: list[str] = []
    for beginning in {**after, **before}:
        if beginning not in before or beginning not in after:
            changed.append(beginning.removesuffix("."))
            continue
        was, now = before[beginning], after[beginning]
        changed += [f"{beginning}{name}" for name in {**now, **was} if was.get(name) != now.get(name)]
    return changed
