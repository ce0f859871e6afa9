"""The pool: claims, ends, aborts, timeouts and keys, and a stateful test against a small model of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from swarm.errors import AuthenticationError, ConflictError, NotFoundError, RequestError
from swarm.job import TrainJob
from swarm.protocol import EpisodeEnd
from swarm.server.episodes import Claim
from swarm.server.pool import EpisodePool
from swarm.states import EngineState
from swarm.types import ModelCall, WorkflowOutput

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2)
ROLLING, POST, SYNCING = EngineState.ROLLING, EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rolling_pool(job: TrainJob = JOB, clock: Clock | None = None) -> EpisodePool:
    pool = EpisodePool(job, clock or Clock())
    pool.enter(ROLLING)
    return pool


def claim(pool: EpisodePool, count: int = 1, client: str = "me", episode_type: str = "train") -> list[Claim]:
    claims = pool.claim(client, "eval" if episode_type == "eval" else "train", 240.0, count)
    assert claims is not None
    return claims


def sample(pool: EpisodePool, episode: Claim, token: int = 1) -> None:
    call = ModelCall(
        call_id="c",
        prompt_ids=[0],
        response_ids=[token],
        logprobs=[-1.0],
        min_policy_version=0,
        max_policy_version=0,
        finish_reason="stop",
    )
    pool.record(pool.open(episode.episode_uuid, episode.key), call)


def ends(*claims: Claim, reward: float = 1.0) -> list[EpisodeEnd]:
    return [
        EpisodeEnd(episode_uuid=claim.episode_uuid, workflow_output=WorkflowOutput(reward=reward)) for claim in claims
    ]


def sampled(pool: EpisodePool, count: int) -> list[Claim]:
    claims = claim(pool, count)
    for one in claims:
        sample(pool, one)
    return claims


def test_claims_are_all_or_nothing_within_the_slots() -> None:
    pool = rolling_pool()
    claim(pool, 3)
    assert pool.claim("me", "train", 240.0, 2) is None
    claim(pool, 1)
    assert pool.claim("me", "train", 240.0) is None
    assert pool.running == 4


@pytest.mark.parametrize("state", [EngineState.OFFLINE, EngineState.BOOTING, POST, SYNCING])
def test_nothing_can_be_claimed_outside_rolling(state: EngineState) -> None:
    pool = EpisodePool(JOB)
    pool.enter(state)
    assert pool.claim("me", "train", 240.0) is None


def test_a_finished_episode_frees_its_slot() -> None:
    pool = rolling_pool()
    first = sampled(pool, 4)
    pool.end("me", "task", ends(first[0]))
    claim(pool)
    assert pool.information().completed_episodes == 1


def test_groups_make_a_batch() -> None:
    pool = rolling_pool()
    assert pool.end("me", "a", ends(*sampled(pool, 2), reward=0.25), as_group=True) == ""
    assert not pool.batch_ready
    b = sampled(pool, 2)
    pool.end("me", "b", ends(b[0]))
    pool.end("me", "b", ends(b[1]))
    assert pool.batch_ready
    batch = pool.take_batch()
    assert [[t.reward for t in g.trajectories] for g in batch.groups] == [[0.25, 0.25], [1.0, 1.0]]
    assert batch.groups[0].trajectories[0].timelines[0].response_ids == [1]
    assert pool.confirm(batch.batch_id) is batch
    assert pool.information().completed_episodes == 0


def test_a_repeated_end_is_answered_like_the_first_and_counts_once() -> None:
    pool = rolling_pool()
    group = sampled(pool, 2)
    for _ in range(3):
        assert pool.end("me", "a", ends(*group), as_group=True) == ""
    (empty,) = claim(pool)
    first = pool.end("me", "b", ends(empty))
    assert first == pool.end("me", "b", ends(empty)) != ""
    info = pool.information()
    assert (info.completed_tasks, info.completed_episodes, info.dropped_episodes) == (1, 2, 1)


def test_a_stranger_cannot_touch_an_episode() -> None:
    pool = rolling_pool()
    (mine,) = sampled(pool, 1)
    with pytest.raises(NotFoundError):
        pool.end("stranger", "a", ends(mine))
    with pytest.raises(NotFoundError):
        pool.abort("stranger", mine.episode_uuid)
    assert not pool.can_continue("stranger", mine.episode_uuid)
    assert pool.can_continue("me", mine.episode_uuid)
    pool.end("me", "a", ends(mine))
    with pytest.raises(NotFoundError):
        pool.end("stranger", "a", ends(mine))
    with pytest.raises(NotFoundError):
        pool.abort("stranger", mine.episode_uuid)


def test_unknown_and_doubled_episodes() -> None:
    pool = rolling_pool()
    (mine,) = sampled(pool, 1)
    with pytest.raises(NotFoundError):
        pool.end("me", "a", ends(mine, Claim("nobody", "")), as_group=True)
    assert pool.can_continue("me", mine.episode_uuid), "all or none"
    with pytest.raises(RequestError, match="twice"):
        pool.end("me", "a", ends(mine, mine))
    assert pool.abort("me", "nobody") == ""


def test_an_abort_frees_the_slot_and_may_be_repeated() -> None:
    pool = rolling_pool()
    group = sampled(pool, 4)
    assert pool.abort("me", group[0].episode_uuid) == ""
    (again,) = claim(pool)
    assert again.episode_uuid != group[0].episode_uuid
    assert pool.abort("me", group[0].episode_uuid) == ""
    assert pool.can_continue("me", again.episode_uuid), "a late abort must not hit the slot's next episode"
    with pytest.raises(ConflictError, match="aborted"):
        pool.end("me", "a", ends(group[0]))
    pool.end("me", "a", ends(group[1]))
    assert "reward stands" in pool.abort("me", group[1].episode_uuid)
    assert pool.information().completed_episodes == 1


def test_keys_open_only_their_running_episode() -> None:
    pool = rolling_pool()
    one, two = sampled(pool, 2)
    assert pool.open(one.episode_uuid, one.key).episode_uuid == one.episode_uuid
    for uuid, key in ((one.episode_uuid, two.key), (one.episode_uuid, ""), ("nobody", one.key)):
        with pytest.raises(AuthenticationError):
            pool.open(uuid, key)
    episode = pool.open(one.episode_uuid, one.key)
    assert one.key not in repr(episode)
    pool.end("me", "a", ends(one))
    with pytest.raises(AuthenticationError):
        pool.open(one.episode_uuid, one.key)
    assert episode.over.is_set()


def test_idle_episodes_are_taken_back_but_a_call_keeps_them_alive() -> None:
    clock = Clock()
    pool = rolling_pool(clock=clock)
    one, two = claim(pool, 2)
    busy = pool.open(one.episode_uuid, one.key)
    pool.begin_call(busy)
    clock.now += 240
    assert pool.expire() == 1
    assert pool.can_continue("me", one.episode_uuid)
    with pytest.raises(ConflictError, match="idle"):
        pool.end("me", "a", ends(two))
    assert pool.next_deadline() is None
    pool.end_call(busy)
    assert pool.next_deadline() == clock.now + 240
    clock.now += 239
    assert pool.expire() == 0
    clock.now += 1
    assert pool.expire() == 1
    claim(pool, 4)


def test_what_runs_in_rolling_post_may_finish_and_is_deleted_afterwards() -> None:
    pool = rolling_pool()
    one, two, three = sampled(pool, 3)
    pool.enter(POST)
    assert pool.can_continue("me", one.episode_uuid)
    pool.end("me", "a", ends(one))
    pool.abort("me", two.episode_uuid)
    pool.enter(SYNCING)
    assert pool.running == 0
    with pytest.raises(ConflictError, match="too late"):
        pool.end("me", "a", ends(three))
    pool.enter(ROLLING)
    claim(pool, 4)
    assert pool.information().completed_episodes == 1


def test_a_dead_engine_deletes_what_runs_and_keeps_what_finished() -> None:
    pool = rolling_pool()
    pool.end("me", "a", ends(*sampled(pool, 2)), as_group=True)
    (running,) = claim(pool)
    episode = pool.open(running.episode_uuid, running.key)
    pool.enter(EngineState.OFFLINE, "killed by SIGKILL")
    assert episode.over_error is not None
    assert "SIGKILL" in episode.over_error.message
    assert pool.information().completed_tasks == 1


def test_eval_episodes_are_never_trained() -> None:
    pool = rolling_pool()
    for _ in range(3):
        (one,) = claim(pool, episode_type="eval")
        sample(pool, one)
        assert pool.end("me", "a", ends(one)) == ""
    info = pool.information()
    assert (info.completed_episodes, info.dropped_episodes, info.running_episodes) == (0, 0, 0)


def test_an_episode_without_a_recorded_call_is_dropped_with_a_reason() -> None:
    pool = rolling_pool()
    assert "no completed LLM call" in pool.end("me", "a", ends(*claim(pool)))
    assert pool.information().dropped_episodes == 1


def test_one_quarantined_episode_drops_its_group() -> None:
    pool = rolling_pool()
    good, bad = sampled(pool, 2)
    episode = pool.open(bad.episode_uuid, bad.key)
    pool.quarantine(episode, "3 token ids but 2 log-probabilities")
    pool.quarantine(episode, "another")
    reason = pool.end("me", "a", ends(good, bad), as_group=True)
    assert reason == "quarantined: 3 token ids but 2 log-probabilities"
    info = pool.information()
    assert (info.quarantined_episodes, info.dropped_episodes, info.completed_episodes) == (1, 1, 0)


def test_one_quarantined_episode_drops_its_group_when_ended_one_by_one() -> None:
    pool = rolling_pool()
    good, bad = sampled(pool, 2)
    pool.quarantine(pool.open(bad.episode_uuid, bad.key), "x")
    pool.end("me", "a", ends(bad))
    pool.end("me", "a", ends(good))
    info = pool.information()
    assert (info.quarantined_episodes, info.dropped_episodes, info.completed_episodes) == (1, 1, 0)


@dataclass
class Shadow:
    """What the model knows of one episode."""

    claim: Claim
    client: str
    eval: bool
    active: float
    sampled: bool = False
    quarantined: bool = False
    outcome: str = field(default="running")


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps one word per episode; all episodes end one by one."""

    claims = Bundle("claims")
    JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2, max_parallel_episodes=6)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = EpisodePool(self.JOB, self.clock)
        self.engine = EngineState.OFFLINE
        self.known: list[Shadow] = []
        self.finished: dict[str, list[str]] = {}
        self.lost: dict[str, int] = {}
        self.complete: list[list[str]] = []
        self.out: list[list[str]] = []
        self.batch_id = ""
        self.dropped = self.quarantined = self.trained = 0
        self.go(ROLLING)

    def running(self) -> list[Shadow]:
        return [shadow for shadow in self.known if shadow.outcome == "running"]

    def go(self, *states: EngineState) -> None:
        for state in states:
            self.pool.enter(state)
            self.engine = state

    @rule()
    def roll(self) -> None:
        if self.engine is not POST:
            self.go(ROLLING)

    @precondition(lambda self: self.engine is ROLLING)
    @rule()
    def post(self) -> None:
        self.go(POST)

    @precondition(lambda self: self.engine is POST)
    @rule()
    def sync(self) -> None:
        for shadow in self.running():
            shadow.outcome = "late"
        self.go(SYNCING)

    @precondition(lambda self: len(self.known) % 4 == 3)
    @rule()
    def die(self) -> None:
        for shadow in self.running():
            shadow.outcome = "late"
        self.go(EngineState.OFFLINE)
        assert self.pool.give_back() == len(self.out)
        self.complete, self.out = self.out + self.complete, []

    @rule(target=claims, count=st.integers(1, 3), client=st.sampled_from("xy"), is_eval=st.booleans())
    def claim(self, count: int, client: str, is_eval: bool):
        got = self.pool.claim(client, "eval" if is_eval else "train", 10.0, count)
        room = self.JOB.slots - len(self.running())
        assert (got is not None) == (self.engine is ROLLING and room >= count)
        shadows = [Shadow(one, client, is_eval, self.clock.now) for one in got or []]
        self.known += shadows
        return multiple(*shadows)

    @precondition(lambda self: self.engine is ROLLING and len(self.running()) < self.JOB.slots)
    @rule(task=st.sampled_from("ab"), kind=st.sampled_from(["fine", "fine", "empty", "bad"]))
    def whole_episode(self, task: str, kind: str) -> None:
        (one,) = claim(self.pool)
        shadow = Shadow(one, "me", False, self.clock.now)
        self.known.append(shadow)
        if kind != "empty":
            self.call(shadow, kind == "bad")
        self.end(shadow, task, False)

    @rule(shadow=claims, bad=st.booleans())
    def call(self, shadow: Shadow, bad: bool) -> None:
        if shadow.outcome != "running":
            with pytest.raises(AuthenticationError):
                self.pool.open(shadow.claim.episode_uuid, shadow.claim.key)
            return
        episode = self.pool.open(shadow.claim.episode_uuid, shadow.claim.key)
        self.pool.begin_call(episode)
        if bad:
            self.pool.quarantine(episode, "bad")
            shadow.quarantined = True
        else:
            sample(self.pool, shadow.claim)
            shadow.sampled = True
        self.pool.end_call(episode)
        shadow.active = self.clock.now

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        expired = [shadow for shadow in self.running() if self.clock.now - shadow.active >= 10]
        assert self.pool.expire() == len(expired)
        for shadow in expired:
            shadow.outcome = "late"

    @rule(shadow=claims, task=st.sampled_from("abc"), stranger=st.booleans())
    def end(self, shadow: Shadow, task: str, stranger: bool) -> None:
        client = "z" if stranger else shadow.client
        error = NotFoundError if stranger else ConflictError if shadow.outcome == "late" else None
        if error is not None:
            with pytest.raises(error):
                self.pool.end(client, task, ends(shadow.claim))
            return
        reason = self.pool.end(client, task, ends(shadow.claim))
        if shadow.outcome == "running":
            shadow.outcome = self.expect_end(shadow, task)
        assert bool(reason) == (shadow.outcome == "dropped")

    def expect_end(self, shadow: Shadow, task: str) -> str:
        if shadow.eval:
            return "done"
        fine = shadow.sampled and not shadow.quarantined
        if fine:
            self.finished.setdefault(task, []).append(shadow.claim.episode_uuid)
        else:
            self.lost[task] = self.lost.get(task, 0) + 1
            self.quarantined += shadow.quarantined
            self.dropped += not shadow.quarantined
        group, lost = self.finished.get(task, []), self.lost.get(task, 0)
        if len(group) + lost == self.JOB.num_repeat:
            self.finished.pop(task, None)
            self.lost.pop(task, None)
            if lost:
                self.dropped += len(group)
            else:
                self.complete.append(group)
        return "done" if fine else "dropped"

    @rule(shadow=consumes(claims), stranger=st.booleans())
    def abort(self, shadow: Shadow, stranger: bool) -> None:
        if stranger:
            with pytest.raises(NotFoundError):
                self.pool.abort("z", shadow.claim.episode_uuid)
            return
        note = self.pool.abort(shadow.client, shadow.claim.episode_uuid)
        assert bool(note) == (shadow.outcome in ("done", "dropped"))
        if shadow.outcome == "running":
            shadow.outcome = "late"

    @precondition(lambda self: not self.out and self.pool.batch_ready)
    @rule()
    def take(self) -> None:
        batch = self.pool.take_batch()
        self.out, self.complete = self.complete[:2], self.complete[2:]
        self.batch_id = batch.batch_id
        assert [[t.episode_uuid for t in group.trajectories] for group in batch.groups] == self.out

    @precondition(lambda self: self.out)
    @rule()
    def train(self) -> None:
        assert self.pool.confirm(self.batch_id) is not None
        self.trained += sum(map(len, self.out))
        self.out = []

    @invariant()
    def the_pool_agrees(self) -> None:
        info = self.pool.information()
        assert info.running_episodes == len(self.running())
        assert info.completed_tasks == len(self.complete)
        assert info.completed_episodes == sum(map(len, self.complete)) + sum(map(len, self.finished.values()))
        assert (info.dropped_episodes, info.quarantined_episodes) == (self.dropped, self.quarantined)
        assert self.pool.batch_ready == (len(self.complete) >= self.JOB.batch_size)

    @invariant()
    def every_ended_train_episode_is_in_one_place(self) -> None:
        info = self.pool.information()
        ended = sum(not shadow.eval and shadow.outcome in ("done", "dropped") for shadow in self.known)
        out = sum(map(len, self.out))
        places = info.completed_episodes + info.dropped_episodes + info.quarantined_episodes + out + self.trained
        assert places == ended


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
