"""The production path on a tiny random model: real Ray, verl and vLLM, driven over the link by the test."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from adapters.verl.export import exported
from swarm.job import TrainJob
from swarm.link.messages import BatchReady, Goodbye, RolloutReady, StepDone
from swarm.server.dataplane.replica_client import ReplicaClient, UpstreamRefusalError
from swarm.tokens import ModelCall, Timeline, TrainBatch, TrainGroup, Trajectory
from tests.adapters.verl import saved_checkpoint
from tests.engine import tiny_model
from tests.engine.engine_process import DEVICE, LEARNING_RATE, TOLERANCE, EngineProcess, sample, timeline, title, until
from tests.standins import vllm_rules

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
pytest.importorskip("verl", reason="needs the cpu extra")

BOOT_TIMEOUT = 600.0
STEP_TIMEOUT = 180.0
#: Tokens of which vLLM samples fewer while a step is computed.
LONGEST_ANSWER = 512
FIXED = [10, 20, 30, 40, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as opened:
        yield opened


def make_job(model: Path, **changes: Any) -> TrainJob:
    return TrainJob.model_validate(
        {
            "model": str(model),
            "device": DEVICE,
            "batch_size": 2,
            "num_repeat": 4,
            "max_prompt_length": 128,
            "max_response_length": 64,
            "lr": LEARNING_RATE,
            "total_training_steps": 10,
            "serving": "always",
        }
        | changes
    )


async def two_turns(client: httpx.AsyncClient, ready: RolloutReady) -> list[Timeline]:
    """Two timelines: a call continued token by token after an observation of three tokens, and a separate call."""
    first = await sample(client, ready, "one", max_tokens=8, ignore_eos=True)
    observed = [11, 12, 13]
    answer = await client.post(
        f"http://{ready.addresses[0]}/v1/completions",
        json={
            "model": ready.model,
            "prompt": [*first.prompt_ids.tolist(), *first.response_ids.tolist(), *observed],
            "max_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": 0,
            "return_token_ids": True,
        },
    )
    choice = answer.raise_for_status().json()["choices"][0]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    joined = Timeline(
        prompt_ids=first.prompt_ids,
        response_ids=[*first.response_ids, *observed, *ids],
        response_mask=[1] * len(first.response_ids) + [0] * len(observed) + [1] * len(ids),
        logprobs=[*first.logprobs, *[0.0] * len(observed), *logprobs],
        min_policy_version=ready.policy_version,
        max_policy_version=ready.policy_version,
        num_calls=2,
    )
    return [joined, timeline(await sample(client, ready, "two", max_tokens=8))]


async def make_batch(client: httpx.AsyncClient, ready: RolloutReady, sizes: dict[str, int] | None = None) -> TrainBatch:
    """By default a full group, whose last trajectory has two timelines, and a group that lacks a trajectory."""
    rewards = random.Random(ready.policy_version)

    async def episode(task: str, number: int) -> Trajectory:
        if (task, number) == ("a", 3):
            timelines = await two_turns(client, ready)
        else:
            timelines = [timeline(await sample(client, ready, f"topic {task}", max_tokens=16))]
        return Trajectory(
            episode_uuid=uuid.uuid4().hex,
            task_id=task,
            reward=rewards.random(),
            timelines=timelines,
            num_calls=sum(line.num_calls for line in timelines),
        )

    groups = [
        TrainGroup(task_id=task, trajectories=await asyncio.gather(*(episode(task, i) for i in range(size))))
        for task, size in (sizes or {"a": 4, "b": 3}).items()
    ]
    return TrainBatch(batch_id=uuid.uuid4().hex, groups=groups)


async def served_logprobs(client: httpx.AsyncClient, ready: RolloutReady, ids: list[int] = FIXED) -> list[float]:
    """log p(ids[i] | ids[:i]) for i > 0, by vLLM."""
    answer = await client.post(
        f"http://{ready.addresses[0]}/v1/completions",
        json={"model": ready.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
    )
    entries = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]


def reference_logprobs(folder: Path, ids: list[int] = FIXED) -> list[float]:
    """The same by transformers, from a checkpoint in Hugging Face layout."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [logits[i, token].item() for i, token in enumerate(ids[1:])]


def distance(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


async def check_tools_are_refused(ready: RolloutReady) -> None:
    """Where the model knows no tools, vLLM refuses what would let it call one; whoever asks is told what to do."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    named = {"type": "function", "function": {"name": "add"}}
    body = {"model": ready.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [tool]}
    url = f"http://{ready.addresses[0]}/v1/chat/completions"
    upstream = ReplicaClient()
    try:
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": named}):
            with pytest.raises(UpstreamRefusalError) as caught:
                await upstream.post(url, body | choice)
            assert caught.value.status == 400
            assert caught.value.body()["error"]["code"] == "no_tool_call_parser", (choice, caught.value.body())
        assert (await upstream.post(url, body | {"tool_choice": "none"}))["choices"]
    finally:
        await upstream.close()


def listening(engine: EngineProcess) -> set[str]:
    """The addresses at which processes of the run take TCP connections."""
    addresses: set[str] = set()
    for process in engine.processes():
        # one that Ray has no work for may be ending
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.net_connections("tcp")
            addresses |= {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}
    return addresses


def segments() -> set[str]:
    shm = Path("/dev/shm")
    return {path.name for path in shm.iterdir()} if shm.is_dir() else set()


async def check_requests_outlive_a_weight_sync(
    engine: EngineProcess, client: httpx.AsyncClient, ready: RolloutReady, checkpoint: Path
) -> RolloutReady:
    """vLLM serves while the trainer computes, and no request ends with the weight sync: each of its tokens has the
    log-probability of the old weights (``checkpoint``) before the sync, of the new ones after it."""
    calls: list[ModelCall] = []
    synced = asyncio.Event()

    async def user(number: int) -> None:
        while not synced.is_set():
            # of different lengths, so that they do not all end at the same moment, which may be that of the sync; and
            # longer than a step, for who asks may get a processor once the step is computed, and no sooner
            tokens = LONGEST_ANSWER - 64 * number
            calls.append(await sample(client, ready, f"user {number}", max_tokens=tokens, ignore_eos=True))

    users = [asyncio.create_task(user(number)) for number in range(4)]
    await engine.link.send("rollout", BatchReady(batch=await make_batch(client, ready)))
    await engine.expect(StepDone, STEP_TIMEOUT)
    following = await engine.expect(RolloutReady, STEP_TIMEOUT)
    synced.set()
    await asyncio.gather(*users)
    assert {call.finish_reason for call in calls} == {"length"}
    told = engine.syncs[-1].sampled
    assert told is not None
    switches: list[tuple[int, int]] = []
    for call in calls:
        ids = [*call.prompt_ids.tolist(), *call.response_ids.tolist()]
        answered = slice(len(call.prompt_ids) - 1, None)
        old, new = (
            reference_logprobs(checkpoint, ids)[answered],
            (await served_logprobs(client, following, ids))[answered],
        )
        sampled = call.logprobs.tolist()
        of_old, of_new = (
            [distance([a], [b]) < TOLERANCE for a, b in zip(of, sampled, strict=True)] for of in (old, new)
        )
        fits = [n for n in range(len(sampled) + 1) if all(of_old[:n]) and all(of_new[n:])]
        assert fits, "its tokens are of neither weights, or of both by turns"
        # vLLM does not know what it had not taken up at the sync
        assert min(told.get(call.call_id, {}).get(0, 0), len(sampled)) in fits, (fits, told)
        switches.append((fits[0], len(sampled)))
    assert any(0 < switch < end for switch, end in switches), f"no request was running at the sync: {switches}"
    return following


async def test_trains_what_was_sampled_and_serves_what_was_trained(
    model: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    before = segments()
    job = make_job(model, save_freq=2, max_response_length=LONGEST_ANSWER)
    async with EngineProcess(job, tmp_path / "run") as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        assert engine.config["actor_rollout_ref"]["rollout"]["n"] == 4
        assert engine.config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["tool_call_parser"] is None
        assert {"starting Ray", "starting vLLM", "first weight sync"} <= {stage for _, _, stage in engine.boot}
        assert (ready.model, ready.policy_version, ready.next_step) == ("tiny", 0, 1)
        assert all(address.startswith("127.0.0.1:") for address in ready.addresses)
        assert listening(engine) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert (tmp_path / "run" / "ray").stat().st_mode & 0o777 == 0o700
        assert distance(await served_logprobs(client, ready), reference_logprobs(model)) < TOLERANCE

        await check_tools_are_refused(ready)

        for step in (1, 2):
            batch = await make_batch(client, ready)
            result, following = await engine.train(batch, STEP_TIMEOUT)
            assert following is not None
            ready = following
            assert (result.step, result.batch_id, ready.policy_version) == (step, batch.batch_id, step)
            # what the trainer computes for the sampled tokens is what vLLM sampled them with, masked tokens included
            assert result.metrics["training/rollout_probs_diff_max"] < TOLERANCE
            # 8 rows of 7 trajectories: one optimizer step
            assert (result.metrics["swarm/rows"], result.metrics["swarm/padding_rows"]) == (8, 0)
            assert 0 < result.metrics["swarm/unique_tokens"] <= result.metrics["swarm/tokens"]
            assert result.metrics["actor/grad_norm"] > 0

        served = await served_logprobs(client, ready)
        # what is taken out of the run while it goes on is what it serves, and what its answers were sampled from
        taken = tmp_path / "taken"
        with exported(tmp_path / "run" / "checkpoints" / "global_step_2", taken, str(model)) as written:
            assert (written.dtype, written.lora) == ("float32", False)
        assert distance(served, reference_logprobs(taken)) < TOLERANCE
        assert distance(served, reference_logprobs(model)) > 2 * TOLERANCE, "two steps changed nothing"
        call = await sample(client, ready, "taken", max_tokens=16, ignore_eos=True)
        ids = [*call.prompt_ids.tolist(), *call.response_ids.tolist()]
        assert distance(reference_logprobs(taken, ids)[len(call.prompt_ids) - 1 :], call.logprobs.tolist()) < TOLERANCE

        ready = await check_requests_outlive_a_weight_sync(engine, client, ready, taken)
        assert (await sample(client, ready, "after", max_tokens=4)).finish_reason in ("stop", "length")

        assert await engine.stop() == Goodbye()
        assert engine.process.returncode == 0
        assert await until(lambda: not engine.processes(), seconds=10), engine.processes()
        assert not (tmp_path / "run" / "ray").is_symlink()
        assert segments() <= before

    # what the server does after a crash: the next run goes on from the last checkpoint
    async with EngineProcess(job.model_copy(update={"resume": True}), tmp_path / "run") as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        assert (ready.policy_version, ready.next_step) == (2, 3)
        assert distance(await served_logprobs(client, ready), served) < TOLERANCE
        result, following = await engine.train(await make_batch(client, ready), STEP_TIMEOUT)
        assert following is not None
        assert (result.step, following.policy_version) == (3, 3)


async def test_kl_loss_trains_rows_of_any_number_and_a_dead_vllm_is_noticed(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    # a model that was taken out of a run of two ranks
    trained = saved_checkpoint.build(tmp_path / "tiny")
    checkpoint = saved_checkpoint.write(tmp_path / "global_step_1", trained, tmp_path / "tiny", ranks=2)
    trained.save_pretrained(tmp_path / "trained")
    with exported(checkpoint, tmp_path / "mine", "tiny"):
        pass
    async with EngineProcess(
        make_job(tmp_path / "mine", num_repeat=2, kl_coef=0.01, mini_batch_num=2, serving="between_steps"),
        tmp_path / "run",
    ) as engine:
        ready = await engine.expect(RolloutReady, BOOT_TIMEOUT)
        assert distance(await served_logprobs(client, ready), reference_logprobs(tmp_path / "trained")) < TOLERANCE
        await stand_ins_are_as_strict(ready)
        # as many groups, and as large, as the collection method gives: the job's two, fewer, more
        batches = [({"a": 2, "b": 2}, 0), ({"a": 4}, 1), ({"a": 2, "b": 4, "c": 3}, 3), ({"a": 2, "b": 1}, 1)]
        for sizes, padding in batches:
            result, following = await engine.train(await make_batch(client, ready, sizes), STEP_TIMEOUT)
            assert following is not None
            ready = following
            # the last of four has two timelines
            timelines = sum(sizes.values()) + (sizes["a"] == 4)
            assert (result.metrics["swarm/rows"], result.metrics["swarm/padding_rows"]) == (timelines, padding)
            assert result.metrics["actor/grad_norm"] > 0
        assert result.metrics["actor/kl_loss"] > 0, "after one step the policy is no longer the reference"

        # vLLM's HTTP server outlives the process that computes
        family = [*psutil.Process(engine.process.pid).children(recursive=True), *engine.processes()]
        cores = {process for process in family if "EngineCore" in title(process)}
        assert cores, [title(process) for process in family]
        for core in cores:
            core.kill()
        async with asyncio.timeout(60):
            while not isinstance(message := (await engine.link.receive())[1], Goodbye):
                pass
        assert message.error.startswith("vLLM died: the replica at "), engine.tail()


async def test_an_engine_that_cannot_sample_is_never_ready_and_says_why(tmp_path: Path) -> None:
    model = await asyncio.to_thread(tiny_model.build, tmp_path / "model", head_dim=16)
    async with EngineProcess(make_job(model), tmp_path / "run") as engine:
        async with asyncio.timeout(BOOT_TIMEOUT):
            while not isinstance(message := (await engine.link.receive())[1], Goodbye | RolloutReady):
                pass
        assert isinstance(message, Goodbye), "it is said to be ready"
        assert message.cause.startswith("RuntimeError: Unsupported CPU attention configuration: head_dim=16")
        assert message.error == f"vLLM died: {message.cause}", engine.tail()


async def stand_ins_are_as_strict(ready: RolloutReady) -> None:
    """vLLM answers each case as the stand-ins do."""
    cases = [
        *vllm_rules.CASES,
        *vllm_rules.WITHOUT_TOOL_PARSER,
        *vllm_rules.WITHOUT_REASONING_PARSER,
        *vllm_rules.WITHOUT_EYES,
        *vllm_rules.too_long(128 + 64),
    ]
    url = f"http://{ready.addresses[0]}"
    unpooled = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=unpooled) as vllm:
        for case in cases:
            await vllm_rules.check(vllm, case, ready.model)
    # our client, which pools connections: a refusal breaks nobody else's call
    refused = [vllm_rules.request(case, ready.model) for case in cases if case.refused and case.path == vllm_rules.CHAT]
    upstream = ReplicaClient()
    try:
        for body in refused:
            with pytest.raises(UpstreamRefusalError):
                await upstream.post(f"{url}{vllm_rules.CHAT}", body)
        assert (await upstream.post(f"{url}{vllm_rules.CHAT}", vllm_rules.request(cases[0], ready.model)))["choices"]
    finally:
        await upstream.close()
