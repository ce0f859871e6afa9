"""One training run on two Ray nodes: real raylets, verl and vLLM, on one machine and a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from swarm.job import TrainJob
from swarm.link.messages import Goodbye, RolloutReady
from tests.cluster.ray_nodes import RayNode
from tests.engine import tiny_model
from tests.engine.engine_process import EngineProcess
from tests.engine.test_engine import distance, make_batch, make_job, reference_logprobs, served_logprobs

pytestmark = [pytest.mark.cluster, pytest.mark.anyio]
pytest.importorskip("verl", reason="needs the cpu extra")

#: a task whose prompt is long enough for the rows of a tiny model to gain by sharing it
LONG = "b " * 45
BOOT_TIMEOUT = 600.0
STEP_TIMEOUT = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as opened:
        yield opened


async def on_both(client: httpx.AsyncClient, ready: RolloutReady) -> list[list[float]]:
    """What each replica gives as log-probabilities of the same tokens."""
    return [
        await served_logprobs(client, msgspec.structs.replace(ready, addresses=[address]))
        for address in ready.addresses
    ]


async def test_two_nodes_train_together_and_serve_the_same_weights(
    model: Path, tmp_path: Path, client: httpx.AsyncClient, nodes: list[RayNode]
) -> None:
    contents = ["model", "optimizer", "extra", "hf_model"]
    job: TrainJob = make_job(
        model,
        nnodes=2,
        batch_size=3,
        num_repeat=3,
        save_freq=2,
        overrides={"actor_rollout_ref.actor.checkpoint.save_contents": contents},
    )
    async with EngineProcess(job, tmp_path / "run") as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        assert {address.partition(":")[0] for address in ready.addresses} == {"127.0.0.2", "127.0.0.3"}
        for served in await on_both(client, ready):
            assert distance(served, reference_logprobs(model)) < 1e-3
        # an odd number of rows; with an odd number of groups one lies on both ranks
        for step, sizes in enumerate(({"a": 4, LONG: 3, "c": 3}, {LONG: 7}, {"a": 4, LONG: 2}), start=1):
            # sampled by one replica or the other
            sampling = msgspec.structs.replace(ready, addresses=ready.addresses[:: (-1) ** step])
            batch = await make_batch(client, sampling, sizes)
            result, following = await engine.train(batch, STEP_TIMEOUT)
            assert following is not None
            ready = following
            assert (result.step, ready.policy_version) == (step, step)
            assert result.metrics["training/rollout_probs_diff_max"] < 1e-3
            rows = sum(sizes.values()) + ("a" in sizes)
            assert (result.metrics["swarm/rows"], result.metrics["swarm/padding_rows"]) == (rows, rows % 2)
            assert 0 < result.metrics["swarm/unique_tokens"] < result.metrics["swarm/tokens"]
            assert result.metrics["actor/grad_norm"] > 0
            one, other = await on_both(client, ready)
            assert distance(one, other) < 1e-5
            if step == 2:
                checkpoint = tmp_path / "run" / "checkpoints" / "global_step_2" / "actor" / "huggingface"
                assert distance(one, reference_logprobs(checkpoint)) < 1e-3
                assert distance(one, reference_logprobs(model)) > 1e-3

        # the other machine dies while the run waits for a batch
        began = asyncio.get_running_loop().time()
        nodes[1].kill()
        async with asyncio.timeout(60):
            while not isinstance(message := (await engine.link.receive())[1], Goodbye):
                pass
        seconds = asyncio.get_running_loop().time() - began
        assert "the node at 127.0.0.3:" in message.error, engine.tail()
        print(f"noticed after {seconds:.1f} s: {message.error}")
        assert seconds < 10
