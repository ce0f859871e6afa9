"""Whatever happens in whatever order, the collection is what a naive model says, for all five methods."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swarm.errors import StateError
from swarm.job import CollectionMethod
from swarm.protocol import EpisodeType
from swarm.server.batching.collection import Collection
from swarm.server.journal.rows import BatchRow, EndedHow, GroupRow, JournalRow, Recovered, StateRow
from swarm.states import EpisodeState
from swarm.tokens import TrainBatch
from tests.swarm.server.batching.conftest import Clock, job, trajectory

TIMEOUT = 100.0
CLIENTS = ["ann", "bob", "cy"]
TASKS = ["t1", "t2", "t3", "t4"]
REWARDS = [0.0, 1.0]
LAGS = st.sampled_from([0, 0, 0, 0, 0, 1, 2, -1])
LOST = st.sampled_from([False] * 9 + [True])


@dataclass(eq=False)
class Finished:
    """A finished episode as the model knows it."""

    name: str
    client: str
    task: str
    reward: float
    version: int


@dataclass(eq=False)
class ModelGroup:
    task: str
    begun_at: int
    version: int
    opened_at: int = 0
    members: list[Finished] = field(default_factory=list[Finished])
    lost: int = 0


class CollectionMachine(RuleBasedStateMachine):
    """Keeps flat lists and counts them anew each time."""

    method: CollectionMethod

    @initialize(size=st.integers(1, 3), repeat=st.integers(2, 3), stale=st.sampled_from([None, None, 0, 1]))
    def begin(self, size: int, repeat: int, stale: int | None) -> None:
        self.job = job(
            batch_size=size,
            num_repeat=repeat,
            collection=self.method,
            max_staleness=stale,
            max_cached_episodes=1,
            batch_attempts=2,
        )
        self.clock = Clock()
        self.collection = Collection(self.job, TIMEOUT, self.clock, self.append)
        self.whole_only = self.method in ("finish_enough_tasks", "finish_enough_non_dummy_tasks")
        self.by_agreement = self.method.endswith("agree_sync_weight")
        self.bound = 2 * size * repeat
        self.version = 0
        self.moment = 0
        self.episode = 0
        self.running: list[tuple[str, EpisodeType, str]] = []
        self.open: list[ModelGroup] = []
        self.whole: list[ModelGroup] = []
        self.out: TrainBatch | None = None
        self.back = False
        self.attempts = 0
        self.trained: list[str] = []
        self.gone: list[str] = []
        self.batches: list[str] = []
        self.agreed: set[str] = set()
        self.taking_part: set[str] = set()
        self.forced = False
        self.signs: dict[str, float] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        #: what the journal was told of groups that lack members
        self.losses: dict[str, GroupRow] = {}
        self.rows: list[JournalRow] = []
        self.clients_of: dict[str, str] = {}

    # ------------------------------------------------------------------ the model

    def waiting(self) -> list[Finished]:
        return [one for group in (*self.whole, *self.open) for one in group.members]

    def trainable(self) -> list[ModelGroup]:
        """Groups of at least two, oldest first."""
        groups = [group for group in (*self.whole, *self.open) if len(group.members) >= 2]
        return sorted(groups, key=lambda group: group.begun_at)

    def active(self) -> set[str]:
        return {client for client, sign in self.signs.items() if sign + TIMEOUT > self.clock.now}

    def is_ready(self) -> bool:
        if self.out is not None:
            return self.back
        return self.is_enough(len(self.whole), sum(len(group.members) for group in self.trainable()))

    def is_full(self) -> bool:
        """Whether what lasts until after the next version makes a batch, or fills all of them with what runs."""
        self.version += 1
        whole = [group for group in self.whole if not any(map(self.is_old, group.members))]
        kept = [sum(not self.is_old(one) for one in group.members) for group in self.open]
        self.version -= 1
        episodes = sum(len(group.members) for group in whole) + sum(count for count in kept if count >= 2)
        if self.is_enough(len(whole), episodes):
            return True
        if (batches := self.job.max_staleness) is None or self.by_agreement:
            return False
        young = sum(len(group.members) for group in whole) + sum(kept)
        running = sum(kind == "train" for _, kind, _ in self.running)
        return young + running >= batches * self.job.batch_size * self.job.num_repeat

    def is_enough(self, whole: int, episodes: int) -> bool:
        match self.method:
            case "finish_enough_tasks" | "finish_enough_non_dummy_tasks":
                return whole >= self.job.batch_size
            case "finish_enough_episodes":
                return episodes >= self.job.batch_size * self.job.num_repeat
            case "any_client_agree_sync_weight":
                return episodes > 0 and (bool(self.agreed) or self.forced)
            case "all_clients_agree_sync_weight":
                awaited = self.active() & self.taking_part
                return episodes > 0 and ((bool(self.agreed) and awaited <= self.agreed) or self.forced)

    def expected_groups(self) -> list[ModelGroup]:
        if self.whole_only:
            return self.whole[: self.job.batch_size]
        if self.by_agreement:
            return self.trainable()
        chosen: list[ModelGroup] = []
        for group in self.trainable():
            if sum(len(one.members) for one in chosen) < self.job.batch_size * self.job.num_repeat:
                chosen.append(group)
        return chosen

    def is_old(self, one: Finished) -> bool:
        return self.job.max_staleness is not None and self.version - one.version > self.job.max_staleness

    def model_add(self, one: Finished) -> list[str]:
        """Put a finished episode in its place; the names that are dropped by that."""
        if self.is_old(one):
            return [one.name]
        group = self.group(one.task)
        if not group.members:
            self.moment += 1
            group.opened_at = self.moment
        group.members.append(one)
        return self.settle(group)

    def group(self, task: str) -> ModelGroup:
        for group in self.open:
            if group.task == task:
                return group
        self.moment += 1
        self.open.append(ModelGroup(task, self.moment, self.version))
        return self.open[-1]

    def settle(self, group: ModelGroup) -> list[str]:
        if len(group.members) + group.lost < self.job.num_repeat:
            return []
        self.open.remove(group)
        dummy = len({one.reward for one in group.members}) < 2 and self.method == "finish_enough_non_dummy_tasks"
        if group.lost or dummy:
            return [one.name for one in group.members]
        self.whole.append(group)
        return []

    def check_dropped(self, expected: list[str]) -> None:
        """What the rows since the last look drop is what the model expects."""
        rows, self.rows = self.rows, []
        dropped = [row for row in rows if isinstance(row, StateRow) and row.state is EpisodeState.DROPPED]
        assert all(row.episode_uuids and row.reason for row in dropped)
        assert sorted(name for row in dropped for name in row.episode_uuids) == sorted(expected)
        for name in expected:
            self.counts[self.clients_of[name], "dropped"] += 1
        self.gone += expected

    def append(self, *rows: JournalRow) -> None:
        """What the journal gets."""
        self.rows += rows
        for row in rows:
            if isinstance(row, GroupRow):
                self.losses[row.task_id] = row
                if not row.lost:
                    del self.losses[row.task_id]

    # ------------------------------------------------------------------ claims and ends

    @rule(
        client=st.sampled_from(CLIENTS),
        count=st.integers(1, 4),
        task=st.sampled_from(["", *TASKS]),
        train=st.booleans(),
    )
    def claim(self, client: str, count: int, task: str, train: bool) -> None:
        self.try_claim(client, count, task, train)

    @rule(
        client=st.sampled_from(CLIENTS),
        ends=st.lists(st.tuples(st.sampled_from(TASKS), st.sampled_from(REWARDS), LAGS, LOST), min_size=4, max_size=12),
    )
    def work(self, client: str, ends: list[tuple[str, float, int, bool]]) -> None:
        """One episode after the other, as long as the server gives them."""
        for task, reward, lag, lost in ends:
            if not self.try_claim(client, 1, task, train=True):
                return
            self.end(len(self.running) - 1, task, reward, lag, lost)

    def try_claim(self, client: str, count: int, task: str, train: bool) -> bool:
        episode_type: EpisodeType = "train" if train else "eval"
        self.collection.seen(client, train=train)
        self.signs[client] = self.clock.now
        if len(self.running) + count > self.job.slots:
            return False
        busy = sum(kind == "train" for _, kind, _ in self.running)
        full = train and len(self.waiting()) + busy + count > self.bound
        expected: list[str] = []
        waits = full and (self.is_ready() or self.out is not None)
        if full and not waits:
            trainable = sum(len(group.members) for group in self.trainable())
            if self.by_agreement and trainable >= self.job.batch_size * self.job.num_repeat:
                self.forced = waits = True
            while not waits and len(self.waiting()) + busy + count > self.bound:
                worthless = [g for g in self.open if g.members and (self.whole_only or len(g.members) == 1)]
                oldest = min(worthless, key=lambda group: group.opened_at)
                self.open.remove(oldest)
                expected += [one.name for one in oldest.members]
        reason = self.collection.admit(client, episode_type, count, None)
        self.check_dropped(expected)
        assert (reason == "") == (not waits)
        if waits:
            assert self.collection.ready or self.collection.outstanding, "it waits for nothing"
            return False
        self.collection.claimed(client, episode_type, task, count)
        self.running += [(client, episode_type, task)] * count
        self.counts[client, "claimed"] += count
        return True

    @staticmethod
    def order(name: str) -> int:
        return int(name.removeprefix("e"))

    def release(self, which: int, how: EndedHow) -> tuple[str, EpisodeType, str]:
        client, episode_type, hint = self.running.pop(which % len(self.running))
        self.collection.released(client, episode_type, hint, how)
        if how in ("ended", "aborted"):
            self.signs[client] = self.clock.now
            self.taking_part |= {client} if episode_type == "train" else set()
        self.counts[client, {"idle": "timed_out", "capped": "timed_out"}.get(how, how)] += 1
        return client, episode_type, hint

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 99),
        task=st.sampled_from(TASKS),
        reward=st.sampled_from(REWARDS),
        lag=LAGS,
        lost=LOST,
    )
    def end(self, which: int, task: str, reward: float, lag: int, lost: bool) -> None:
        client, episode_type, hint = self.release(which, "ended")
        task = hint or task
        if episode_type == "eval":
            return
        if lost:
            expected: list[str] = []
            if self.whole_only:
                group = self.group(task)
                group.lost += 1
                expected = self.settle(group)
            self.collection.lose(task)
            self.check_dropped(expected)
            return
        self.episode += 1
        one = Finished(f"e{self.episode}", client, task, reward, self.version - lag)
        self.clients_of[one.name] = client
        expected = self.model_add(one)
        self.collection.add(
            client, trajectory(task, one.name, reward, one.version, newest=max(one.version, self.version))
        )
        self.check_dropped(expected)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["aborted", "idle", "capped", "engine"]))
    def give_up(self, which: int, how: EndedHow) -> None:
        self.release(which, how)

    @rule(client=st.sampled_from(CLIENTS))
    def agree(self, client: str) -> None:
        assert (self.collection.agree(client) == "") == self.by_agreement
        self.signs[client] = self.clock.now
        if self.by_agreement:
            self.agreed.add(client)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT / 2, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        change = self.collection.next_change()
        assert change is None or change > self.clock.now
        was_ready = self.collection.ready
        if change is not None and change > self.clock.now + seconds + 0.01:
            self.clock.now += seconds
            assert self.collection.ready == was_ready, "the time of the change was told too late"
            return
        self.clock.now += seconds
        if seconds == TIMEOUT and self.by_agreement and self.agreed and self.trainable() and self.out is None:
            assert self.collection.ready, "nobody is waited for beyond the bound"

    # ------------------------------------------------------------------ batches

    @rule()
    def take(self) -> None:
        if not self.is_ready():
            with pytest.raises(StateError):
                self.collection.take()
            return
        batch = self.collection.take()
        if self.out is not None:
            assert batch is self.out
            self.back = False
            return
        groups = self.expected_groups()
        assert [[t.episode_uuid for t in group.trajectories] for group in batch.groups] == [
            [one.name for one in group.members] for group in groups
        ]
        assert [group.task_id for group in batch.groups] == [group.task for group in groups]
        assert all(len(group.trajectories) >= 2 for group in batch.groups)
        assert batch.batch_id not in self.batches
        self.batches.append(batch.batch_id)
        self.whole = [group for group in self.whole if group not in groups]
        self.open = [group for group in self.open if group not in groups]
        self.out, self.back, self.attempts = batch, False, 0
        self.agreed, self.taking_part, self.forced = set(), set(), False

    def out_names(self) -> list[str]:
        return [t.episode_uuid for group in self.out.groups for t in group.trajectories] if self.out else []

    @precondition(lambda self: self.out is not None)
    @rule()
    def confirm(self) -> None:
        assert self.out is not None
        assert self.collection.confirm(self.out.batch_id) is self.out
        assert self.collection.confirm(self.out.batch_id) is None
        self.trained += self.out_names()
        for name in self.out_names():
            self.counts[self.clients_of[name], "trained"] += 1
        self.out = None

    @precondition(lambda self: self.out is not None)
    @rule()
    def fail(self) -> None:
        assert self.out is not None
        self.collection.fail(self.out.batch_id, "out of memory")
        self.attempts += 1
        self.back = True
        if self.attempts == 2:
            self.check_dropped(self.out_names())
            self.out = None
        else:
            assert self.rows.pop() == BatchRow(self.out, self.attempts)
            self.check_dropped([])

    def give_back(self) -> None:
        assert self.collection.give_back() == (self.out is not None and not self.back)
        self.back = True

    @rule(version=st.sampled_from([1, 1, 1, 0]))
    def advance(self, version: int) -> None:
        self.version = self.version + version if version else 0
        expected: list[str] = []
        for group in [group for group in self.whole if any(map(self.is_old, group.members))]:
            self.whole.remove(group)
            expected += [one.name for one in group.members]
        for group in list(self.open):
            old = [one for one in group.members if self.is_old(one)]
            expected += [one.name for one in old]
            group.members = [one for one in group.members if one not in old]
            if old and not group.members:
                self.open.remove(group)
        if (bound := self.job.max_staleness) is not None:
            self.open = [group for group in self.open if group.members or self.version - group.version <= bound]
        if expected:
            self.forced = False
        self.collection.advance(self.version)
        self.check_dropped(expected)

    @rule(what=st.sampled_from(["clear", "restart", "restart", "another batch", "another batch", "give back"]))
    def rarely(self, what: str) -> None:
        """What would otherwise leave little time for batches to come about."""
        match what:
            case "clear":
                self.clear()
            case "restart":
                self.restart()
            case "another batch":
                assert self.collection.confirm("another") is None
                self.collection.fail("another", "out of memory")
                self.check_dropped([])
            case _:
                self.give_back()

    def clear(self) -> None:
        expected = [*self.out_names(), *(one.name for one in self.waiting())]
        self.collection.begin_run("r", "another run")
        self.check_dropped(expected)
        self.open, self.whole, self.out = [], [], None
        self.agreed, self.taking_part, self.forced = set(), set(), False

    def restart(self) -> None:
        """The server dies and comes back: the journal knows what waits, in the order of the ends, and what runs."""
        self.collection = Collection(self.job, TIMEOUT, self.clock, self.append)
        waiting = sorted(self.waiting(), key=lambda one: self.order(one.name))
        outstanding = BatchRow(self.out, self.attempts) if self.out else None
        losses = [
            GroupRow(group.task, group.lost, group.version)
            for group in sorted(self.open, key=lambda group: group.task)
            if group.lost
        ]
        assert losses == sorted(self.losses.values(), key=lambda one: one.task_id)
        self.open, self.whole, self.forced = [], [], False
        # of a batch that waits for all it is not known who has died meanwhile
        sign = self.clock.now if self.by_agreement else -TIMEOUT
        self.signs = dict.fromkeys(self.agreed, -TIMEOUT) | {one.client: sign for one in waiting}
        self.taking_part = {one.client for one in waiting} if self.by_agreement else set()
        self.counts = Counter()
        # only the engine tells the version again
        version, self.version = self.version, 0
        for client, episode_type, hint in self.running:
            self.collection.claimed(client, episode_type, hint)
            self.signs[client] = self.clock.now
            self.counts[client, "claimed"] += 1
        self.back = True
        for name in self.out_names():
            self.clients_of[name] = ""
        expected = [name for one in waiting for name in self.model_add(one)]
        finished = [(one.client, trajectory(one.task, one.name, one.reward, one.version)) for one in waiting]
        for one in losses:
            group = self.group(one.task_id)
            group.lost, group.version = one.lost, one.version
        agreed = sorted(self.agreed)
        self.collection.restore(Recovered(finished=finished, outstanding=outstanding, losses=losses, agreed=agreed))
        self.check_dropped(expected)
        self.version = version
        self.collection.advance(version)
        self.check_dropped([])

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def losses_are_told(self) -> None:
        assert {task: one.lost for task, one in self.losses.items()} == {g.task: g.lost for g in self.open if g.lost}

    @invariant()
    def every_episode_is_in_one_place(self) -> None:
        here = [*(one.name for one in self.waiting()), *self.out_names(), *self.trained, *self.gone]
        assert sorted(here, key=self.order) == [f"e{n + 1}" for n in range(self.episode)]

    @invariant()
    def counts_are_exact(self) -> None:
        tasks: Counter[str] = Counter(one.task for one in self.waiting())
        assert self.collection.groups.tasks() == dict(tasks)
        assert self.collection.groups.episodes == len(self.waiting())
        assert len(self.collection.groups.whole) == len(self.whole)
        assert self.collection.shares.running == sum(kind == "train" for _, kind, _ in self.running)
        assert self.collection.outstanding is self.out

    @invariant()
    def it_is_ready_when_the_model_is(self) -> None:
        assert self.collection.ready == self.is_ready()
        assert self.collection.full == self.is_full()

    @invariant()
    def agreements_are_in_vain_when_nothing_can_come_of_them(self) -> None:
        everyone = self.method == "all_clients_agree_sync_weight"
        agreed = bool(self.agreed) and (not everyone or self.active() & self.taking_part <= self.agreed)
        nothing = not self.trainable() and self.out is None and self.collection.shares.running == 0
        assert self.collection.in_vain == (agreed and nothing)

    @invariant()
    def the_cache_is_bounded(self) -> None:
        assert self.collection.groups.episodes + self.collection.shares.running <= self.bound

    @invariant()
    def rows_add_up(self) -> None:
        rows = {row.client_uuid: row for row in self.collection.rows()}
        assert set(rows) == set(self.signs)
        for name, row in rows.items():
            assert row.active == (name in self.active())
            assert row.agreed == (name in self.agreed)
            assert row.takes_part == (name in self.taking_part)
            assert row.running == sum(client == name and kind == "train" for client, kind, _ in self.running)
            assert row.waiting == sum(one.client == name for one in self.waiting())
            for what in ("claimed", "ended", "aborted", "timed_out", "trained", "dropped"):
                assert getattr(row, what) == self.counts[name, what], what


@pytest.mark.property
@pytest.mark.parametrize("method", get_args(CollectionMethod))
def test_the_collection_is_as_the_model_says(method: str) -> None:
    machine = type("Machine", (CollectionMachine,), {"method": cast("CollectionMethod", method)})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))
