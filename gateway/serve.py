"""Run one gateway in this process until a signal."""

from __future__ import annotations

import gc
from collections.abc import Callable

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from gateway.runtime import ConfigSource
from swarm.http.serve import TLSFiles, bind, run_app


def serve(
    config: GatewayConfig, on_bound: Callable[[str], None] | None = None, source: ConfigSource | None = None
) -> None:
    """Serve ``config`` until SIGINT or SIGTERM; requests and submissions in flight then get some time to finish.

    Args:
        config: of the gateway; port 0 takes a free one.
        on_bound: called with the address (``http://host:port``) once the port is bound, before serving.
        source: reads the configuration again on SIGHUP; without one SIGHUP ends the process.

    Raises:
        ConfigError: the hooks do not load, the certificate does not serve, or the port is in use.
    """
    app = create_app(config, source)
    tls = tls_files(config)
    sock = bind(config.host, config.port)
    if on_bound is not None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        on_bound(f"{'https' if tls is not None else 'http'}://{host}:{sock.getsockname()[1]}")
    # the modules loaded by now stay: garbage collection need not scan them
    gc.freeze()
    run_app(app, sock, tls=tls)


def check(config: GatewayConfig) -> list[str]:
    """Check everything in ``config`` that can be checked without serving.

    Returns:
        The routes' names.

    Raises:
        ConfigError: hooks do not load, keys cannot be read, or the certificate does not serve.
    """
    create_app(config)
    tls_files(config)
    return config.route_names


def tls_files(config: GatewayConfig) -> TLSFiles | None:
    """The TLS files of ``config``, checked.

    Raises:
        ConfigError: the files do not serve.
    """
    return TLSFiles(config.tls.certificate, config.tls.key) if config.tls is not None else None
