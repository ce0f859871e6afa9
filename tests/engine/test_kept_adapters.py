"""A kept version and the newest side by side in one engine: each request of a mixed batch has its own adapter."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from adapters.verl.export import exported
from swarm.job import TrainJob
from swarm.kept_adapters import BASE, MOST_KEPT, adapter_folder, kept_model
from swarm.link.messages import RolloutReady
from swarm.tokens import ModelCall
from tests.engine.engine_process import TOLERANCE, EngineProcess, sample
from tests.engine.test_engine import (
    BOOT_TIMEOUT,
    FIXED,
    STEP_TIMEOUT,
    distance,
    make_batch,
    make_job,
    reference_logprobs,
    served_logprobs,
)
from tests.engine.tiny_model import build

pytestmark = [pytest.mark.long, pytest.mark.anyio]
pytest.importorskip("verl", reason="needs the cpu extra")

KEPT = 1
#: Longer than a block of vLLM's cache.
PROMPTS = [f"{number}{'xyz?' * 50}" for number in range(8)]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as opened:
        yield opened


def asked_for(ready: RolloutReady, version: int) -> RolloutReady:
    return msgspec.structs.replace(ready, model=kept_model(ready.model, version))


def off(calls: list[ModelCall], folder: Path) -> float:
    """The largest difference of the log-probabilities of what was sampled from those of the model in ``folder``."""
    far = 0.0
    for call in calls:
        ids = [*call.prompt_ids.tolist(), *call.response_ids.tolist()]
        answered = reference_logprobs(folder, ids)[len(call.prompt_ids) - 1 :]
        far = max(far, distance(answered, call.logprobs.tolist()))
    return far


async def check_sides(client: httpx.AsyncClient, ready: RolloutReady, sides: Mapping[int | None, Path]) -> None:
    """Requests of all sides at once, twice, so that vLLM has the prompts in its cache; ``None``: the newest."""
    for _ in range(2):
        asked = [(side, prompt) for prompt in PROMPTS for side in sides]
        answers = await asyncio.gather(
            *(
                sample(client, ready if side is None else asked_for(ready, side), prompt, 16, ignore_eos=True)
                for side, prompt in asked
            )
        )
        for side, folder in sides.items():
            calls = [answer for (of, _), answer in zip(asked, answers, strict=True) if of == side]
            far = await asyncio.to_thread(off, calls, folder)
            print(f"{len(calls)} answers of {'the newest' if side is None else side} in a mixed batch are off by {far}")
            assert far < TOLERANCE


async def trained(engine: EngineProcess, client: httpx.AsyncClient, ready: RolloutReady) -> RolloutReady:
    result, following = await engine.train(await make_batch(client, ready), STEP_TIMEOUT)
    assert following is not None and result.metrics["swarm/adapter_difference"] < TOLERANCE
    return following


async def check_a_kept_version_outlives_a_sync(
    engine: EngineProcess, client: httpx.AsyncClient, ready: RolloutReady, folder: Path
) -> RolloutReady:
    """Whoever it answers while the newest weights sync gets its tokens alone."""
    calls: list[ModelCall] = []
    done = asyncio.Event()

    async def user(number: int) -> None:
        while not done.is_set():
            calls.append(await sample(client, asked_for(ready, KEPT), f"user {number}", 64 - 9 * number))

    users = [asyncio.create_task(user(number)) for number in range(3)]
    following = await trained(engine, client, ready)
    done.set()
    await asyncio.gather(*users)
    assert await asyncio.to_thread(off, calls, folder) < TOLERANCE
    return following


async def refused(client: httpx.AsyncClient, ready: RolloutReady, version: int) -> str:
    body: dict[str, Any] = {"model": kept_model(ready.model, version), "prompt": FIXED, "max_tokens": 1}
    answer = await client.post(f"http://{ready.addresses[0]}/v1/completions", json=body)
    assert answer.status_code == 404
    return answer.json()["error"]["message"]


async def cached(client: httpx.AsyncClient, ready: RolloutReady) -> int:
    """Tokens of a prompt of :data:`PROMPTS` that vLLM has in its cache."""
    body = {"model": ready.model, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 1}
    answer = await client.post(f"http://{ready.addresses[0]}/v1/chat/completions", json=body)
    return answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def write(checkpoint: Path, folder: Path, job: TrainJob, *, merged: bool = False) -> None:
    """Beside the event loop: the engine takes a server that is silent for gone."""
    with exported(checkpoint, folder, job.model, merged=merged):
        pass


async def test_a_kept_version_answers_beside_the_newest(tmp_path: Path, client: httpx.AsyncClient) -> None:
    model, run_dir = build(tmp_path / "tiny"), tmp_path / "run"
    job = make_job(
        model,
        lora={"rank": 4},
        lr=1e-2,
        save_freq=1,
        keep_checkpoints=10,
        max_prompt_length=512,
        overrides={"+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prompt_tokens_details": True},
    )

    async def merged(step: int) -> Path:
        folder = tmp_path / f"merged-{step}"
        if not folder.exists():
            await asyncio.to_thread(write, run_dir / "checkpoints" / f"global_step_{step}", folder, job, merged=True)
        return folder

    async def keep(step: int, version: int) -> None:
        checkpoint = run_dir / "checkpoints" / f"global_step_{step}"
        await asyncio.to_thread(write, checkpoint, adapter_folder(run_dir, version), job)

    async with EngineProcess(job, run_dir) as engine:
        ready = await trained(engine, client, await engine.expect(RolloutReady, BOOT_TIMEOUT))
        assert "cannot be loaded" in await refused(client, ready, KEPT)
        await keep(KEPT, KEPT)
        first = await merged(KEPT)
        sides: dict[int | None, Path] = {KEPT: first, BASE: model}
        await check_sides(client, ready, {**sides, None: first})
        for step in (2, 3):
            ready = await trained(engine, client, ready)
            newest = await merged(step)
            assert distance(reference_logprobs(newest), reference_logprobs(first)) > max(1e-2, 2 * TOLERANCE)
            await check_sides(client, ready, {**sides, None: newest})
        assert min([await cached(client, of) for of in (ready, asked_for(ready, KEPT), asked_for(ready, BASE))]) > 0
        ready = await check_a_kept_version_outlives_a_sync(engine, client, ready, first)
        # what is no adapter is refused, and all others are answered
        (damaged := adapter_folder(run_dir, 7)).mkdir()
        shutil.copy(adapter_folder(run_dir, KEPT) / "adapter_config.json", damaged)
        (damaged / "adapter_model.safetensors").write_bytes(b"no tensors")
        assert "cannot be loaded" in await refused(client, ready, 7)
        # as many more as fit, so that the one that was asked for least lately goes and comes back
        for version in range(11, 11 + MOST_KEPT):
            step = 2 + version % 2
            await keep(step, version)
            await check_sides(client, ready, {version: await merged(step), None: await merged(4)})
        # other weights under its number
        shutil.rmtree(adapter_folder(run_dir, KEPT))
        await keep(2, KEPT)
        await check_sides(client, ready, {KEPT: await merged(2), None: await merged(4)})
        assert distance(await served_logprobs(client, asked_for(ready, KEPT)), reference_logprobs(first)) > 1e-2

    async with EngineProcess(job.model_copy(update={"resume": True}), run_dir) as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        assert ready.policy_version == 4
        await check_sides(client, ready, {KEPT: await merged(2), BASE: model, None: await merged(4)})
