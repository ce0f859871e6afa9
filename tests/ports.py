"""Ports for servers that are told theirs: they listen there later than the test chooses it, or again after a kill."""

from __future__ import annotations

import socket

from swarm.http import serve


def free_ports(count: int) -> list[int]:
    """So many ports of loopback at which nobody listens, and which nobody else takes while this process lives: the
    system gives none of them out, and other tests see by UDP, whose port of that number is held, that it is taken.
    """
    ports: list[int] = []
    for port in serve.free_ports():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mark:
            try:
                mark.bind(("127.0.0.1", port))
            except OSError:
                continue
            # it stays open until the process ends
            mark.detach()
        ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"there are no {count} free ports")
