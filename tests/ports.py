"""Ports for servers that are told theirs: they listen there later than the test chooses it, or again after a kill."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from swarm.errors import ConfigError
from swarm.http.serve import bind

#: What the system gives to connections, and to whoever listens at port 0.
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """So many ports of loopback at which nobody listens, and which nobody else takes while this process lives: the
    system gives none of them out, and other tests see by UDP, whose port of that number is held, that it is taken.
    """
    first, last = map(int, _GIVEN_OUT.read_text().split()) if _GIVEN_OUT.exists() else (32_768, 60_999)
    candidates = [port for port in range(20_000, 65_536) if not first <= port <= last] or range(20_000, 65_536)
    ports: list[int] = []
    # of a generator of its own: Hypothesis seeds the usual one
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(ports) == count:
            return ports
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mark:
            try:
                mark.bind(("127.0.0.1", port))
                bind("127.0.0.1", port).close()
            except (OSError, ConfigError):
                continue
            # it stays open until the process ends
            mark.detach()
        ports.append(port)
    raise AssertionError(f"there are no {count} free ports")
