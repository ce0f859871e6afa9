"""Whether vLLM can sample before it is announced; whether it is alive while the trainer waits for a batch, by each
replica's ``GET /health``; and which machines of a run on several nodes are there.

Invariant: a replica that is merely slow is not called dead; one that refuses, or says that its engine died, soon is. A
node is gone only where nobody takes connections at the port of its raylet (Ray's process on each node): the kernel
takes them for a machine that is merely busy.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from swarm.errors import EngineError

#: seconds between two rounds, and for one answer
INTERVAL = 1.0
ANSWER_TIMEOUT = 2.0
#: seconds of nothing but failures until a replica is dead: where it refuses connections or answers 5xx, and where it
#: does not answer, which a busy machine may bring about
DEAD_AFTER = 4.0
SILENT_AFTER = 60.0
#: seconds for the first token of all: vLLM may compile what it needs for it
FIRST_TOKEN = 300.0
#: seconds for a connection to a raylet: nothing is computed for it
CONNECT_TIMEOUT = 1.0

Outcome = Literal["well", "dead", "silent"]


def ask(address: str) -> tuple[Outcome, str]:
    """How the replica at ``host:port`` is, and what it did."""
    connection = http.client.HTTPConnection(address, timeout=ANSWER_TIMEOUT)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except ConnectionRefusedError:
        return "dead", "refuses connections"
    except (OSError, http.client.HTTPException) as exc:
        return "silent", f"does not answer ({type(exc).__name__})"
    finally:
        connection.close()
    # vLLM answers 503 once its engine process is gone
    return ("dead", f"answers {status} to /health") if status >= 500 else ("well", "")


def sample_token(address: str, model: str, timeout: float = FIRST_TOKEN) -> str:
    """Have the replica at ``host:port`` sample one token as it will for users; why it cannot, or an empty string."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 1.0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as exc:
        return f"did not answer a first prompt ({type(exc).__name__})"
    finally:
        connection.close()
    return "" if answer.status == 200 else f"answered {answer.status} to a first prompt: {content[:500]}"


class _Replica:
    """The failures of one replica, or of whatever else answers at ``name``'s address, since it was last well."""

    def __init__(self, name: str, address: str) -> None:
        self.address = address
        self.name = name
        self._since: dict[Outcome, float] = {}

    def note(self, outcome: Outcome, what: str, now: float) -> str:
        """Record an outcome; why the replica is to be given up, or an empty string."""
        if outcome == "well":
            self._since.clear()
            return ""
        if outcome == "silent":
            # not a sign of death: refusals must be in a row
            self._since.pop("dead", None)
        began = self._since.setdefault(outcome, now)
        # refusals are failures to answer, too
        self._since.setdefault("silent", now)
        if now - began < (DEAD_AFTER if outcome == "dead" else SILENT_AFTER):
            return ""
        return f"the {self.name} at {self.address} {what} for {now - began:.0f} s"


class HealthWatch:
    """Watches the replicas at ``addresses`` (``host:port``), which must be serving already, inside a ``with`` block:
    its thread ends with that. ``name`` tells people what there is at an address."""

    def __init__(
        self,
        addresses: Sequence[str],
        ask: Callable[[str], tuple[Outcome, str]] = ask,
        clock: Callable[[], float] = time.monotonic,
        name: str = "replica",
    ) -> None:
        self._replicas = [_Replica(name, address) for address in addresses]
        self._ask = ask
        self._clock = clock
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-health", daemon=True)
        #: why vLLM is given up; empty as long as it is not
        self.death = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # not joined: an answer may take its whole timeout, and nobody waits for what it says
        self._done.set()

    def _run(self) -> None:
        while not self._done.wait(INTERVAL) and not self.death:
            self.check()

    def check(self) -> None:
        """Ask every replica once."""
        for replica in self._replicas:
            outcome, what = self._ask(replica.address)
            self.death = self.death or replica.note(outcome, what, self._clock())

    def failing(self) -> str:
        """What is wrong with one that does not answer well now; empty if all do."""
        for replica in self._replicas:
            outcome, what = self._ask(replica.address)
            if outcome != "well":
                return f"the {replica.name} at {replica.address} {what}"
        return ""


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
    """Watches the nodes on which verl placed workers, from then on; does nothing for a run on one node."""

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
