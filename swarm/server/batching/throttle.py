"""Shares of a batch for clients that ask for them: a claim beyond its client's share waits.

Invariant: a client with a policy never begins more tasks than its share of the batch while another client trains; a
task already begun is never delayed, and nobody is delayed for the sake of clients that do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from swarm.job import TrainJob
from swarm.protocol import SwarmThrottlePolicy
from swarm.server.batching.clients import Clients
from swarm.server.batching.shares import Shares

#: seconds without any train episode after which a client may go on whose tasks rest
STALL_SECONDS = 10.0


class Throttle:
    """Decides claims that come with a :class:`SwarmThrottlePolicy`.

    A client's places in the batch are bounded by its ratio of it, rounded up. As a batch has as many places as the
    bounds of its clients add up to (at least, when their ratios add up to 1), each gets its ratio within one task.

    The bound is lifted while no other client trains. If nothing runs at all, a client whose places are taken by tasks
    that rest (it may have given them up) may go on after :data:`STALL_SECONDS`, everyone after ``timeout`` seconds.
    """

    def __init__(
        self, job: TrainJob, shares: Shares, clients: Clients, timeout: float, clock: Callable[[], float]
    ) -> None:
        self._job = job
        self._shares = shares
        self._clients = clients
        self._timeout = timeout
        self._clock = clock
        self._stalled_at: float | None = None

    def refusal(self, client_uuid: str, count: int, policy: SwarmThrottlePolicy) -> str:
        """Why a claim of ``count`` train episodes has to wait, or an empty string."""
        task_id = policy.current_task_id or ""
        repeat = policy.expected_num_repeat or self._job.num_repeat
        if task_id and self._shares.begun(client_uuid, task_id, repeat):
            return ""
        batch = policy.expected_batch_size or self._job.batch_size
        # a ratio is seldom an exact binary fraction: 100 * 0.07 is 7.000000000000001, and its share is 7
        share = max(1, math.ceil(batch * policy.ratio - 1e-9))
        places = self._shares.places(client_uuid)
        # a group larger than the whole share must be possible, or its client would wait for ever
        if not places or self._shares.places(client_uuid, task_id, count) <= share:
            return ""
        if not self._clients.others_train(client_uuid) or self._stalled(client_uuid, share):
            return ""
        return f"throttled: {places} tasks of this client are in the batch, its share is {share} of {batch}"

    def next_lift(self) -> float | None:
        """When a refusal may turn by the passing of time alone."""
        times = [self._clients.next_lapse(), self._shares.next_abandoned()]
        if self._stalled_at is not None and not self._shares.running:
            now = self._clock()
            stalls = (self._stalled_at + min(STALL_SECONDS, self._timeout), self._stalled_at + self._timeout)
            times += [time for time in stalls if time > now]
        return min((time for time in times if time is not None), default=None)

    def _stalled(self, client_uuid: str, share: int) -> bool:
        if self._shares.running:
            return False
        now = self._clock()
        if self._stalled_at is None or self._stalled_at < self._shares.last_change:
            # from the first refusal on, not from the last end: after a weight sync nobody had a chance to claim yet
            self._stalled_at = now
        if self._stalled_at + self._timeout <= now:
            return True
        return self._stalled_at + STALL_SECONDS <= now and self._shares.live_places(client_uuid) < share
