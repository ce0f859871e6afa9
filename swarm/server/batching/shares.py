"""How many places each client's train episodes take, or will take, in the current batch.

Invariant: a client's places are its whole groups that wait, plus one for each ``num_repeat`` episodes, begun, of each
task that it has running or resting; counts are kept per event, so asking costs the same however much there is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


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
        """Its episodes that take places."""
        return 0 if self.abandoned else self.running + self.waiting


@dataclass(eq=False, slots=True)
class _Share:
    tasks: dict[str, _Task] = field(default_factory=dict[str, _Task])
    running: int = 0
    unhinted: int = 0
    waiting: int = 0
    whole_groups: int = 0
    #: over tasks that are not abandoned: places, episodes, and how many of the tasks rest
    places: int = 0
    episodes: int = 0
    resting: int = 0


class Shares:
    """Running and waiting train episodes by client and task.

    A task rests while its client has finished episodes of an incomplete group but none running; after ``timeout``
    seconds of that it is abandoned and takes no place any more. Episodes claimed without a task hint count as if they
    filled up the tasks begun before they begin new ones.
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
        """Those of these clients do not: they were dropped or taken, or the group is complete."""
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

    def places(self, client: str, task_id: str = "", count: int = 0) -> int:
        """Places of the client in the current batch, were ``count`` more episodes of the task claimed now."""
        share = self._current(client)
        places, episodes = share.places, share.episodes + share.unhinted + count
        if task_id and count:
            task = share.tasks.get(task_id) or _Task()
            places += self._size(task.episodes + count) - (0 if task.abandoned else self._size(task.episodes))
            # an abandoned task that is taken up again counts again
            episodes += task.episodes if task.abandoned else 0
        return share.whole_groups + max(places, self._size(episodes))

    def live_places(self, client: str) -> int:
        """The same without tasks that rest: what a batch can count on."""
        return self.places(client) - self._current(client).resting

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

    # ------------------------------------------------------------------ inside

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
        share.places += self._size(after) - self._size(before)
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
            share.places -= self._size(task.counted)
            share.episodes -= task.counted
            task.abandoned = True
            share.resting -= 1

    def _tidy(self, client: str, share: _Share) -> None:
        if not (share.running or share.waiting or share.tasks):
            del self._shares[client]
