"""Run one gateway in this process until a signal."""

from __future__ import annotations

from collections.abc import Callable

from gateway.app import create_app
from gateway.config import GatewayConfig
from swarm.http.serve import bind, run_app


def serve(config: GatewayConfig, on_bound: Callable[[str], None] | None = None) -> None:
    """Serve ``config`` until SIGINT or SIGTERM; requests and submissions under way are then finished, bounded.

    Args:
        config: what to serve; port 0 takes a free one.
        on_bound: called with the address (``http://host:port``) once the port is bound, before serving.

    Raises:
        ConfigError: the hooks do not load, or the port is in use.
    """
    app = create_app(config)
    sock = bind(config.host, config.port)
    if on_bound is not None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        on_bound(f"http://{host}:{sock.getsockname()[1]}")
    run_app(app, sock)
