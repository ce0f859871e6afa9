"""How episodes are claimed: one logical claim, many polls, one idempotency key.

Invariant: all polls and repetitions of a claim carry the same key, so a claim whose answer was lost gets the episodes
that were granted to it, and no others.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from swarm.client import wire
from swarm.client.flows import Flow, Flows, Pause, UnheardError
from swarm.client.throttle import Throttle, ThrottleSchedule, as_policy
from swarm.errors import UnavailableError
from swarm.protocol import MAX_SECONDS, NO_EPISODES, POST_ROLLING, SYNCING, EpisodeType
from swarm.states import EngineState

logger = logging.getLogger(__name__)

#: Seconds of one long poll; short, because a claim given up meanwhile holds its place until the poll ends.
LONG_POLL = 5.0
#: A claim gives up early when the engine has been OFFLINE this long: nothing will come by itself.
OFFLINE_GRACE = 5.0
#: An episode may last this many idle timeouts, unless the caller says how long.
LIFE = 8.0

#: the first that is found counts: what throttles a claim leaves it without an episode, too
_PHRASE_CODES = {
    SYNCING: "engine_syncing",
    POST_ROLLING: "engine_post_rolling",
    "throttled": "throttled",
    NO_EPISODES: "no_episodes",
}
_STATE_CODES = {
    EngineState.OFFLINE: "engine_offline",
    EngineState.BOOTING: "engine_booting",
    EngineState.WEIGHT_SYNCING: "engine_syncing",
    EngineState.ROLLING_POST: "engine_post_rolling",
}


@dataclass(frozen=True)
class Claim:
    """What is claimed: ``count`` episodes at once, or the one of ``/claim_episode`` where it is ``None``.

    The times are in seconds: without a model call, and of the episode's whole life. Who repeats a claim under the
    ``idempotency_key`` of an earlier one (after a crash, say) gets that one's episodes.
    """

    count: int | None
    wait_seconds: float
    episode_type: EpisodeType
    discard_episode_timeout: float
    max_episode_seconds: float | None = None
    throttle: Throttle | None = None
    idempotency_key: str | None = None
    standby: bool = False


def claim(flows: Flows, wanted: Claim, key: str = "") -> Flow[wire.EpisodeGroup]:
    """Claim episodes within ``wanted.wait_seconds``, under ``key`` if the caller has given it none.

    Raises:
        UnavailableError: none in time; ``code`` says why.
        RequestError: the server refuses the request itself.
    """
    deadline = flows.clock() + wanted.wait_seconds
    key = wanted.idempotency_key or key or uuid.uuid4().hex
    life = wanted.max_episode_seconds or min(MAX_SECONDS, LIFE * wanted.discard_episode_timeout)
    throttle = as_policy(wanted.throttle)
    offline_since: float | None = None
    rounds = 0
    told = ""
    while True:
        yield from flows.settle(deadline)
        policy = throttle
        if isinstance(policy, ThrottleSchedule):
            engine = yield from flows.perform(wire.ENGINE_STATUS, deadline=deadline)
            policy = policy.at(engine.global_step)
        asked = flows.clock()
        poll = min(LONG_POLL, max(0.0, deadline - asked))
        call = wire.claim_call(
            flows.client_uuid,
            wanted.count,
            poll,
            wanted.episode_type,
            wanted.discard_episode_timeout,
            max_episode_seconds=life,
            throttle_policy=policy,
            idempotency_key=key,
            standby=wanted.standby,
        )
        try:
            answer = yield from flows.perform(call, deadline=deadline)
        except UnavailableError as exc:
            if wanted.idempotency_key is None and not isinstance(exc, UnheardError):
                # it may have been granted all the same, and nobody will ask for it again
                flows.owed.add(wire.withdraw_call(flows.client_uuid, key))
            raise
        if answer.success:
            return wire.episodes_of(answer, flows.server_url)
        code = yield from _why(flows, answer.fail_cause, deadline)
        if code != told:
            logger.info("waiting for episodes of %s: %s", flows.server_url, answer.fail_cause or code)
            told = code
        now = flows.clock()
        offline_since = (offline_since or asked) if code == "engine_offline" else None
        if now >= deadline or (offline_since is not None and now - offline_since >= OFFLINE_GRACE):
            what = "an episode" if wanted.count is None else f"{wanted.count} episodes"
            within = f"within {wanted.wait_seconds:g} s"
            if now < deadline:
                within = f"and gave up after {now - offline_since:.0f} s" if offline_since is not None else within
            raise UnavailableError(f"could not claim {what} {within}: {answer.fail_cause or code}", code=code)
        rounds = rounds + 1 if now - asked < poll / 2 else 0
        if rounds:
            # answered before its time: it does not long-poll, or the state it waits in has just changed
            yield Pause(flows.breath(rounds, deadline - now))


def _why(flows: Flows, cause: str, deadline: float) -> Flow[str]:
    for phrase, code in _PHRASE_CODES.items():
        if phrase in cause:
            return code
    status = yield from flows.perform(wire.ENGINE_STATUS, deadline=deadline)
    return _STATE_CODES.get(status.engine_status, "not_ready")
