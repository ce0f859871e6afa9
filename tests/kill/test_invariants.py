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
    # killed before the checkpoint, it trains the batch again
    begun, attempt = {"started": 1, "version": 0}, {"trained": "B1", "step": 1, "episodes": {"a": 0.1, "b": 0.2}}
    return Witnesses(
        clients={"ann": lines},
        engine=[attempt, attempt, {"recorded": "B1"}, begun],
        episodes={one["uuid"]: one for one in rows},
        rows=len(rows),
        steps=[{"batch_id": "B1"}],
        runs=[{"trained": 2, "dropped": 2, "quarantined": 0}],
        pool={
            "running_episodes": 0,
            "completed_episodes": 1,
            "batched_episodes": 0,
            "dropped_episodes": 2,
            "quarantined_episodes": 0,
        },
    )


def test_a_run_as_it_should_be() -> None:
    assert violations(good()) == []


def set_row(of: str, **fields: Any) -> Callable[[Witnesses], None]:
    return lambda seen: seen.episodes.setdefault(of, {}).update(fields)


def another_run(seen: Witnesses) -> None:
    seen.runs.insert(0, seen.runs[0])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda seen: seen.episodes.pop("c"), id="lost"),
        pytest.param(set_row("a", reward=0.11), id="another reward"),
        pytest.param(set_row("c", end_key="other"), id="another key"),
        pytest.param(set_row("e", lost_reason=""), id="dropped without a reason"),
        pytest.param(set_row("c", state=EpisodeState.DELETED, how="engine", reward=None), id="taken back"),
        pytest.param(set_row("d", drop_reason="something else"), id="another reason than the client was given"),
        pytest.param(set_row("g", how="ended", end_key="end-g", reward=0.7), id="a refused end counts"),
        pytest.param(set_row("h", **row("h", EpisodeState.FINISHED, 0.9)), id="invented"),
        pytest.param(set_row("b", claim_key="claim-a"), id="claimed twice"),
        pytest.param(
            lambda seen: seen.engine.append({"trained": "B2", "step": 2, "episodes": {"a": 0.1}}), id="trained twice"
        ),
        pytest.param(
            lambda seen: seen.engine.__setitem__(1, {"trained": "B1", "step": 1, "episodes": {"a": 0.1}}),
            id="trained otherwise",
        ),
        pytest.param(lambda seen: seen.steps.append({"batch_id": "B1"}), id="two steps of one batch"),
        pytest.param(lambda seen: seen.steps.clear(), id="no step"),
        pytest.param(lambda seen: seen.engine.__setitem__(slice(2), []), id="trained but never sent"),
        pytest.param(
            lambda seen: seen.engine.insert(1, {"started": 2, "version": 1}), id="trained again by weights that have it"
        ),
        pytest.param(lambda seen: seen.pool.update(completed_episodes=2), id="miscounted"),
        pytest.param(lambda seen: seen.pool.update(batched_episodes=2), id="a batch too many"),
        pytest.param(lambda seen: seen.runs[-1].update(trained=3), id="trained miscounted"),
        pytest.param(another_run, id="another run"),
        pytest.param(lambda seen: seen.clients["ann"].append({"violation": "another answer"}), id="contradicted"),
        pytest.param(lambda seen: seen.clients["ann"].append({"replaced": ["a", "x"]}), id="claimed anew"),
    ],
)
def test_what_is_wrong_is_seen(damage: Callable[[Witnesses], object]) -> None:
    seen = copy.deepcopy(good())
    damage(seen)
    assert violations(seen)
