"""How many groups of the current batch each client's train episodes make, and which claims must wait for that.

Invariant: a client's groups are its whole ones that wait, plus one for each ``num_repeat`` episodes, begun, of each
task that it has running or resting. A client with a policy never begins more tasks than its share of the batch while
another client trains; a task already begun is never delayed, and nobody is delayed for clients that do nothing.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.job import TrainJob
from swarm.protocol import THROTTLED, SwarmThrottlePolicy
from swarm.server.batching.clients import Clients
from swarm.status import ClientRow

#: fields of a client that its row shows as they are
_SHOWN = ("claimed", "ended", "aborted", "timed_out", "trained", "dropped", "throttled", "takes_part", "agreed")
#: seconds without any train episode after which a client whose tasks rest may continue
STALL_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class _Task:
    running: int = 0
    waiting: int = 0
    #: nothing of it has run for so long that nobody counts on its completion
    abandoned: bool = False

    @property
    def episodes(self) -> int:
        return self.running + self.waiting

    @property
    def counted(self) -> int:
        """Its episodes that make groups."""
        return 0 if self.abandoned else self.running + self.waiting


@dataclass(eq=False, slots=True)
class _Share:
    tasks: dict[str, _Task] = field(default_factory=dict[str, _Task])
    running: int = 0
    unhinted: int = 0
    waiting: int = 0
    whole_groups: int = 0
    #: over tasks that are not abandoned: groups, episodes, and how many of the tasks rest
    begun_groups: int = 0
    episodes: int = 0
    resting: int = 0


class Shares:
    """Running and waiting train episodes by client and task.

    A task rests while its client has finished episodes of an incomplete group but none running; after ``timeout``
    seconds in which nobody asks for another it is abandoned and makes no group any more. Episodes claimed without a
    task hint count as if they filled up the tasks begun before they begin new ones.
    """

    def __init__(self, num_repeat: int, timeout: float, clock: Callable[[], float]) -> None:
        self._num_repeat = num_repeat
        self._timeout = timeout
        self._clock = clock
        self._shares: dict[str, _Share] = {}
        self._resting: OrderedDict[tuple[str, str], float] = OrderedDict()
        #: train episodes claimed now, and when one was last claimed or ended
        self.running = 0
        self.last_change = clock()

    # ------------------------------------------------------------------ what happens

    def asked(self, client: str, task_id: str) -> None:
        """The client asks for episodes of the task, and may have to wait for slots: it has not given the task up."""
        share = self._shares.get(client)
        if share is not None and task_id in share.tasks:
            self._change(client, share, task_id)

    def claimed(self, client: str, task_id: str, count: int) -> None:
        """``count`` episodes run; ``task_id`` is empty if the client did not tell it."""
        share = self._shares.setdefault(client, _Share())
        share.running += count
        self.running += count
        self.last_change = self._clock()
        if task_id:
            self._change(client, share, task_id, running=count)
        else:
            share.unhinted += count

    def released(self, client: str, task_id: str) -> None:
        """One of them does not run any more."""
        share = self._shares[client]
        share.running -= 1
        self.running -= 1
        self.last_change = self._clock()
        if task_id:
            self._change(client, share, task_id, running=-1)
        else:
            share.unhinted -= 1
        self._tidy(client, share)

    def joined(self, client: str, task_id: str) -> None:
        """A finished episode waits in an incomplete group."""
        share = self._shares.setdefault(client, _Share())
        share.waiting += 1
        self._change(client, share, task_id, waiting=1)

    def parted(self, clients: Iterable[str], task_id: str) -> None:
        """Stop counting one waiting episode for each of ``clients``: it was dropped, was put into a batch, or completed
        its group."""
        for client, members in Counter(clients).items():
            share = self._shares[client]
            share.waiting -= members
            self._change(client, share, task_id, waiting=-members)
            self._tidy(client, share)

    def completed(self, clients: Iterable[str]) -> None:
        """A whole group with members of these clients waits."""
        for client, members in Counter(clients).items():
            share = self._shares.setdefault(client, _Share())
            share.waiting += members
            share.whole_groups += 1

    def left(self, clients: Iterable[str]) -> None:
        """It was taken or dropped."""
        for client, members in Counter(clients).items():
            share = self._shares[client]
            share.waiting -= members
            share.whole_groups -= 1
            self._tidy(client, share)

    # ------------------------------------------------------------------ what is

    def group_count(self, client: str, task_id: str = "", count: int = 0) -> int:
        """Groups of the client in the current batch, were ``count`` more episodes of the task claimed now."""
        share = self._current(client)
        groups, episodes = share.begun_groups, share.episodes + share.unhinted + count
        if task_id and count:
            task = share.tasks.get(task_id) or _Task()
            groups += self._size(task.episodes + count) - (0 if task.abandoned else self._size(task.episodes))
            # an abandoned task that is taken up again counts again
            episodes += task.episodes if task.abandoned else 0
        return share.whole_groups + max(groups, self._size(episodes))

    def live_groups(self, client: str) -> int:
        """The same without tasks that rest: what a batch can count on."""
        return self.group_count(client) - self._current(client).resting

    def begun(self, client: str, task_id: str, num_repeat: int) -> bool:
        """Whether the client has episodes of this task in an incomplete group, fewer than ``num_repeat``."""
        task = self._current(client).tasks.get(task_id)
        return task is not None and task.episodes < num_repeat

    def running_of(self, client: str) -> int:
        return self._current(client).running

    def waiting_of(self, client: str) -> int:
        """Finished episodes of the client that wait for a batch."""
        return self._current(client).waiting

    def next_abandoned(self) -> float | None:
        """When the next task counts as abandoned."""
        self._abandon()
        first = next(iter(self._resting.values()), None)
        return None if first is None else first + self._timeout

    def _size(self, episodes: int) -> int:
        return -(-episodes // self._num_repeat)

    def _current(self, client: str) -> _Share:
        self._abandon()
        return self._shares.get(client) or _Share()

    def _change(self, client: str, share: _Share, task_id: str, *, running: int = 0, waiting: int = 0) -> None:
        self._abandon()
        task = share.tasks.get(task_id)
        if task is None:
            task = share.tasks[task_id] = _Task()
        before = task.counted
        if self._resting.pop((client, task_id), None) is not None:
            share.resting -= 1
        task.running += running
        task.waiting += waiting
        # a group that shrinks is no sign of life of its task
        task.abandoned = task.abandoned and waiting < 0
        after = task.counted
        share.begun_groups += self._size(after) - self._size(before)
        share.episodes += after - before
        if not (task.running or task.waiting):
            del share.tasks[task_id]
        elif not task.running and not task.abandoned:
            self._resting[client, task_id] = self._clock()
            share.resting += 1

    def _abandon(self) -> None:
        if not self._resting:
            return
        now = self._clock()
        while self._resting:
            (client, task_id), since = next(iter(self._resting.items()))
            # the same sum as in next_abandoned: a difference may round so that the time told there is too early
            if since + self._timeout > now:
                return
            del self._resting[client, task_id]
            share = self._shares[client]
            task = share.tasks[task_id]
            share.begun_groups -= self._size(task.counted)
            share.episodes -= task.counted
            task.abandoned = True
            share.resting -= 1

    def _tidy(self, client: str, share: _Share) -> None:
        if not (share.running or share.waiting or share.tasks):
            del self._shares[client]


class Throttle:
    """Decides claims that come with a :class:`SwarmThrottlePolicy`.

    A client's groups in the batch are bounded by its ratio of it, rounded up. As a batch has as many groups as the
    bounds of its clients add up to (at least, when their ratios add up to 1), each gets its ratio within one task.

    The bound is lifted while no other client trains. If nothing runs at all, a client whose groups are those of resting
    tasks (it may have given them up) may continue after :data:`STALL_SECONDS`, everyone after ``timeout`` seconds.
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
        groups = self._shares.group_count(client_uuid)
        # a group larger than the whole share must be possible, or its client would wait forever
        if not groups or self._shares.group_count(client_uuid, task_id, count) <= share:
            return ""
        if not self._clients.others_train(client_uuid) or self._stalled(client_uuid, share):
            return ""
        return f"{THROTTLED}: {groups} tasks of this client are in the batch, its share is {share} of {batch}"

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
            # counted from the first refusal, not from the last end: nobody could claim during a weight sync
            self._stalled_at = now
        if self._stalled_at + self._timeout <= now:
            return True
        return self._stalled_at + STALL_SECONDS <= now and self._shares.live_groups(client_uuid) < share


def client_rows(clients: Clients, shares: Shares, now: float) -> list[ClientRow]:
    """One row for each of :meth:`Clients.rows`."""
    return [
        ClientRow(
            client_uuid=name,
            active=clients.is_active(name),
            idle_seconds=0.0 if client.in_flight else now - client.last_seen,
            running=shares.running_of(name),
            waiting=shares.waiting_of(name),
            groups=shares.group_count(name),
            **{shown: getattr(client, shown) for shown in _SHOWN},
        )
        for name, client in clients.rows()
    ]
