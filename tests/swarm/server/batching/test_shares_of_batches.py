"""Two clients share each batch by their ratios, however different their speeds; a dead one is not waited for."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol import SwarmThrottlePolicy
from swarm.server.batching.collection import Collection
from swarm.tokens import TrainBatch
from tests.swarm.server.batching.conftest import Clock, job, trajectory

CLIENT_TIMEOUT = 300.0
IDLE_TIMEOUT = 240.0
POST_TIMEOUT = 30.0
POLL = 60.0


@dataclass(eq=False)
class Client:
    """Works on ``parallel`` tasks at a time; an episode takes about ``seconds``."""

    name: str
    ratio: float
    seconds: float
    parallel: int
    grouped: bool
    alive: bool = True
    tasks: int = 0
    #: episodes that each begun task still has to finish
    left: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(eq=False)
class Claim:
    client: Client
    task: str
    count: int


@dataclass(eq=False)
class Running:
    """A claimed episode; ``calling`` while its LLM call is in flight."""

    client: Client
    task: str
    calling: bool = True


class Swarm:
    """A server with one engine and its clients, in simulated time."""

    def __init__(self, clients: list[Client], batch_size: int, num_repeat: int, seed: int, failures: float) -> None:
        self.job = job(batch_size=batch_size, num_repeat=num_repeat, max_staleness=None)
        self.clock = Clock(0.0)
        self.collection = Collection(self.job, CLIENT_TIMEOUT, self.clock)
        self.random = random.Random(seed)
        self.failures = failures
        self.clients = clients
        self.rolling = True
        self.running: dict[int, Running] = {}
        self.queue: list[Claim] = []
        self.batches: list[TrainBatch] = []
        self.owner: dict[str, str] = {}
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for client in clients:
            for _ in range(client.parallel):
                self._begin_task(client)
            self._poll(client)

    def run(self, batches: int) -> None:
        """Go on until there are so many batches."""
        self._serve()
        while len(self.batches) < batches:
            times = [time for time in (self.collection.next_change(),) if time is not None]
            if self._events and (not times or self._events[0][0] <= min(times)):
                self.clock.now, _, event = heapq.heappop(self._events)
                event()
            else:
                assert times, "nothing will ever happen again"
                assert min(times) > self.clock.now, "a change that never comes"
                self.clock.now = min(times)
            self._serve()
            if self.rolling and self.collection.ready:
                self._post()

    def kill(self, client: Client) -> None:
        client.alive = False
        self.queue = [claim for claim in self.queue if claim.client is not client]

    def shares(self) -> list[Counter[str]]:
        """How many groups of each client each batch has."""
        return [Counter(group.task_id.split(":")[0] for group in batch.groups) for batch in self.batches]

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now + seconds, next(self._numbers), event))

    def _begin_task(self, client: Client) -> None:
        client.tasks += 1
        task = f"{client.name}:{client.tasks}"
        client.left[task] = self.job.num_repeat
        self._ask(client, task, self.job.num_repeat)

    def _ask(self, client: Client, task: str, episodes: int) -> None:
        self.collection.seen(client.name, train=True, task_hint=task)
        if client.grouped:
            self.queue.append(Claim(client, task, episodes))
        else:
            self.queue += [Claim(client, task, 1) for _ in range(episodes)]

    def _poll(self, client: Client) -> None:
        """A claim that waits is asked again and again."""
        if client.alive:
            for claim in self.queue:
                if claim.client is client:
                    self.collection.seen(client.name, train=True, task_hint=claim.task)
            self._after(POLL, lambda: self._poll(client))

    def _serve(self) -> None:
        if not self.rolling:
            return
        for claim in list(self.queue):
            if len(self.running) + claim.count > self.job.slots:
                return
            policy = SwarmThrottlePolicy(ratio=claim.client.ratio, current_task_id=claim.task)
            if self.collection.admit(claim.client.name, "train", claim.count, policy):
                continue
            self.queue.remove(claim)
            self.collection.claimed(claim.client.name, "train", claim.task, claim.count)
            for _ in range(claim.count):
                number = next(self._numbers)
                self.running[number] = Running(claim.client, claim.task)
                self.collection.begin_call(claim.client.name)
                self._after(claim.client.seconds * self.random.uniform(0.5, 2.0), lambda n=number: self._end(n))

    def _end(self, number: int) -> None:
        episode = self.running.get(number)
        if episode is None:
            return
        client, task = episode.client, episode.task
        self._end_call(episode)
        if not client.alive:
            self._after(IDLE_TIMEOUT, lambda: self._lapse(number))
            return
        del self.running[number]
        if self.random.random() < self.failures:
            self.collection.released(client.name, "train", task, "aborted")
            self._ask(client, task, 1)
            return
        self.collection.released(client.name, "train", task, "ended")
        self.collection.add(client.name, trajectory(task))
        assert self.collection.dropped == 0
        client.left[task] -= 1
        if not client.left[task]:
            self._begin_task(client)

    def _end_call(self, episode: Running) -> None:
        if episode.calling:
            episode.calling = False
            self.collection.end_call(episode.client.name)

    def _lapse(self, number: int) -> None:
        if number in self.running:
            episode = self.running.pop(number)
            self.collection.released(episode.client.name, "train", episode.task, "idle")

    def _post(self) -> None:
        self.rolling = False
        self.collection.follow(False)
        started = self.clock.now

        def leave() -> None:
            if self.running and self.clock.now - started < POST_TIMEOUT:
                self._after(1.0, leave)
                return
            for episode in self.running.values():
                self.collection.released(episode.client.name, "train", episode.task, "engine")
                # as in the server: an episode that is over cancels its call
                self._end_call(episode)
                if episode.client.alive:
                    self._ask(episode.client, episode.task, 1)
            self.running.clear()
            batch = self.collection.take()
            self.batches.append(batch)
            self._after(self.random.uniform(1.0, 20.0), lambda: self._sync(batch))

        leave()

    def _sync(self, batch: TrainBatch) -> None:
        assert self.collection.confirm(batch.batch_id) is batch
        self.collection.advance(len(self.batches))
        self.rolling = True
        self.collection.follow(True)


@st.composite
def swarms(draw: st.DrawFn) -> Swarm:
    batch_size = draw(st.integers(3, 16))
    ratio = draw(st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.6]))
    # from one hundred times faster to one hundred times slower than the other
    speed = 10 ** draw(st.floats(-2.0, 2.0))
    seconds = draw(st.sampled_from([0.5, 5.0]))
    parallel = st.sampled_from([1, 2, batch_size, 3 * batch_size])
    clients = [
        Client("a", ratio, seconds * max(speed, 1.0), draw(parallel), draw(st.booleans())),
        Client("b", 1.0 - ratio, seconds * max(1.0 / speed, 1.0), draw(parallel), draw(st.booleans())),
    ]
    failures = draw(st.sampled_from([0.0, 0.2]))
    return Swarm(clients, batch_size, draw(st.integers(2, 4)), draw(st.integers(0, 2**32)), failures)


@settings(max_examples=40, deadline=None)
@given(swarms())
def test_each_batch_is_shared_by_ratio(swarm: Swarm) -> None:
    check_shares(swarm)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_task_whose_next_episode_waits_long_for_a_slot_counts(seed: int) -> None:
    """The slots are full of episodes that take longer than the time after which a task counts as given up."""
    clients = [Client("a", 0.1, 5.0, 2, True), Client("b", 0.9, 500.0, 3, False)]
    check_shares(Swarm(clients, batch_size=3, num_repeat=2, seed=seed, failures=0.2))


def check_shares(swarm: Swarm) -> None:
    swarm.run(5)
    for share in swarm.shares():
        assert sum(share.values()) == swarm.job.batch_size
        for client in swarm.clients:
            assert abs(share[client.name] - client.ratio * swarm.job.batch_size) <= 1.0, (share, client)


@settings(max_examples=40, deadline=None)
@given(swarms(), st.integers(0, 1), st.integers(0, 2))
def test_a_dead_client_is_not_waited_for_beyond_the_bound(swarm: Swarm, victim: int, before: int) -> None:
    check_a_death(swarm, victim, before)


def test_a_client_that_dies_when_a_batch_cut_off_its_call_is_not_waited_for() -> None:
    clients = [Client("a", 0.1, 0.5, 1, False), Client("b", 0.9, 50.0, 1, False)]
    check_a_death(Swarm(clients, batch_size=5, num_repeat=2, seed=0, failures=0.0), victim=1, before=1)


def check_a_death(swarm: Swarm, victim: int, before: int) -> None:
    """The client number ``victim`` dies after so many batches; the other one must get its batches all the same."""
    swarm.run(before)
    dead, survivor = swarm.clients[victim], swarm.clients[1 - victim]
    died = swarm.clock.now
    swarm.kill(dead)
    swarm.run(before + 1)
    # its episodes are taken back after an idle timeout, then it counts as dead; then the other fills the batch alone
    hung = 2 * dead.seconds + IDLE_TIMEOUT + CLIENT_TIMEOUT
    alone = 100 * survivor.seconds * swarm.job.batch_size * swarm.job.num_repeat
    assert swarm.clock.now - died <= hung + alone + POST_TIMEOUT + 20.0
    swarm.run(before + 6)
    assert swarm.shares()[-1] == {survivor.name: swarm.job.batch_size}
