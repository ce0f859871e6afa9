"""Bind a port and run an ASGI app on it until a signal; a port in use is one clear line, not a traceback.

Invariant: the port is bound before anything is started for it, so that a failure leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
from collections.abc import Callable
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from swarm.errors import ConfigError
from swarm.http.heads import Heads
from swarm.http.patience import Patience
from swarm.http.protocol import GatheringProtocol
from swarm.http.shortcuts import Shortcuts
from swarm.http.tls import TLSFiles

logger = logging.getLogger(__name__)

#: ``idle`` is longer than any client of ours keeps an idle connection, so that none meets a socket closed under it.
PATIENCE = Patience(idle=75.0)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket on ``host``; port 0 takes a free one (``sock.getsockname()[1]`` tells which).

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not an address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} is not an address of this machine: {exc}", code="cannot_bind") from exc
    # the protocol is not decoration: asyncio turns Nagle's delay (40 ms an answer) off only where it says TCP
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop what runs there or choose another port"
            raise ConfigError(message, code="port_in_use") from exc
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}", code="cannot_bind") from exc
    return sock


def uvicorn_config(
    app: ASGIApp,
    *,
    shutdown_seconds: int,
    log_level: str,
    shortcuts: Shortcuts | None = None,
    tls: TLSFiles | None = None,
    patience: Patience = PATIENCE,
) -> uvicorn.Config:
    """How our servers serve: httptools where the platform has them, no access log, no server header."""
    protocol = functools.partial(GatheringProtocol, heads=Heads(shortcuts or {}), patience=patience)
    return uvicorn.Config(
        app,
        # it is only ever called
        http=cast("type[GatheringProtocol]", protocol),
        lifespan="on",
        access_log=False,
        server_header=False,
        log_level=log_level,
        timeout_keep_alive=round(patience.idle),
        timeout_graceful_shutdown=shutdown_seconds,
        ssl_certfile=tls.certificate if tls is not None else None,
        ssl_keyfile=tls.key if tls is not None else None,
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the event loop of a process that serves: uvloop's where the platform has it."""
    from uvicorn.loops.auto import auto_loop_factory

    return auto_loop_factory()


def run_app(
    app: ASGIApp,
    sock: socket.socket,
    *,
    shutdown_seconds: int = 10,
    log_level: str = "warning",
    tls: TLSFiles | None = None,
) -> None:
    """Serve ``app`` on ``sock`` until SIGINT or SIGTERM; requests then have ``shutdown_seconds`` to finish.

    Raises:
        ConfigError: the app failed to start (its log says why).
    """
    config = uvicorn_config(app, shutdown_seconds=shutdown_seconds, log_level=log_level, tls=tls)
    try:
        uvicorn.Server(config).run(sockets=[sock])
    except KeyboardInterrupt:
        # uvicorn raises the captured SIGINT again once everything is shut down
        logger.debug("interrupted")
    except SystemExit as exc:
        # uvicorn's way to say that the app's startup failed
        raise ConfigError("the server did not start; the log above says why") from exc
    finally:
        sock.close()
