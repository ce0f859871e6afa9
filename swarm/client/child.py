"""A swarm server that the client starts as a child process if none answers, and stops when it is closed.

Invariant: the child ends with this process, however this process ends, but not with Ctrl-C, which may end one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from time import monotonic
from urllib.parse import urlsplit
from weakref import WeakSet

from swarm.errors import ConfigError, UnavailableError
from swarm.http.client import ConnectionBrokenError, HttpClient, is_loopback
from swarm.importer import python_path
from swarm.packs import COMMAND_LINE

logger = logging.getLogger(__name__)

START_DEADLINE = 60.0
STOP_DEADLINE = 60.0
#: Seconds between two looks whether the child answers.
_PROBE = 0.05
_HEALTH_SECONDS = 2.0
#: The port whose server has the run folder ``runs/default``.
_USUAL_PORT = 10086
_COMMAND = (sys.executable, "-P", "-m", COMMAND_LINE, "swarm", "start", "--stop-on-eof")


def run_folder(port: int) -> str:
    """The run folder of a server that is started for a client: one for each port, for a folder is one server's."""
    return "runs/default" if port in (0, _USUAL_PORT) else f"runs/{port}"


class ServerChild:
    """A swarm server process on a loopback address."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        _children.add(self)

    @classmethod
    async def ensure(cls, server_url: str, token: str = "") -> ServerChild | None:
        """Start a server, or return ``None`` if one answers at ``server_url`` already.

        It gets the defaults and the environment of ``swarm-gateway swarm start`` (``SWARM_ALLOW_CODE_SYNC=true`` if it
        is to take code), ``token`` if there is one, and :func:`run_folder`; its log goes to this process's stderr.

        Raises:
            ConfigError: nothing answers and the address is not this machine's.
            UnavailableError: it ended at once, or did not answer in time.
        """
        http = HttpClient()
        try:
            if await _answers(http, server_url):
                return None
            parts = urlsplit(server_url)
            if not is_loopback(parts.hostname or "") or parts.scheme != "http" or parts.path:
                raise ConfigError(
                    f"nothing answers at {server_url}, and only a server at http://127.0.0.1:PORT can be started from "
                    "here; run `swarm-gateway swarm start` on its machine"
                )
            logger.info("starting a swarm server at %s", server_url)
            port = parts.port or 80
            address = ("--host", str(parts.hostname), "--port", str(port), "--run-dir", run_folder(port))
            environ = {**os.environ, "PYTHONPATH": python_path(), **({"SWARM_TOKEN": token} if token else {})}
            # the child lives as long as its stdin is open: this process's end, even by SIGKILL, closes it
            process = subprocess.Popen(  # noqa: ASYNC220 - takes milliseconds
                [*_COMMAND, *address],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # terminals and notebooks send Ctrl-C to all of this process's group
                start_new_session=True,
                env=environ,
            )
            child = cls(process)
            try:
                await child._wait_until_ready(http, server_url)
            except BaseException:
                child.stop()
                raise
            return child
        finally:
            await http.close()

    def stop(self) -> None:
        """Stop the server and its engine; blocks until they have ended."""
        self.let_go()
        try:
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            logger.error("the swarm server (pid %d) does not stop; it is killed", self._process.pid)
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Close its stdin: it stops once no process holds that open."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    async def _wait_until_ready(self, http: HttpClient, server_url: str) -> None:
        deadline = monotonic() + START_DEADLINE
        while not await _answers(http, server_url):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = await asyncio.to_thread(self._process.wait, _PROBE)
                raise UnavailableError(
                    f"the swarm server for {server_url} ended with code {code}; its reason is on stderr",
                    code="server_unreachable",
                )
            if monotonic() > deadline:
                raise UnavailableError(
                    f"the swarm server did not answer at {server_url} within {START_DEADLINE:g} s",
                    code="server_unreachable",
                )


async def _answers(http: HttpClient, server_url: str) -> bool:
    try:
        return (await http.get(f"{server_url}/health", _HEALTH_SECONDS)).status < 300
    except ConnectionBrokenError:
        return False


_children: WeakSet[ServerChild] = WeakSet()


def _let_go_of_all() -> None:
    for child in list(_children):
        child.let_go()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_let_go_of_all)
