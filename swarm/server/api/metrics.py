"""``GET /metrics``, which Prometheus scrapes, and ``GET /judged_groups``: the latest groups with rewards and reasons.

Invariant: values that other parts keep are read at the scrape, and the number of time series does not grow with
clients, tasks or episodes. What people said is only for the admin scope, and the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.evidence.alarms import ALARMS
from swarm.evidence.learning import finished
from swarm.http.exposition import counter, exposition, gauge
from swarm.judged_groups import JudgedGroups, Wanted
from swarm.measures import EVAL_REWARD, EVAL_SUCCESS, REWARD, SPREAD, SUCCESS, TASKS, TASKS_WITH_SIGNAL
from swarm.server.audit import AuditLog
from swarm.server.auth import ControlRoute
from swarm.server.engine.controller import Controller
from swarm.server.journal.browse import judged_groups
from swarm.server.monitor import Monitor
from swarm.states import EngineState
from swarm.status import JournalStatus, ServerStatus


@dataclass(frozen=True)
class MetricsRoutes:
    """``/metrics``."""

    monitor: Monitor

    def routes(self) -> list[BaseRoute]:
        self.monitor.meters.registry.register(ServerCollector(self.monitor))
        return [ControlRoute("GET", "/metrics", self.metrics, "read", media_types=["text/plain"])]

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return exposition(self.monitor.meters.registry)


class ServerCollector(Collector):
    """The state of one server, read at each scrape."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        status = self._monitor.status(steps=1, episodes=0)
        yield from _engine(status)
        warned = self._monitor.controller.engine.warned
        yield gauge("swarm_engine_warnings", "Warnings of this engine; `/status` tells the latest", warned)
        yield from _learning(status)
        yield from self._pool(status)
        yield counter("swarm_episodes", "How episodes ended", status.outcomes, "outcome")
        yield counter("swarm_quarantined_episodes", "Never to be trained", status.quarantined, "reason")
        yield counter(
            "swarm_dropped_episodes", "Finished, or given up for a reason: never to be trained", status.dropped, "cause"
        )
        if status.journal is not None:
            yield from _journal(status.journal)
        yield from _parts(status)

    def _pool(self, status: ServerStatus) -> Iterator[Metric]:
        pool = status.pool
        if pool is not None:
            episodes = {
                "running": pool.running_episodes,
                "waiting": pool.completed_episodes,
                "in_batch": pool.batched_episodes,
            }
            yield gauge("swarm_pool_episodes", "Episodes that run, wait for a batch, or are in one", episodes, "state")
            groups = {"complete": pool.completed_tasks, "all": len(pool.tasks)}
            yield gauge("swarm_pool_groups", "Groups (tasks) that wait for a batch", groups, "state")
            yield gauge("swarm_pool_slots", "Episodes that may run at once", pool.slots)
            yield gauge("swarm_batch_size", "Groups of a batch", pool.batch_size)
        yield gauge("swarm_claims_waiting", "Claims that wait for episodes", status.waiting_claims)
        yield gauge("swarm_claims_longest_wait_seconds", "Of those", status.longest_wait_seconds)


def _engine(status: ServerStatus) -> Iterator[Metric]:
    states = {state.name.lower(): float(state is status.engine.engine_status) for state in EngineState}
    yield gauge("swarm_engine_state", "1 for the state that the engine is in", states, "state")
    yield gauge("swarm_engine_state_seconds", "Since the engine entered its state", status.engine_seconds)
    yield gauge("swarm_policy_version", "Step whose weights are served", status.engine.global_step)
    yield counter("swarm_weight_syncs", "Entries into WEIGHT_SYNCING", status.weight_syncs)


def _learning(status: ServerStatus) -> Iterator[Metric]:
    """Of the run's last step and last evaluation; a value that it lacks has no series."""
    if status.steps:
        metrics = status.steps[-1].metrics
        for name, about, metric in (
            ("reward_mean", "Mean reward of the episodes of the last training step, in the hook's own units", REWARD),
            ("reward_spread", "Standard deviation of the rewards of the last training step", SPREAD),
            ("success_share", "Share (0 to 1) of successes among the episodes of the last training step", SUCCESS),
        ):
            if metric in metrics:
                yield gauge(f"swarm_step_{name}", about, metrics[metric])
        if metrics.get(TASKS) and TASKS_WITH_SIGNAL in metrics:
            yield gauge(
                "swarm_step_informative_group_share",
                "Share (0 to 1) of the last step's groups that teach: their rewards differ, or they have a credit",
                metrics[TASKS_WITH_SIGNAL] / metrics[TASKS],
            )
    raised = {alarm.kind for alarm in status.alarms}
    alarms = {name: float(name in raised) for name in ALARMS}
    yield gauge("swarm_alarm", "1 while the watch over the training raises the alarm", alarms, "alarm")
    paused = any(alarm.pauses for alarm in status.alarms)
    yield gauge("swarm_training_paused", "1 while training waits for a person because of an alarm", paused)
    if evaluations := finished(status.evaluations):
        last = evaluations[-1]
        yield gauge("swarm_evaluation_step", "Step whose weights the last evaluation tried", last.step)
        yield gauge("swarm_evaluation_episodes", "Episodes of the last evaluation", last.episodes)
        for name, about, metric in (
            ("reward_mean", "Mean reward of the last evaluation, in the hook's own units", EVAL_REWARD),
            ("success_share", "Share (0 to 1) of successes in the last evaluation", EVAL_SUCCESS),
        ):
            if metric in last.metrics:
                yield gauge(f"swarm_evaluation_{name}", about, last.metrics[metric])


def _journal(journal: JournalStatus) -> Iterator[Metric]:
    yield gauge("swarm_journal_pending_records", "Not yet on disk", journal.pending)
    yield gauge("swarm_journal_lag_seconds", "Age of the oldest of those", journal.oldest_pending_seconds)
    yield gauge("swarm_journal_commit_seconds", "Duration of the last commit", journal.last_commit_seconds)
    yield gauge("swarm_journal_bytes", "On disk", journal.bytes)
    yield gauge("swarm_journal_failing", "1 while the disk refuses what is pending", bool(journal.error))
    yield counter("swarm_journal_commits", "Group commits", journal.commits)
    yield counter("swarm_journal_records", "Records written", journal.records)


def _parts(status: ServerStatus) -> Iterator[Metric]:
    clients = {"active": sum(row.active for row in status.clients), "silent": status.silent_clients}
    yield gauge("swarm_clients", "Clients that are remembered", clients, "state")
    replicas = status.replicas
    healthy = sum(row.healthy for row in replicas)
    states = {"healthy": healthy, "set_aside": len(replicas) - healthy}
    yield gauge("swarm_replicas", "Replicas of the engine", states, "state")
    in_flight = {row.address: row.in_flight for row in replicas}
    yield gauge("swarm_replica_in_flight", "Answers being sampled", in_flight, "address")
    yield counter("swarm_replica_calls", "Tries", {row.address: row.calls for row in replicas}, "address")
    failures = {row.address: row.failures for row in replicas}
    yield counter("swarm_replica_failures", "Tries that failed", failures, "address")


@dataclass(frozen=True)
class GroupRoutes:
    """``/judged_groups``."""

    journal: Path
    controller: Controller
    audit: AuditLog

    def routes(self) -> list[BaseRoute]:
        return [ControlRoute("GET", "/judged_groups", self.judged_groups, "admin")]

    async def judged_groups(self, request: Request, query: Wanted) -> JudgedGroups:
        """The latest groups of train episodes that have ended, and a histogram of the rewards of the latest steps."""
        await self.audit.read(request, "groups read", query.model_dump(include={"group", "route", "limit", "tokens"}))
        judged = await asyncio.to_thread(judged_groups, self.journal, query)
        return judged.model_copy(update={"model": self.controller.job.model if self.controller.has_job else ""})
