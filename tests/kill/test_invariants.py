"""Each invariant of the kill test sees what it is there for, on a small run that is right but for one thing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from swarm.states import EpisodeState
from tests.kill.invariants import Witnesses, violations


def row(uuid: str, state: EpisodeState, reward: float | None, **more: Any) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "state": state,
        "how": "ended",
        "client_uuid": "ann",
        "claim_key": f"claim-{uuid}",
        "group_uuid": "",
        "end_key": f"end-{uuid}",
        "reward": reward,
        "drop_reason": "",
        "lost_reason": "",
        "batch_id": "",
    } | more


def said(uuid: str, reward: float, error: str | None = None, kind: str = "train") -> list[dict[str, Any]]:
    rewards = {uuid: reward}
    return [
        {"ending": f"end-{uuid}", "rewards": rewards},
        {"acked": f"end-{uuid}", "rewards": rewards, "kind": kind, "error": error},
    ]


def good() -> Witnesses:
    """Two episodes trained in one batch, one waits, one was dropped at its end, one later, one was an eval; one was too
    late."""
    rows = [
        row("a", EpisodeState.TRAINED, 0.1, batch_id="B1"),
        row("b", EpisodeState.TRAINED, 0.2, batch_id="B1"),
        row("c", EpisodeState.FINISHED, 0.3),
        row("d", EpisodeState.DROPPED, 0.4, drop_reason="no call"),
        row("e", EpisodeState.DROPPED, 0.5, lost_reason="stale"),
        row("f", EpisodeState.REGISTERED, 0.6),
        row("g", EpisodeState.REGISTERED, None, how="idle", end_key=""),
    ]
    lines = [line for uuid, reward in (("a", 0.1), ("b", 0.2), ("c", 0.3), ("e", 0.5)) for line in said(uuid, reward)]
    lines += said("d", 0.4, "not trained: no call") + said("f", 0.6, kind="eval")
    lines += [{"ending": "end-g", "rewards": {"g": 0.7}}, {"late": "end-g", "code": "episode_timed_out"}]
    attempt = {"trained": "B1", "episodes": {"a": 0.1, "b": 0.2}}
    return Witnesses(
        clients={"ann": lines},
        engine=[attempt, attempt, {"recorded": "B1"}],
        episodes={one["uuid"]: one for one in rows},
        rows=len(rows),
        steps=[{"batch_id": "B1"}],
        runs=[{"trained": 2, "dropped": 2, "quarantined": 0}],
        pool={"running_episodes": 0, "completed_episodes": 1, "dropped_episodes": 2, "quarantined_episodes": 0},
    )


def test_a_run_as_it_should_be() -> None:
    assert violations(good()) == []


def lose(seen: Witnesses) -> None:
    del seen.episodes["c"]


def change_reward(seen: Witnesses) -> None:
    seen.episodes["a"]["reward"] = 0.11


def change_key(seen: Witnesses) -> None:
    seen.episodes["c"]["end_key"] = "other"


def drop_silently(seen: Witnesses) -> None:
    seen.episodes["e"]["lost_reason"] = ""


def take_back(seen: Witnesses) -> None:
    seen.episodes["c"] |= {"state": EpisodeState.DELETED, "how": "engine", "reward": None}


def say_otherwise(seen: Witnesses) -> None:
    seen.episodes["d"]["drop_reason"] = "something else"


def count_the_refused(seen: Witnesses) -> None:
    seen.episodes["g"] |= {"how": "ended", "end_key": "end-g", "reward": 0.7}


def invent(seen: Witnesses) -> None:
    seen.episodes["h"] = row("h", EpisodeState.FINISHED, 0.9)


def claim_twice(seen: Witnesses) -> None:
    seen.episodes["b"]["claim_key"] = seen.episodes["a"]["claim_key"]


def train_twice(seen: Witnesses) -> None:
    seen.engine.append({"trained": "B2", "episodes": {"a": 0.1}})


def train_something_else(seen: Witnesses) -> None:
    seen.engine[1] = {"trained": "B1", "episodes": {"a": 0.1}}


def step_twice(seen: Witnesses) -> None:
    seen.steps.append({"batch_id": "B1"})


def forget_the_step(seen: Witnesses) -> None:
    seen.steps.clear()


def trained_but_never_sent(seen: Witnesses) -> None:
    seen.engine[:] = [{"recorded": "B1"}]


def miscount(seen: Witnesses) -> None:
    seen.pool["completed_episodes"] += 1


def miscount_trained(seen: Witnesses) -> None:
    seen.runs[-1]["trained"] += 1


def another_run(seen: Witnesses) -> None:
    seen.runs.insert(0, seen.runs[0])


def contradict(seen: Witnesses) -> None:
    seen.clients["ann"].append({"violation": "a repeated end got another answer"})


@pytest.mark.parametrize(
    "damage",
    [
        lose,
        change_reward,
        change_key,
        drop_silently,
        take_back,
        say_otherwise,
        count_the_refused,
        invent,
        claim_twice,
        train_twice,
        train_something_else,
        step_twice,
        forget_the_step,
        trained_but_never_sent,
        miscount,
        miscount_trained,
        another_run,
        contradict,
    ],
)
def test_what_is_wrong_is_seen(damage: Callable[[Witnesses], None]) -> None:
    seen = copy.deepcopy(good())
    damage(seen)
    assert violations(seen)
