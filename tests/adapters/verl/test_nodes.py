"""Which nodes of a cluster are there, and which one is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from adapters.verl import nodes
from adapters.verl.health import DEAD_AFTER, INTERVAL, HealthWatch
from adapters.verl.nodes import CONNECT_TIMEOUT, NodeWatch, ask_node, missing_cluster, missing_nodes
from swarm.errors import EngineError


@pytest.fixture
def raylet() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def address(raylet: socket.socket) -> str:
    return f"127.0.0.1:{raylet.getsockname()[1]}"


def node(raylet: socket.socket, **changes: Any) -> dict[str, Any]:
    here = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
    return {**here, "Alive": True, "Resources": {"GPU": 1.0, "CPU": 4.0}, **changes}


def test_a_node_whose_raylet_is_killed_is_gone_and_a_busy_one_is_not(raylet: socket.socket) -> None:
    # nobody accepts what the kernel has taken
    assert ask_node(address(raylet)) == ("well", "")
    clock = iter(range(100))
    watch = HealthWatch([address(raylet)], ask_node, clock=lambda: float(next(clock)), name="node")
    watch.check()
    assert not watch.death and not watch.failing()
    gone = address(raylet)
    raylet.close()
    assert watch.failing() == f"the node at {gone} refuses connections"
    while not watch.death:
        watch.check()
    assert watch.death.startswith(f"the node at {gone} refuses connections for ")


def test_a_node_is_missed_within_ten_seconds_whether_it_refuses_or_is_silent() -> None:
    rounds = 2 + DEAD_AFTER // (INTERVAL + CONNECT_TIMEOUT)
    assert rounds * (INTERVAL + CONNECT_TIMEOUT) < 9.5


def test_a_run_on_several_nodes_is_watched_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[list[str]] = [[], ["10.0.0.2:1"]]
    monkeypatch.setattr(nodes, "_raylets_of_run", lambda wanted: known.pop(0))
    started: list[HealthWatch] = []
    monkeypatch.setattr(HealthWatch, "__enter__", lambda self: started.append(self) or self)
    NodeWatch(1).check()
    watch = NodeWatch(2)
    watch.check()
    assert not watch.failing() and not started
    watch.check()
    watch.check()
    assert len(started) == 1 and not known
    started[0].death = "the node at 10.0.0.2:1 cannot be reached"
    with pytest.raises(EngineError, match=started[0].death):
        watch.check()


def test_a_run_waits_for_its_cluster_and_for_nodes_with_room(raylet: socket.socket) -> None:
    assert not missing_cluster(address(raylet))
    assert not missing_cluster("auto"), "Ray finds it"
    with socket.create_server(("127.0.0.1", 0)) as other:
        both = [node(raylet), node(other)]
        assert not missing_nodes(both, wanted=2, devices=1)
        assert missing_nodes(both, wanted=2, devices=2).startswith("0 of 2 nodes with 2 accelerator(s)")
        assert missing_nodes([node(raylet), node(other, Resources={"CPU": 4.0})], 2, 1).startswith("1 of 2")
        assert missing_nodes([node(raylet), node(other, Alive=False)], 2, 1).startswith("1 of 2")
    assert missing_nodes(both, 2, 1).startswith("1 of 2"), "Ray does not know yet that it died"
    assert missing_cluster(f"127.0.0.1:{both[1]['NodeManagerPort']}").endswith("refuses connections")
