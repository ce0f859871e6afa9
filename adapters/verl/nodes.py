"""The machines of a run on several nodes: which are there, and which one is gone.

Invariant: a node counts as gone only where nobody takes connections at the port of its raylet (Ray's process on each
node). The kernel takes them for a machine that is merely busy.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.verl.health import HealthWatch, Outcome
from swarm.errors import EngineError

#: seconds for a connection: nothing is computed for it
CONNECT_TIMEOUT = 1.0


def ask_node(address: str) -> tuple[Outcome, str]:
    """Whether a process takes connections at ``host:port``, and what happens else; silence is as bad as a refusal."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return "dead", "refuses connections"
    except OSError as exc:
        return "dead", f"cannot be reached ({type(exc).__name__})"
    return "well", ""


def missing_cluster(address: str) -> str:
    """What keeps a driver from joining the Ray cluster at ``address``; empty where nothing does, or none can tell."""
    if not re.fullmatch(r"[^/]+:\d+", address):
        return ""
    outcome, what = ask_node(address)
    return "" if outcome == "well" else f"the Ray cluster at {address} {what}"


def missing_nodes(nodes: Sequence[Mapping[str, Any]], wanted: int, devices: int) -> str:
    """What a cluster lacks for a run; empty where it lacks nothing.

    Args:
        nodes: as ``ray.nodes()`` tells; Ray takes a while to forget one that died.
        wanted: how many nodes the run needs.
        devices: accelerators (Ray's resource ``GPU``) that each must have.
    """
    able = [
        node["NodeManagerAddress"]
        for node in nodes
        if node["Alive"] and node["Resources"].get("GPU", 0) >= devices and ask_node(raylet(node))[0] == "well"
    ]
    if len(able) >= wanted:
        return ""
    return f"{len(able)} of {wanted} nodes with {devices} accelerator(s) each are there ({', '.join(able) or 'none'})"


def raylet(node: Mapping[str, Any]) -> str:
    """``host:port`` of a node's raylet."""
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"


class NodeWatch:
    """Watches the nodes on which verl placed workers, from then on; does nothing for a run on one node.

    Args:
        wanted: how many nodes the run has.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._watch: HealthWatch | None = None

    def check(self) -> None:
        """Return at once where all nodes are there.

        Raises:
            EngineError: one is gone.
        """
        if self._wanted > 1 and self._watch is None and (raylets := _raylets_of_run(self._wanted)):
            self._watch = HealthWatch(raylets, ask_node, name="node").__enter__()
        if self._watch is not None and self._watch.death:
            raise EngineError(self._watch.death)

    def failing(self) -> str:
        """Which node does not answer now, the likely reason for an error elsewhere; empty if all do."""
        return self._watch.failing() if self._watch is not None else ""


def _raylets_of_run(wanted: int) -> list[str]:
    """``host:port`` of the raylet of each node that verl placed workers on; empty until all are placed.

    Ray's ids of placement groups end with the id of the job that created them.
    """
    import ray

    job = ray.get_runtime_context().get_job_id()
    groups = [group for key, group in ray.util.placement_group_table().items() if key.endswith(job)]
    if len(groups) < wanted or any(group["state"] != "CREATED" for group in groups):
        return []
    used = {node for group in groups for node in group["bundles_to_node_id"].values()}
    return sorted(raylet(node) for node in ray.nodes() if node["NodeID"] in used)
