"""Throttle policies: what is sent with a claim, and ratios that follow the step."""

from __future__ import annotations

import pytest

from swarm.client import SwarmClient, SwarmThrottlePolicy, ThrottleSchedule
from swarm.errors import RequestError
from swarm.states import EngineState
from tests.swarm.client.scripted import ScriptedServer
from tests.swarm.client.test_sync import claimed, engine, not_yet


def test_ratios_change_at_their_steps() -> None:
    schedule = ThrottleSchedule([(10, 0.8), (100, 0.4)], expected_batch_size=8).for_task("t")
    assert [schedule.at(step).ratio for step in (0, 10, 99, 100, 5000)] == [0.8, 0.8, 0.8, 0.4, 0.4]
    assert schedule.at(0) == SwarmThrottlePolicy(ratio=0.8, expected_batch_size=8, current_task_id="t")


@pytest.mark.parametrize("ratios", [[], [(5, 1.0), (5, 2.0)], [(9, 1.0), (3, 1.0)]])
def test_steps_must_rise(ratios: list[tuple[int, float]]) -> None:
    with pytest.raises(RequestError, match="rising steps"):
        ThrottleSchedule(ratios)


def test_a_misspelt_field_is_refused(server: ScriptedServer, client: SwarmClient) -> None:
    with pytest.raises(RequestError, match="expected_batchsize: Extra inputs"):
        client.begin_episode(throttle_policy={"ratio": 1.0, "expected_batchsize": 4})
    assert server.requests == []


def test_what_is_no_policy_is_refused_by_its_name(server: ScriptedServer, client: SwarmClient) -> None:
    with pytest.raises(RequestError, match="throttle_policy"):
        client.begin_episode(throttle_policy=0.5)  # type: ignore[arg-type]
    assert server.requests == []


def test_no_time_at_all_is_refused(server: ScriptedServer, client: SwarmClient) -> None:
    with pytest.raises(RequestError, match="max_episode_seconds: Input should be greater than 0"):
        client.begin_episode(max_episode_seconds=0)
    assert "/claim_episode" not in str(server.requests)


def test_every_poll_carries_the_ratio_of_its_step(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/get_engine_status", engine(EngineState.ROLLING, step=1), engine(EngineState.ROLLING, step=2))
    server.script("/claim_episode", not_yet("throttled: 4 of 4 tasks"), claimed())
    client.begin_episode(throttle_policy=ThrottleSchedule(lambda step: 1.0 / step).for_task("t"))
    policies = [body["throttle_policy"] for body in server.bodies("/claim_episode")]
    assert [policy["ratio"] for policy in policies] == [1.0, 0.5]
    assert {policy["current_task_id"] for policy in policies} == {"t"}
