"""``GET /metrics``: what Prometheus scrapes.

Invariant: everything is read at the scrape, from the parts that have it; the number of time series does not grow with
clients, tasks or episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.http.exposition import counter, counters, exposition, gauge, gauges, histogram, histograms
from swarm.protocol import JournalStatus, ServerStatus
from swarm.server.meters import Meters
from swarm.server.monitor import Monitor
from swarm.states import EngineState


@dataclass(frozen=True)
class MetricsRoutes:
    """``/metrics``."""

    monitor: Monitor

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def metrics(self, request: Request) -> Response:
        return exposition(_server(self.monitor))


def _server(monitor: Monitor) -> Iterator[Metric]:
    """One scrape of one server."""
    status = monitor.status(steps=0, episodes=0)
    yield from _engine(status, monitor.meters)
    yield from _pool(status, monitor)
    yield from _episodes(monitor.meters)
    if status.journal is not None:
        yield from _journal(status.journal)
    yield from _parts(status)
    yield from _requests(monitor.meters)


def _engine(status: ServerStatus, meters: Meters) -> Iterator[Metric]:
    states = ((state.name.lower(), float(state is status.engine.engine_status)) for state in EngineState)
    yield _gauges("swarm_engine_state", "1 for the state that the engine is in", "state", dict(states))
    yield gauge("swarm_engine_state_seconds", "Since the engine entered its state", status.engine_seconds)
    yield gauge("swarm_policy_version", "Step whose weights are served", status.engine.global_step)
    yield counter("swarm_weight_syncs", "Entries into WEIGHT_SYNCING", status.weight_syncs)
    yield histogram("swarm_step_seconds", "Duration of training steps", meters.step_seconds)


def _pool(status: ServerStatus, monitor: Monitor) -> Iterator[Metric]:
    pool = status.pool
    if pool is not None:
        outstanding = monitor.controller.pool.collection.outstanding
        out = sum(len(group.trajectories) for group in outstanding.groups) if outstanding is not None else 0
        episodes = {"running": pool.running_episodes, "waiting": pool.completed_episodes, "in_batch": out}
        yield _gauges("swarm_pool_episodes", "Episodes that run, wait for a batch, or are in one", "state", episodes)
        groups = {"complete": pool.completed_tasks, "all": len(pool.tasks)}
        yield _gauges("swarm_pool_groups", "Groups (tasks) that wait for a batch", "state", groups)
        yield gauge("swarm_pool_slots", "Episodes that may run at once", pool.slots)
        yield gauge("swarm_batch_size", "Groups of a batch", pool.batch_size)
    yield gauge("swarm_claims_waiting", "Claims that wait for episodes", status.waiting_claims)
    yield gauge("swarm_claims_longest_wait_seconds", "Of those", status.longest_wait_seconds)
    yield histogram("swarm_claim_wait_seconds", "From claim to grant", monitor.meters.claim_waits)


def _episodes(meters: Meters) -> Iterator[Metric]:
    yield _counters("swarm_claimed_episodes", "Episodes given out", "type", meters.claims)
    yield _counters("swarm_episodes", "How episodes ended", "outcome", meters.outcomes)
    yield _counters("swarm_quarantined_episodes", "Never to be trained", "reason", meters.quarantined.counts())
    yield _counters(
        "swarm_dropped_episodes",
        "Finished, or given up for a reason: never to be trained",
        "cause",
        meters.dropped.counts(),
    )
    yield counter("swarm_trained_episodes", "Episodes of recorded steps", meters.trained_episodes)
    tokens = {"sampled": meters.sampled_tokens, "trained": meters.trained_tokens}
    yield _counters("swarm_tokens", "Tokens of the policy", "kind", tokens)


def _journal(journal: JournalStatus) -> Iterator[Metric]:
    yield gauge("swarm_journal_pending_records", "Not yet on disk", journal.pending)
    yield gauge("swarm_journal_lag_seconds", "Age of the oldest of those", journal.oldest_pending_seconds)
    yield gauge("swarm_journal_commit_seconds", "Duration of the last commit", journal.last_commit_seconds)
    yield gauge("swarm_journal_bytes", "On disk", journal.bytes)
    yield gauge("swarm_journal_failing", "1 while the disk refuses what is pending", bool(journal.error))
    yield counter("swarm_journal_commits", "Group commits", journal.commits)
    yield counter("swarm_journal_records", "Records written", journal.records)


def _parts(status: ServerStatus) -> Iterator[Metric]:
    active = sum(row.active for row in status.clients)
    clients = {"active": active, "silent": len(status.clients) - active}
    yield _gauges("swarm_clients", "Clients that are remembered", "state", clients)
    healthy = sum(row.healthy for row in status.replicas)
    replicas = {"healthy": healthy, "set_aside": len(status.replicas) - healthy}
    yield _gauges("swarm_replicas", "Replicas of the engine", "state", replicas)
    in_flight = {row.address: row.in_flight for row in status.replicas}
    yield _gauges("swarm_replica_in_flight", "Answers being sampled", "address", in_flight)
    yield _counters("swarm_replica_calls", "Tries", "address", {row.address: row.calls for row in status.replicas})
    failures = {row.address: row.failures for row in status.replicas}
    yield _counters("swarm_replica_failures", "Tries that failed", "address", failures)


def _requests(meters: Meters) -> Iterator[Metric]:
    yield counters("swarm_requests", "Answered requests", ["method", "route", "status"], (
        ((method, route, str(status)), count) for (method, route, status), count in meters.requests.items()
    ))  # fmt: skip
    yield histograms("swarm_request_seconds", "Until the end of the answer", ["route"], {
        (route,): seconds for route, seconds in meters.request_seconds.items()
    })  # fmt: skip


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    return gauges(name, help, [label], (((of,), value) for of, value in values.items()))


def _counters(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    return counters(name, help, [label], (((of,), value) for of, value in values.items()))
