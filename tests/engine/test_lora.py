"""An adapter on the production path: what users get is sampled with it, and a stale one ends the run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest

from adapters.verl.export import exported
from swarm.link.messages import BatchReady, Goodbye, RolloutReady, StepDone
from tests.engine.engine_process import TOLERANCE, EngineProcess
from tests.engine.test_engine import (
    BOOT_TIMEOUT,
    LONGEST_ANSWER,
    STEP_TIMEOUT,
    check_requests_outlive_a_weight_sync,
    distance,
    make_batch,
    make_job,
    reference_logprobs,
    served_logprobs,
)
from tests.engine.tiny_model import build

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
pytest.importorskip("verl", reason="needs the cpu extra")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as opened:
        yield opened


async def check_a_stale_adapter_ends_the_run(
    engine: EngineProcess, client: httpx.AsyncClient, ready: RolloutReady
) -> None:
    """Tokens that the adapter before sampled, and that are said to be of the present one."""
    stale = await make_batch(client, msgspec.structs.replace(ready, policy_version=ready.policy_version + 1))
    _, following = await engine.train(await make_batch(client, ready), STEP_TIMEOUT)
    assert following is not None
    assert following.policy_version == ready.policy_version + 1
    await engine.link.send("rollout", BatchReady(batch=stale))
    while not isinstance(message := (await engine.link.receive())[1], Goodbye):
        assert not isinstance(message, StepDone), "it was trained"
    assert f"does not sample with the adapter of version {following.policy_version}" in message.error, engine.tail()


async def test_users_are_answered_with_the_adapter_that_is_trained(tmp_path: Path, client: httpx.AsyncClient) -> None:
    model = build(tmp_path / "tiny")
    run_dir = tmp_path / "run"
    job = make_job(
        model,
        lora={"rank": 4},
        lr=1e-2,
        save_freq=2,
        max_response_length=LONGEST_ANSWER,
        overrides={
            "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "tests.engine.counted_sync.CountedSync"
        },
    )
    async with EngineProcess(job, run_dir) as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        served = [await served_logprobs(client, ready)]
        assert distance(served[0], reference_logprobs(model)) < TOLERANCE, "the first adapter changes nothing"
        for step in (1, 2):
            result, following = await engine.train(await make_batch(client, ready), STEP_TIMEOUT)
            assert following is not None
            ready = following
            assert (result.step, ready.policy_version) == (step, step)
            assert result.metrics["actor/grad_norm"] > 0
            assert result.metrics["training/rollout_probs_diff_max"] < TOLERANCE
            assert result.metrics["swarm/adapter_difference"] < TOLERANCE
            served.append(await served_logprobs(client, ready))
        steps = [distance(before, after) for before, after in pairwise(served)]
        assert min(steps) > max(1e-2, 2 * TOLERANCE), "a sync did not change what is sampled"
        taken = tmp_path / "taken"
        with exported(run_dir / "checkpoints" / "global_step_2", taken, str(model), merged=True) as written:
            assert (written.dtype, written.lora, written.adapter) == ("float32", True, False)
        far = distance(served[2], reference_logprobs(taken))
        assert far < TOLERANCE

        synced = [int(line) for line in (run_dir / "synced.txt").read_text().split()]
        whole = sum(file.stat().st_size for file in taken.glob("*.safetensors"))
        print(f"syncs of {synced} bytes, the model has {whole}; each changed log-probs by {steps}, merged is off {far}")
        assert len(synced) == 3 and max(synced) < 0.1 * whole

        ready = await check_requests_outlive_a_weight_sync(engine, client, ready, taken)
        await check_a_stale_adapter_ends_the_run(engine, client, ready)

    # step 4 has a checkpoint; the reference of a KL loss is the base model
    async with EngineProcess(job.model_copy(update={"resume": True, "kl_coef": 0.01}), run_dir) as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        assert ready.policy_version == 4
        with exported(run_dir / "checkpoints" / "global_step_4", tmp_path / "fourth", str(model), merged=True):
            pass
        assert distance(await served_logprobs(client, ready), reference_logprobs(tmp_path / "fourth")) < TOLERANCE
        result, _ = await engine.train(await make_batch(client, ready), STEP_TIMEOUT)
        assert result.metrics["swarm/adapter_difference"] < TOLERANCE
        assert result.metrics["actor/kl_loss"] > 0
