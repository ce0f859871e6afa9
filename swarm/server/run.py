"""Serve the swarm server with uvicorn.

Invariant: the port is bound first, so a port in use is one clear error and port 0 works; the server ends after the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Sequence

import uvicorn
from starlette.applications import Starlette

from swarm.errors import ConfigError
from swarm.http.serve import allow_connections, bind, loop_factory, spare_collections, url_of, uvicorn_config
from swarm.server.app import create_app
from swarm.server.auth import check_exposure
from swarm.server.config import ServerConfig

#: how long requests in flight may take once the server stops
_DRAIN_SECONDS = 5


class _Server(uvicorn.Server):
    """uvicorn's server, which calls ``ready`` once it serves, and ``release`` before it waits for long polls to end."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], release: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._release = release

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # so a later uvicorn reports that the app did not start, which would end the event loop; an earlier one returns
        with contextlib.suppress(SystemExit):
            await super().startup(sockets)
        if not self.started:
            raise ConfigError("the server did not start; the log above says why")
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._release()
        await super().shutdown(sockets)


async def serve(
    config: ServerConfig,
    *,
    engine_command: Sequence[str] | None = None,
    on_ready: Callable[[str], None] | None = None,
    log_level: str = "warning",
) -> None:
    """Serve until SIGINT or SIGTERM, or until cancelled; then stop the engine.

    Args:
        on_ready: called with the server's URL once it serves (port 0 is resolved).

    Raises:
        ConfigError: beyond loopback without a token, the port is in use, the host is not this machine's, or the run
            folder is another server's or cannot be read.
    """
    check_exposure(config)
    listener = bind(config.host, config.port)
    app = create_app(config, engine_command=engine_command)
    allow_connections()

    def ready() -> None:
        spare_collections()
        # the journal is open by now: opening it may fail, and takes long if it is large
        if on_ready is not None:
            on_ready(url_of(config.host, listener.getsockname()[1]))

    server = _Server(
        uvicorn_config(app, shutdown_seconds=_DRAIN_SECONDS, log_level=log_level),
        ready,
        app.state.controller.close,
    )
    with contextlib.closing(listener), _without_traceback(app):
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(task)
        except ConfigError as exc:
            raise app.state.startup_error or exc from None
        except asyncio.CancelledError:
            server.should_exit = True
            await task
            raise


@contextlib.contextmanager
def _without_traceback(app: Starlette) -> Generator[None]:
    """Keep uvicorn from logging the traceback of a start that fails with an error of ours, which says it all."""

    def is_news(record: logging.LogRecord) -> bool:
        return app.state.startup_error is None

    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.addFilter(is_news)
    try:
        yield
    finally:
        uvicorn_log.removeFilter(is_news)


def run(
    config: ServerConfig,
    *,
    engine_command: Sequence[str] | None = None,
    on_ready: Callable[[str], None] | None = None,
    log_level: str = "warning",
) -> None:
    """:func:`serve` in an event loop of its own; returns after Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(config, engine_command=engine_command, on_ready=on_ready, log_level=log_level))
