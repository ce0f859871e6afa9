"""``/metrics``: it is Prometheus text, it counts what happens, and it does not grow with who does it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.types import StepResult
from tests.swarm.server.conftest import Rig, ready

pytestmark = pytest.mark.anyio


async def scrape(rig: Rig) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await rig.client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_a_step_from_claim_to_record(rig: Rig) -> None:
    for task, reward in (("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)):
        episode = await rig.claim(throttle_policy={"current_task_id": task})
        await episode.chat()
        await episode.end(task, reward)
    found = await scrape(rig)
    assert found["swarm_pool_episodes", (("state", "waiting"),)] == 4
    assert found["swarm_pool_groups", (("state", "complete"),)] == 2
    batch = await rig.controller.next_batch()
    assert (await scrape(rig))["swarm_pool_episodes", (("state", "in_batch"),)] == 4
    rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=3.0))
    rig.controller.rollout_ready(ready(rig.vllm_address, 1, batch.batch_id))
    # one that is dropped, one that is given up, one that runs
    await (await rig.claim()).end("c")
    aborted = await rig.claim()
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=aborted.uuid)
    await rig.claim()

    found = await scrape(rig)
    assert found["swarm_engine_state", (("state", "rolling"),)] == 1
    assert sum(value for (name, _), value in found.items() if name == "swarm_engine_state") == 1
    assert found["swarm_policy_version", ()] == 1
    assert (found["swarm_step_seconds_count", ()], found["swarm_step_seconds_sum", ()]) == (1, 3.0)
    assert found["swarm_step_seconds_bucket", (("le", "5.0"),)] == 1
    assert found["swarm_episodes_total", (("outcome", "trainable"),)] == 4
    assert found["swarm_episodes_total", (("outcome", "untrainable"),)] == 1
    assert found["swarm_episodes_total", (("outcome", "aborted"),)] == 1
    assert found["swarm_claimed_episodes_total", (("type", "train"),)] == 7
    assert found["swarm_dropped_episodes_total", (("cause", "no completed LLM call was recorded in the episode"),)] == 1
    assert found["swarm_trained_episodes_total", ()] == 4
    assert found["swarm_tokens_total", (("kind", "sampled"),)] == 8
    assert found["swarm_tokens_total", (("kind", "trained"),)] == 8
    assert found["swarm_pool_episodes", (("state", "running"),)] == 1
    assert found["swarm_claim_wait_seconds_count", ()] == 7
    assert [found["swarm_clients", (("state", state),)] for state in ("active", "silent")] == [1, 0]
    assert found["swarm_replicas", (("state", "healthy"),)] == 1
    assert found["swarm_replica_calls_total", (("address", rig.vllm_address),)] == 4
    assert found["swarm_journal_commits_total", ()] > 0 and found["swarm_journal_bytes", ()] > 0
    assert found["swarm_journal_failing", ()] == 0
    requests = (("method", "POST"), ("route", "/end_episode"), ("status", "200"))
    assert found["swarm_requests_total", requests] == 5
    chat = "/episodes/{episode_uuid}/v1/chat/completions"
    assert found["swarm_request_seconds_count", (("route", chat),)] == 4


async def train(rig: Rig, step: int) -> None:
    """Do a step of two groups."""
    for task, reward in (("a", 0.0), ("a", 1.0), ("b", 0.5), ("b", 0.5)):
        episode = await rig.claim(throttle_policy={"current_task_id": task})
        await episode.chat()
        await episode.end(task, reward)
    batch = await rig.controller.next_batch()
    rig.controller.step_done(StepResult(step=step, batch_id=batch.batch_id, metrics={}, seconds=3.0))
    rig.controller.rollout_ready(ready(rig.vllm_address, step, batch.batch_id))


async def evaluate(rig: Rig, *rewards: float) -> None:
    """End an eval episode with each of ``rewards``."""
    for reward in rewards:
        tried = await rig.claim(episode_type="eval")
        await tried.chat()
        await tried.end("held out", reward)


async def test_an_evaluation_that_goes_on_is_no_last_one(rig: Rig) -> None:
    """By an alert its mean would be the best of the week, though it was of the episode that ended first."""
    await train(rig, 1)
    await evaluate(rig, 0.0, 1.0)
    await train(rig, 2)
    await evaluate(rig, 1.0)
    found = await scrape(rig)
    assert (found["swarm_evaluation_step", ()], found["swarm_evaluation_reward_mean", ()]) == (1, 0.5)
    await evaluate(rig, 0.5)
    found = await scrape(rig)
    assert (found["swarm_evaluation_step", ()], found["swarm_evaluation_reward_mean", ()]) == (2, 0.75)


async def test_what_the_last_step_and_the_last_evaluation_say_of_learning(rig: Rig) -> None:
    assert not [name for name, _ in await scrape(rig) if name.startswith(("swarm_step_reward", "swarm_evaluation"))]
    await train(rig, 1)
    await evaluate(rig, 0.75)
    found = await scrape(rig)
    assert found["swarm_step_reward_mean", ()] == 0.5
    assert found["swarm_step_reward_spread", ()] == pytest.approx(0.125**0.5)
    assert found["swarm_step_informative_group_share", ()] == 0.5
    assert found["swarm_trained_groups_total", (("informative", "true"),)] == 1
    assert found["swarm_trained_groups_total", (("informative", "false"),)] == 1
    assert found["swarm_evaluation_reward_mean", ()] == 0.75
    assert (found["swarm_evaluation_step", ()], found["swarm_evaluation_episodes", ()]) == (1, 1)


async def test_the_alert_of_an_engine_that_warns_sees_each_warning(rig: Rig) -> None:
    """Its disk of checkpoints fills and empties again; of the warnings, ``/status`` keeps the latest."""
    for count in range(1, 41):
        rig.controller.engine.warn(f"the checkpoint of step {count} is not written")
        assert (await scrape(rig))["swarm_engine_warnings", ()] == count
    assert len((await rig.client.get("/status")).json()["warnings"]) < 40


async def test_neither_callers_nor_tasks_add_time_series(rig: Rig) -> None:
    async def visit(n: int) -> None:
        episode = await rig.claim(f"client-{n}", throttle_policy={"current_task_id": f"task-{n}"})
        await episode.chat()
        await episode.end(f"task-{n}")
        await rig.client.get(f"/nonsense/{n}")
        await rig.client.get(f"/episodes/{n}/v1/models")
        await rig.client.request(f"VERB{n}", "/status")

    await visit(0)
    before = set(await scrape(rig))
    for n in range(1, 5):
        await visit(n)
    assert set(await scrape(rig)) - before <= {
        ("swarm_requests_total", (("method", "GET"), ("route", "/metrics"), ("status", "200"))),
        *(key for key in await scrape(rig) if key[1] and ("route", "/metrics") in key[1]),
    }
