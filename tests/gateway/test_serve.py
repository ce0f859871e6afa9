"""Running a gateway as a process: the port, the signals, the one-line errors."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.app import serve
from gateway.config.gateway import GatewayConfig
from gateway.launch.succession import Successor, write_successors
from swarm.errors import ConfigError
from tests.gateway.conftest import write_hooks
from tests.swarm.http.certificates import make_certificate

pytestmark = pytest.mark.slow

RUN = """
import sys
from pathlib import Path
from gateway.cli.sections import read_gateway
from gateway.app import serve
serve(read_gateway(Path(sys.argv[1])), lambda url: print(url, flush=True))
"""


@contextmanager
def serving(folder: Path, **settings: Any) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A gateway process and its address; it is gone after the block."""
    config = folder / "gateway.yaml"
    hooks = str(write_hooks(folder / "hooks"))
    config.write_text(yaml.safe_dump({"hooks": hooks, "port": 0, "swarm_url": "http://127.0.0.1:9", **settings}))
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(hooks=str(write_hooks(tmp_path / "hooks")), port=port)
        with pytest.raises(ConfigError, match=f"port {port} .* in use"):
            serve(config)


def test_it_serves_until_a_signal(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        health = httpx.get(f"{url}/health", timeout=30, trust_env=False)
        assert health.json()["status"] == "ok"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGINT)
    assert "Traceback" not in err


def test_a_hangup_while_it_starts_is_a_reload_once_it_serves(tmp_path: Path) -> None:
    """As `systemctl reload` right behind a restart."""
    hooks, once = write_hooks(tmp_path / "hooks"), tmp_path / "once"
    with (hooks / "on_compute_relative_reward.py").open("a") as file:
        file.write(
            f"\nimport os, pathlib, signal\nonce = pathlib.Path({str(once)!r})\n"
            "if not once.exists():\n    once.touch()\n    os.kill(os.getpid(), signal.SIGHUP)\n"
        )
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump({"hooks": str(hooks), "port": 0, "swarm_url": "http://127.0.0.1:9"}))
    # as `up` starts it: a thread waits for the end of stdin
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--stop-on-eof"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stderr is not None
        try:
            assert any("the configuration is reloaded" in line for line in process.stderr), process.wait(60)
        finally:
            process.kill()


@contextmanager
def under_up(folder: Path, file: Path) -> Generator[str]:
    """The address of a gateway as ``up`` starts it, with the user's ``file``, whose incumbent was the model ``tiny``;
    the file ``incumbents.yaml`` has what became of that."""
    serve = {"incumbent": {"policy": "promoted", "model": "tiny"}}
    section = {"hooks": str(write_hooks(folder / "hooks")), "port": 0, "swarm_url": "http://127.0.0.1:9"}
    config, incumbents = folder / "gateway.yaml", folder / "incumbents.yaml"
    config.write_text(yaml.safe_dump(section | {"serve": serve}))
    flags = [f"--config={config}", f"--reload-from={file}", "--server==http://127.0.0.1:9"]
    command = [sys.executable, "-m", "gateway.cli", "serve", *flags, f"--incumbents={incumbents}"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def incumbent_asked(url: str) -> str:
    """Where a gateway's only route asks its incumbent."""
    return httpx.get(f"{url}/status", timeout=30, trust_env=False).json()["routes"]["default"]["upstream"]


def test_one_that_starts_again_while_the_file_of_up_is_wrong_asks_the_incumbent_of_now(tmp_path: Path) -> None:
    file, folder = tmp_path / "my.yaml", tmp_path / "incumbents" / "7"
    file.write_text("job: {model: tiny}\ngateway: {hoks: h}\n")
    folder.mkdir(parents=True)
    successor = Successor(version=7, name="tiny", folder=folder, port=8102)
    write_successors(tmp_path / "incumbents.yaml", {"default": successor})
    with under_up(tmp_path, file) as url:
        assert incumbent_asked(url) == "http://127.0.0.1:8102/v1"


def test_a_reload_refuses_an_incumbent_that_up_does_not_serve(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    text = "job: {model: tiny}\ngateway: {hooks: hooks, serve: {incumbent: {policy: promoted, model: tiny}}}\n"
    file.write_text(text)
    with under_up(tmp_path, file) as url:
        for other in ("model: small", "model: tiny, port: 8103", "model: tiny, vllm: [--seed, '1']"):
            file.write_text(text.replace("model: tiny}}", f"{other}}}}}"))
            refused = httpx.post(f"{url}/admin/reload", timeout=30, trust_env=False)
            assert refused.status_code == 400 and "`up` serves no incumbent" in refused.text, refused.text
            assert incumbent_asked(url) == "http://127.0.0.1:8001/v1"
        file.write_text(text.replace("hooks: hooks", "hooks: hooks, num_repeat: 4"))
        assert httpx.post(f"{url}/admin/reload", timeout=30, trust_env=False).status_code == 200


def test_it_serves_over_tls_to_clients_that_trust_its_certificate(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(tmp_path, tls={"certificate": str(certificate), "key": str(key)}) as (process, url):
        assert url.startswith("https://")
        with httpx.Client(verify=trusting, timeout=30, trust_env=False) as http:
            assert http.get(f"{url}/health").json()["status"] == "ok"
        with httpx.Client(timeout=30, trust_env=False) as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            http.get(f"{url}/health")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
