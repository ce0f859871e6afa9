"""Whether vLLM can sample before it is announced; and whether it is alive while the trainer waits for a batch: asks
each replica's ``GET /health`` from a thread.

Invariant: a replica that is merely slow is not called dead; one that refuses, or says that its engine died, soon is.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Self

#: seconds between two rounds, and for one answer
INTERVAL = 1.0
ANSWER_TIMEOUT = 2.0
#: seconds of nothing but failures until a replica is dead: where it refuses connections or answers 5xx, and where it
#: does not answer, which a busy machine may bring about
DEAD_AFTER = 4.0
SILENT_AFTER = 60.0
#: seconds for the first token of all: vLLM may compile what it needs for it
FIRST_TOKEN = 300.0

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
    """Watches the replicas at ``addresses`` inside a ``with`` block; the thread ends with the block.

    Args:
        addresses: ``host:port`` of each replica's HTTP server, which must be serving already.
        ask: how one replica is.
        clock: monotonic seconds.
        name: what there is at an address, for people.
    """

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
