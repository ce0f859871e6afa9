"""Binding a port: what cannot be bound is one clear line."""

from __future__ import annotations

import socket

import pytest

from swarm.errors import ConfigError
from swarm.http.serve import bind, run_app


def test_port_zero_takes_a_free_one_and_listens() -> None:
    with bind("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()[:2], timeout=5):
        assert sock.getsockname()[1] > 0
        assert sock.proto == socket.IPPROTO_TCP, "or every answer waits 40 ms for an ACK"


def test_a_port_in_use_is_said() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use") as error:
            bind("127.0.0.1", port)
    assert error.value.code == "port_in_use"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 64 + ".invalid"])
def test_a_host_of_another_machine_is_said(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind(host, 0)


def test_an_app_that_fails_to_start_is_said() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(ConfigError, match="did not start"):
        run_app(broken, bind("127.0.0.1", 0), log_level="critical")
