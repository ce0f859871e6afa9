"""Bind a port and serve an ASGI app on it with uvicorn; a port in use is one clear line, not a traceback.

Invariant: the port is bound before anything else is started, so a failure leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import random
import re
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from swarm.errors import ConfigError
from swarm.http.asgi import App
from swarm.http.client import probe_silence

logger = logging.getLogger(__name__)

#: longer than our clients keep an idle connection, so that none of them sends on one that is being closed
KEEP_ALIVE_SECONDS = 75
SHUTDOWN_SECONDS = 10
#: a request is a connection to its caller, and one or more to where it is answered
_OPEN_FILES = 65_536
#: below the ports that systems give to connections and to servers at port 0, unless somebody has set it otherwise
_LASTING_PORTS = range(20_000, 29_000)
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """Files in PEM form that a server speaks TLS with: the certificate with its chain, and its key, not encrypted.

    Raises:
        ConfigError: a file is missing, no PEM, encrypted, or the key is another certificate's.
    """

    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        for what, path in (("certificate", self.certificate), ("key", self.key)):
            try:
                with path.open("rb"):
                    pass
            except OSError as exc:
                raise ConfigError(f"tls.{what}: cannot read {path}: {exc.strerror or exc}", code="tls") from exc
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # without a password OpenSSL would ask the terminal for it
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError) as exc:
            raise ConfigError(
                f"tls: {self.certificate} and {self.key} must be a certificate and its key in PEM form, the key not "
                f"encrypted: {getattr(exc, 'reason', None) or exc}",
                code="tls",
            ) from exc


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket on ``host``; port 0 takes a free one (see ``sock.getsockname()[1]``).

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not an address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} is not an address of this machine: {exc}", code="cannot_bind") from exc
    # asyncio turns Nagle's delay (40 ms a response) off only for sockets whose protocol says TCP
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe_silence(sock)
        sock.bind(address)
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop what runs there or choose another port"
            raise ConfigError(message, code="port_in_use") from exc
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}", code="cannot_bind") from exc
    return sock


def url_of(host: str, port: int) -> str:
    """The URL of a server that listens on ``host``, with a host that can be connected to. Any free port (0), which
    nobody knows yet, is a port 1: no address has a port 0."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    authority = f"[{reachable}]" if ":" in reachable else reachable
    return f"http://{authority}:{port or 1}"


def is_free(port: int) -> bool:
    """Whether a process may listen on this port of loopback."""
    try:
        bind("127.0.0.1", port).close()
    except ConfigError:
        return False
    return True


def free_ports() -> Iterator[int]:
    """Ports of loopback that nobody has now, in a random order. None is of those that systems give to whoever asks for
    any, so that it is still free when a server listens that is long in starting."""
    return filter(is_free, random.Random().sample(_LASTING_PORTS, len(_LASTING_PORTS)))


def free_port() -> int:
    """The first of :func:`free_ports`."""
    return next(free_ports())


class Http11(HttpToolsProtocol):
    """HTTP 1.1 for clients that offer to go on in HTTP 2, as Java's own does with each request, or by WebSocket: with
    ``Upgrade`` in its head, httptools drops a request's body."""

    _in_body = False
    #: the last bytes that came
    _before = b""

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if not self._in_body and (b"pgrade:" in data or b"PGRADE:" in data):
            # the blank line that ends a head may have begun earlier: what follows it is a body, and stays as it is
            blank = (self._before + data).find(b"\r\n\r\n")
            end = len(data) if blank < 0 else blank + 4 - len(self._before)
            data = _UPGRADE.sub(b"", data[:end]) + data[end:]
        self._before = (self._before + data[-3:])[-3:]
        super().data_received(data)


def uvicorn_config(
    app: ASGIApp,
    *,
    shutdown_seconds: int,
    log_level: str,
    tls: TLSFiles | None = None,
) -> uvicorn.Config:
    """uvicorn's settings for our servers: httptools, uvloop where installed, no WebSockets, no access log, no server
    header."""
    return uvicorn.Config(
        app,
        http=Http11,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        log_level=log_level,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
        ssl_certfile=tls.certificate if tls is not None else None,
        ssl_keyfile=tls.key if tls is not None else None,
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the event loop of a process that serves: uvloop's where installed."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


def allow_connections() -> None:
    """This process may have as many connections as the system allows: shells and services give it 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    while soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (ValueError, OSError):
            # the system's own limit is below, as in macOS, which gives shells 256 files
            most //= 2
        else:
            return


def spare_collections() -> None:
    """Garbage collection leaves alone what is loaded by now, and looks less often: reference counts free nearly all
    that a request makes."""
    gc.freeze()
    gc.set_threshold(20_000)


class AppServer(uvicorn.Server):
    """uvicorn's server, which calls ``ready`` once it serves, and ``release`` before it waits for what runs to end."""

    def __init__(
        self, config: uvicorn.Config, *, release: Callable[[], None], ready: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._release = release
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve.

        Raises:
            ConfigError: the app failed to start (its log says why).
        """
        # so a later uvicorn reports that the app did not start, which would end the event loop; an earlier one returns
        with contextlib.suppress(SystemExit):
            await super().startup(sockets)
        if not self.started:
            raise ConfigError("the server did not start; the log above says why")
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._release()
        await super().shutdown(sockets)


def run_server(server: AppServer, sock: socket.socket) -> None:
    """Serve on ``sock`` until SIGINT or SIGTERM.

    Raises:
        ConfigError: the app failed to start (its log says why).
    """
    try:
        server.run(sockets=[sock])
    except KeyboardInterrupt:
        # uvicorn raises the captured SIGINT again once everything is shut down
        logger.debug("interrupted")
    finally:
        sock.close()


def run_app(app: ASGIApp, sock: socket.socket, *, tls: TLSFiles | None = None) -> None:
    """Serve ``app`` on ``sock`` until SIGINT or SIGTERM; requests then have :data:`SHUTDOWN_SECONDS` to finish.

    Raises:
        ConfigError: the app failed to start (its log says why).
    """

    def leave() -> None:
        if isinstance(app, App):
            app.leaving = True

    config = uvicorn_config(app, shutdown_seconds=SHUTDOWN_SECONDS, log_level="warning", tls=tls)
    run_server(AppServer(config, release=leave), sock)
