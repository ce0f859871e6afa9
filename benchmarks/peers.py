"""Other people's programs, to be measured beside ours: the gateways LiteLLM and ferrogw, and the trainer TRL.

The gateways live in an environment of their own, because their dependencies are not ours; TRL in one with ours, too.
:func:`install` and :func:`install_trl` make them once.
LiteLLM is pinned: 1.82.7, 1.82.8 and 1.107.0 were compromised releases and must never be installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path

import psutil

from benchmarks.vllm import MODEL

HOME = Path(__file__).parent.parent / ".bench-peers"
PACKAGES = ("litellm[proxy]==1.109.1", "ferrogw==1.5.10")
#: LiteLLM asks for releases of these that an index may not hold yet; neither is on the way of a request.
_OVERRIDES = "certifi>=2025\nlitellm-proxy-extras>=0.4\n"
TRL = "trl==1.16.0"
_INSTALL_SECONDS, _START_SECONDS = 900, 120
_KEY = "fgw_benchmark"
#: ferrogw takes none but names that it knows; the scripted vLLM takes any.
FERROGW_MODEL = "gpt-4o-mini"


class PeerError(Exception):
    """A peer could not be installed or did not start; the message says where to read on."""


def install() -> None:
    """Make the peers' environment unless it is there.

    Raises:
        PeerError: pip failed.
    """
    overrides = HOME / "overrides.txt"
    commands = [
        [sys.executable, "-m", "venv", str(HOME)],
        [str(HOME / "bin/python"), "-m", "pip", "install", "--quiet", "uv"],
        [str(HOME / "bin/uv"), "pip", "install", "--quiet", "--python", str(HOME / "bin/python")],
    ]
    commands[-1] += ["--override", str(overrides), *PACKAGES]
    HOME.mkdir(exist_ok=True)
    overrides.write_text(_OVERRIDES)
    _make(HOME, "\n".join(PACKAGES), commands)


def install_trl() -> Path:
    """Make TRL's environment unless it is there: the packages that run this, with TRL on top; its Python.

    Raises:
        PeerError: pip failed.
    """
    home = HOME / "trl"
    python = home / "bin/python"
    commands = [
        [sys.executable, "-m", "venv", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", TRL],
    ]
    _make(home, TRL, commands)
    own = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _make(home: Path, wanted: str, commands: list[list[str]]) -> None:
    """Run ``commands`` unless ``home`` has what is ``wanted``."""
    ready = home / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        if done.returncode:
            raise PeerError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    ready.write_text(wanted)


@contextlib.contextmanager
def litellm(port: int, upstream: str, folder: Path) -> Generator[psutil.Process]:
    """LiteLLM's proxy with one model and nothing switched on."""
    config = folder / "litellm.yaml"
    model = {"model": f"openai/{MODEL}", "api_base": f"{upstream}/v1", "api_key": "unused"}
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": model}]}))
    command = [str(HOME / "bin/litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    environment = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
    }
    with _running(command, environment, folder / "litellm.log", f"http://127.0.0.1:{port}/health/liveliness") as peer:
        yield peer


@contextlib.contextmanager
def ferrogw(port: int, upstream: str, folder: Path) -> Generator[psutil.Process]:
    """ferrogw (Go) with its OpenAI provider and nothing switched on."""
    config = folder / "ferrogw.yaml"
    config.write_text("strategy: {mode: single}\ntargets: [{virtual_key: openai}]\n")
    environment = {
        "OPENAI_API_KEY": "unused",
        "OPENAI_BASE_URL": f"{upstream}/v1",
        "MASTER_KEY": _KEY,
        "PORT": str(port),
        "GATEWAY_CONFIG": str(config),
        "ALLOW_UNAUTHENTICATED_PROXY": "true",
        # its own bound on requests per second is not what is measured
        "RATE_LIMIT_RPS": "0",
    }
    command = [str(HOME / "bin/ferrogw"), "serve"]
    with _running(command, environment, folder / "ferrogw.log", f"http://127.0.0.1:{port}/health") as peer:
        yield peer


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path, probe: str) -> Generator[psutil.Process]:
    """The process of ``command`` once ``probe`` answers; it is ended on leaving."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, cwd=log.parent
        )
    try:
        _wait_for(probe, process, log)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(probe: str, process: subprocess.Popen[bytes], log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(_START_SECONDS * 4):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.25)
            raise PeerError(f"{log.stem} ended while starting: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError):
            try:
                direct.open(probe, timeout=2).close()
            except urllib.error.HTTPError as exc:
                exc.close()
            return
    raise PeerError(f"{log.stem} does not answer after {_START_SECONDS} s: {log.read_text()[-2000:]}")
