"""Ray nodes of a test: each a raylet of its own, started with ``ray start`` and killed as machines die.

All are on this machine and differ in their addresses, 127.0.0.2 and on: Ray replaces 127.0.0.1 by an address that other
machines see.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Self

import psutil

from tests.engine.engine_process import processes_with

MARK = "SWARM_TEST_NODE"
START_SECONDS = 120.0
#: bytes; batches travel through it, weights do not
OBJECT_STORE = 128 * 2**20
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ray's own niceness is 15, where the rest of the machine starves trainer and vLLM
    "RAY_worker_niceness": "0",
}


class RayNode:
    """One node: its raylet and all that it starts carry a mark in their environment.

    Args:
        address: of the node, in 127.0.0.0/8.
        head: ``host:port`` of the head; without one, this node is it.
    """

    def __init__(self, address: str, head: str = "") -> None:
        self.address = address
        self.head = head
        self._mark = ""
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))

    def command(self) -> list[str]:
        """``ray start`` of this node."""
        ray = str(Path(sys.executable).with_name("ray"))
        where = ["--head", "--port", self.head.rpartition(":")[2]] if self._is_head else ["--address", self.head]
        return [
            *(ray, "start", *where, "--node-ip-address", self.address),
            *("--num-cpus", "16", "--num-gpus", "1", "--object-store-memory", str(OBJECT_STORE)),
            # two nodes on one machine must not share files or ranges of ports
            *("--temp-dir", str(self._folder), "--min-worker-port", "0", "--max-worker-port", "0"),
            *(("--include-dashboard", "false") if self._is_head else ()),
        ]

    def start(self) -> None:
        """Start the node; returns once it has joined the cluster."""
        self._is_head = not self.head or self.head.startswith(f"{self.address}:")
        if not self.head:
            with socket.create_server((self.address, 0)) as free:
                self.head = f"{self.address}:{free.getsockname()[1]}"
        self._mark = uuid.uuid4().hex
        subprocess.run(
            self.command(),
            env={**os.environ, **ENVIRONMENT, MARK: self._mark},
            timeout=START_SECONDS,
            check=True,
            # Ray puts the working directory on its workers' path
            cwd=self._folder,
        )

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to the raylet and everything that it started, at once; they are gone when this returns."""
        victims = processes_with(MARK, self._mark)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=30)
        return victims

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
