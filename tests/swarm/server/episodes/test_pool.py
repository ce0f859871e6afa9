"""The pool: claims, ends, aborts, timeouts, keys and groups, and what the journal is told of them."""

from __future__ import annotations

import itertools

import pytest

from swarm.errors import AuthenticationError, ConflictError, NotFoundError, RequestError
from swarm.job import TrainJob
from swarm.protocol import LATE_CODES, EpisodeEnd, EpisodeType
from swarm.server.episodes.episode import TOO_LATE, ClaimWish, EpisodeKey, Grant, LiveEpisode, Refusal
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.rows import CallRow, Ending, EndRow, EpisodeRow, ForgottenEvidenceRow, JournalRow
from swarm.states import EngineStates, EpisodeState, TrainerState, VllmState
from swarm.tokens import ModelCall
from swarm.types import WorkflowOutput
from tests.token_data import model_call

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2)
OFFLINE, ROLLING = EngineStates(), EngineStates(VllmState.UP, TrainerState.IDLE)


CALLS = itertools.count()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rolling_pool(
    job: TrainJob = JOB, clock: Clock | None = None, records: list[JournalRow] | None = None
) -> EpisodePool:
    told: list[JournalRow] = [] if records is None else records
    pool = EpisodePool(job, lambda *new: told.extend(new), clock=clock or Clock())
    pool.follow(ROLLING)
    return pool


def claim(
    pool: EpisodePool, count: int = 1, client: str = "me", episode_type: EpisodeType = "train", max_seconds: float = 1e6
) -> list[EpisodeKey]:
    grant = pool.claim(ClaimWish(client, episode_type, 240.0, max_seconds, count))
    assert isinstance(grant, Grant), grant
    return list(grant.claims)


def refused(pool: EpisodePool, count: int = 1) -> Refusal:
    outcome = pool.claim(ClaimWish("me", episodes=count))
    assert isinstance(outcome, Refusal)
    return outcome


def sample(pool: EpisodePool, episode: EpisodeKey, token: int = 1) -> None:
    call = model_call([0], [token], call_id=f"call-{next(CALLS)}")
    record(pool, pool.open(episode.episode_uuid, episode.key), call)


def record(pool: EpisodePool, episode: LiveEpisode, call: ModelCall) -> None:
    """As the data plane does once the journal has it."""
    pool.record([(episode, call)])
    pool.keep(episode, call)


def ends(*claims: EpisodeKey, reward: float = 1.0) -> list[EpisodeEnd]:
    return [
        EpisodeEnd(episode_uuid=claim.episode_uuid, workflow_output=WorkflowOutput(reward=reward)) for claim in claims
    ]


def sampled(pool: EpisodePool, count: int) -> list[EpisodeKey]:
    claims = claim(pool, count)
    for one in claims:
        sample(pool, one)
    return claims


def test_time_before_the_engine_rolls_is_held_against_no_client() -> None:
    clock = Clock()
    pool = EpisodePool(JOB, lambda *_: None, clock=clock)
    for job in (JOB, JOB.model_copy(update={"lr": 0.5})):
        pool.begin_run("r", job, "another")
        pool.collection.seen("me", train=True)
        clock.now += 1e6
        pool.follow(ROLLING)
        assert [row.active for row in pool.collection.rows()] == [True], job
        pool.follow(OFFLINE)


def test_a_clients_counts_are_those_since_the_server_started_whatever_job_comes() -> None:
    pool = rolling_pool()
    pool.end("me", "a", ends(*sampled(pool, 2)))
    claim(pool)
    for job in (JOB, JOB.model_copy(update={"lr": 0.5})):
        pool.begin_run("r", job, "another")
        [row] = pool.collection.rows()
        assert (row.claimed, row.ended, row.dropped, row.running, row.waiting) == (3, 2, 2, 0, 0), job


def test_unknown_and_doubled_episodes() -> None:
    pool = rolling_pool()
    (mine,) = sampled(pool, 1)
    with pytest.raises(NotFoundError):
        pool.end("me", "a", ends(mine, EpisodeKey("nobody", "")), as_group=True)
    assert pool.running.of("me", mine.episode_uuid) is not None, "all or none"
    with pytest.raises(RequestError, match="twice"):
        pool.end("me", "a", ends(mine, mine))
    assert pool.abort("me", "nobody") == ""


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
    with pytest.raises(ConflictError, match="has ended"):
        pool.open(one.episode_uuid, one.key)
    with pytest.raises(AuthenticationError):
        pool.open(one.episode_uuid, two.key)
    assert episode.over.happened


def test_idle_episodes_are_taken_back_but_a_call_keeps_them_alive() -> None:
    clock = Clock()
    pool = rolling_pool(clock=clock)
    one, two = claim(pool, 2)
    busy = pool.open(one.episode_uuid, one.key)
    counted = pool.begin_call([busy])
    clock.now += 240
    assert pool.expire() == 1
    assert pool.running.of("me", one.episode_uuid) is not None
    with pytest.raises(ConflictError, match="idle"):
        pool.end("me", "a", ends(two))
    assert pool.running.deadlines.next() == clock.now + 240, "the call may end at once"
    clock.now += 100
    pool.end_call([busy], counted)
    clock.now += 239
    assert pool.expire() == 0
    clock.now += 1
    assert pool.expire() == 1
    claim(pool, 4)


def test_the_wall_clock_cap_holds_even_while_a_call_is_in_flight() -> None:
    clock = Clock()
    pool = rolling_pool(clock=clock)
    (chatty,) = claim(pool, max_seconds=300.0)
    episode = pool.open(chatty.episode_uuid, chatty.key)
    for _ in range(5):
        clock.now += 50
        pool.end_call([episode], pool.begin_call([episode]))
        assert pool.expire() == 0
    pool.begin_call([episode])
    clock.now += 49
    assert pool.expire() == 0
    clock.now += 1
    assert pool.expire() == 1
    assert episode.over_error is not None and episode.over_error.code == "episode_expired"
    with pytest.raises(ConflictError, match="max_episode_seconds") as late:
        pool.end("me", "a", ends(chatty))
    assert late.value.code == "episode_expired"


def test_an_end_that_only_the_journal_remembers() -> None:
    pool = rolling_pool()
    past = {
        "ended": Ending("me", "ended", "no call", "k"),
        "idle": Ending("me", "idle"),
    }
    gone = {name: [EpisodeEnd(episode_uuid=name, workflow_output=WorkflowOutput(reward=1))] for name in past}
    assert pool.end("me", "a", gone["ended"], end_key="k", past=past) == "no call"
    with pytest.raises(ConflictError) as late:
        pool.end("me", "a", gone["idle"], past=past)
    assert late.value.code == "episode_timed_out"
    with pytest.raises(NotFoundError):
        pool.end("stranger", "a", gone["ended"], past=past)


def test_a_groups_key_opens_its_members_in_order_until_the_first_is_over() -> None:
    pool = rolling_pool()
    grant = pool.claim(ClaimWish("me", episodes=3, as_group=True))
    assert isinstance(grant, Grant)
    group = pool.running.open_group(grant.group_uuid, grant.group_key)
    assert [episode.episode_uuid for episode in group.members] == [one.episode_uuid for one in grant.claims]
    assert grant.group_key not in repr(group)
    for uuid, key in ((grant.group_uuid, grant.claims[0].key), ("nobody", grant.group_key), ("ä", "ä")):
        with pytest.raises(AuthenticationError):
            pool.running.open_group(uuid, key)
    with pytest.raises(AuthenticationError):
        pool.open(grant.claims[0].episode_uuid, grant.group_key)
    pool.abort("me", grant.claims[1].episode_uuid)
    with pytest.raises(AuthenticationError):
        pool.running.open_group(grant.group_uuid, grant.group_key)
    assert pool.open(grant.claims[0].episode_uuid, grant.claims[0].key)


def test_a_claim_is_granted_again_with_keys_for_what_still_runs() -> None:
    records: list[JournalRow] = []
    pool = rolling_pool(records=records)
    grant = pool.claim(ClaimWish("me", episodes=2, as_group=True, claim_key="k"))
    assert isinstance(grant, Grant)
    uuids = [one.episode_uuid for one in grant.claims]
    assert pool.running.grant_again(uuids, as_group=True) == grant
    assert len(records) == 2, "nothing new happened"
    pool.abort("me", uuids[1])
    again = pool.running.grant_again(uuids, as_group=True)
    assert [one.episode_uuid for one in again.claims] == uuids
    assert again.claims[0] == grant.claims[0]
    with pytest.raises(ConflictError, match="was aborted"):
        pool.open(uuids[1], grant.claims[1].key)
    with pytest.raises(AuthenticationError):
        pool.open(uuids[1], again.claims[1].key)
    with pytest.raises(AuthenticationError):
        pool.running.open_group(again.group_uuid, again.group_key)


def test_the_journal_is_told_everything_once_and_in_order() -> None:
    records: list[JournalRow] = []
    pool = rolling_pool(records=records)
    (one,) = sampled(pool, 1)
    episode = pool.open(one.episode_uuid, one.key)
    pool.end("me", "a", ends(one, reward=0.5), end_key="k")
    pool.end("me", "a", ends(one, reward=0.5), end_key="k")
    record(pool, episode, episode.calls[0])
    pool.quarantine(episode, "too late")
    claimed, called, ended = records
    assert isinstance(claimed, EpisodeRow) and isinstance(called, CallRow) and isinstance(ended, EndRow)
    assert one.key not in repr(records)
    assert (ended.how, ended.task_id, ended.end_key, ended.drop_reason) == ("ended", "a", "k", "")
    assert ended.trajectory is not None and ended.trajectory.reward == 0.5


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


def test_a_group_is_told_each_reason_for_which_one_of_it_is_not_trained() -> None:
    pool = rolling_pool()
    good, bad, silent = sampled(pool, 2) + claim(pool, 1)
    pool.quarantine(pool.open(bad.episode_uuid, bad.key), "odd tokens")
    told = pool.end("me", "t", ends(good, bad, silent), as_group=True)
    assert told == "quarantined: odd tokens; no completed LLM call was recorded in the episode"
    assert pool.end("me", "t", ends(good, bad, silent), as_group=True) == told


def evaluation(pool: EpisodePool, version: int) -> EpisodeKey:
    (episode,) = claim(pool, episode_type="eval")
    pool.open(episode.episode_uuid, episode.key).unrecorded.append((version, 5))
    return episode


def test_an_evaluation_of_weights_that_are_lost_counts_for_no_others() -> None:
    records: list[JournalRow] = []
    pool = rolling_pool(records=records)
    pool.advance(2)
    first, late = evaluation(pool, 2), evaluation(pool, 2)
    pool.end("me", "a", ends(first, reward=1.0))
    pool.advance(1)
    assert pool.evaluations.results() == [] and records[-1] == ForgottenEvidenceRow("", 1)
    pool.end("me", "a", ends(late, reward=1.0))
    pool.advance(2)
    pool.end("me", "a", ends(evaluation(pool, 2), reward=0.0))
    [told] = pool.evaluations.results()
    assert (told.step, told.episodes, told.metrics["eval/reward_mean"]) == (2, 1, 0.0)


def test_clients_know_the_codes_of_all_ends_that_come_too_late() -> None:
    assert {code for code, _ in TOO_LATE.values()} == LATE_CODES


@pytest.mark.parametrize("rolls", [True, False])
def test_the_row_of_an_end_has_the_state_of_the_episode(rolls: bool) -> None:
    """A slot is offered again only while the engine rolls; what may be trained waits in any state of the engine."""
    clock, rows = Clock(), list[JournalRow]()
    pool = rolling_pool(JOB.model_copy(update={"max_parallel_episodes": 7}), clock, rows)
    trained, untrained, aborted, left = claim(pool, 4)
    (idle,) = claim(pool, max_seconds=1.0)
    (evaluated,) = claim(pool, episode_type="eval")
    sample(pool, trained)
    if not rolls:
        pool.follow(EngineStates(VllmState.PAUSED, TrainerState.IDLE))
    for episode in (trained, untrained, evaluated):
        pool.end("me", "a", ends(episode))
    pool.abort("me", aborted.episode_uuid)
    clock.now += 2.0
    pool.expire()
    pool.begin_run("another", JOB, "another job was synced")
    freed = EpisodeState.REGISTERED if rolls else EpisodeState.DELETED
    assert {row.episode_uuid: row.state for row in rows if isinstance(row, EndRow)} == {
        trained.episode_uuid: EpisodeState.FINISHED,
        untrained.episode_uuid: EpisodeState.DROPPED,
        **dict.fromkeys([episode.episode_uuid for episode in (evaluated, aborted, idle)], freed),
        left.episode_uuid: EpisodeState.DELETED,
    }
