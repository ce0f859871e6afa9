"""A swarm server of our own: started as a child where none answers, stopped with the client that started it.

Invariant: the child ends with this process, however this process ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import subprocess
import sys
import time

import httpx

from swarm.errors import ConfigError, UnavailableError
from swarm.importer import python_path

logger = logging.getLogger(__name__)

START_DEADLINE = 60.0
STOP_DEADLINE = 60.0
_PROBE = 0.05
_COMMAND = (sys.executable, "-P", "-m", "gateway.cli", "swarm", "start", "--stop-on-eof")


class ServerChild:
    """A swarm server process on a loopback address."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def ensure(cls, server_url: httpx.URL) -> ServerChild | None:
        """A started server, or ``None`` if one answers at ``server_url`` already.

        It gets the defaults and the environment of ``swarm-gateway swarm start`` (``SWARM_TOKEN``, and
        ``SWARM_ALLOW_CODE_SYNC=true`` if it is to take code); its log goes to our stderr.

        Raises:
            ConfigError: nothing answers and the address is not ours to listen on.
            UnavailableError: it ended at once, or did not answer in time.
        """
        if _answers(server_url):
            return None
        if not _is_loopback(server_url) or server_url.scheme != "http" or server_url.path != "/":
            raise ConfigError(
                f"nothing answers at {server_url}, and only a server at http://127.0.0.1:PORT can be started from "
                "here; run `swarm-gateway swarm start` on its machine"
            )
        place = ("--host", server_url.host, "--port", str(server_url.port or 80))
        logger.info("starting a swarm server at %s", server_url)
        # stdin is what holds the child: when this process is gone, even by SIGKILL, it is closed
        environ = {**os.environ, "PYTHONPATH": python_path()}
        process = subprocess.Popen([*_COMMAND, *place], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environ)
        child = cls(process)
        try:
            child._wait_until_ready(server_url)
        except BaseException:
            child.stop()
            raise
        return child

    def stop(self) -> None:
        """Stop the server, its engine included."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            logger.error("the swarm server (pid %d) does not stop; it is killed", self._process.pid)
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self, server_url: httpx.URL) -> None:
        deadline = time.monotonic() + START_DEADLINE
        while not _answers(server_url):
            if (code := self._process.poll()) is not None:
                raise UnavailableError(
                    f"the swarm server for {server_url} ended with code {code}; its reason is on stderr",
                    code="server_unreachable",
                )
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the swarm server did not answer at {server_url} within {START_DEADLINE:g} s",
                    code="server_unreachable",
                )
            time.sleep(_PROBE)


def _answers(server_url: httpx.URL) -> bool:
    try:
        return httpx.get(server_url.join("/health"), timeout=2.0, trust_env=False, verify=False).is_success
    except httpx.TransportError:
        return False


def _is_loopback(server_url: httpx.URL) -> bool:
    if server_url.host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(server_url.host).is_loopback
    return False
