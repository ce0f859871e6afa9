"""Running a gateway as a process: the port, the signals, the one-line errors."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.config import GatewayConfig
from gateway.serve import serve
from swarm.errors import ConfigError
from tests.gateway.conftest import write_hooks

pytestmark = pytest.mark.slow

RUN = """
import sys
from gateway.config import GatewayConfig
from gateway.serve import serve
serve(GatewayConfig(hooks=sys.argv[1], port=0, swarm_url="http://127.0.0.1:9"), lambda url: print(url, flush=True))
"""


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(hooks=str(write_hooks(tmp_path / "hooks")), port=port)
        with pytest.raises(ConfigError, match=f"port {port} .* in use"):
            serve(config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    hooks = write_hooks(tmp_path / "hooks")
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(hooks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            url = process.stdout.readline().strip()
            health = httpx.get(f"{url}/health", timeout=30, trust_env=False)
            assert health.json()["status"] == "ok"
            process.send_signal(number)
            process.wait(timeout=20)
        finally:
            process.kill()
        assert process.returncode in (0, -number)
        assert "Traceback" not in process.stderr.read()
