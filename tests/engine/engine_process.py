"""The swarm server's part, played by a test: spawns a real engine process and speaks the link with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import psutil

from swarm.job import TrainJob, dump_job
from swarm.link.leftovers import remove_segments
from swarm.link.messages import (
    BatchReady,
    BootProgress,
    Goodbye,
    Message,
    ResolvedConfig,
    Resume,
    Role,
    RolloutReady,
    StepDone,
    Stop,
    WeightsSynced,
)
from swarm.link.server import EngineLink
from swarm.server.engine.supervisor import engine_environment
from swarm.tokens import ModelCall, Timeline, TrainBatch
from swarm.types import StepResult

M = TypeVar("M")

#: Where the tests of the engine train and serve: ``cpu`` or ``cuda``.
DEVICE = os.environ.get("SWARM_TEST_DEVICE", "cpu")
#: The largest difference of (log-)probabilities, of vLLM and of the trainer, of the same tokens: fp32 and bf16.
TOLERANCE = {"cpu": 1e-3, "cuda": 0.02}[DEVICE]
#: A rate at which a step changes log-probabilities by more than twice that.
LEARNING_RATE = {"cpu": 1e-3, "cuda": 1e-2}[DEVICE]


class EngineProcess:
    """``python -m adapters.verl`` with a link; an async context manager that leaves nothing running."""

    def __init__(self, job: TrainJob, run_dir: Path) -> None:
        self.job = job
        self.run_dir = run_dir
        self.token = secrets.token_hex(16)
        self.link = EngineLink(self.token)
        self.boot: list[tuple[float, Role, str]] = []
        self.config: dict[str, Any] = {}
        self.syncs: list[WeightsSynced] = []

    def job_text(self) -> str:
        """What the engine reads as its job."""
        return dump_job(self.job)

    async def __aenter__(self) -> Self:
        await self.link.__aenter__()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / "job.yaml"
        path.write_text(self.job_text())
        self.began, self.began_at = time.monotonic(), time.time()
        with (self.run_dir / "engine.log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "adapters.verl",
                str(path),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=engine_environment(self.link.address, self.token, self.run_dir, None) | self._environment(),
            )
        return self

    def _environment(self) -> dict[str, str]:
        # a machine without a compiler serves, too, and one whose GPUs are hidden; on GPUs vLLM compiles by default
        return {} if self.job.device == "cuda" else {"CXX": "/no/compiler", "CUDA_VISIBLE_DEVICES": ""}

    async def __aexit__(self, *exc: Any) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        killed = self.processes()
        for process in killed:
            # it may be ending by itself
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self.process.wait()
        await asyncio.to_thread(psutil.wait_procs, killed, 5.0)
        # the supervisor's part, when a test killed the engine
        if (ray := self.run_dir / "ray").is_symlink():
            shutil.rmtree(ray.resolve(), ignore_errors=True)
            ray.unlink(missing_ok=True)
            remove_segments(self.began_at, before=time.time() - 1.0)
        await self.link.__aexit__(None, None, None)

    async def expect(self, kind: type[M], seconds: float) -> M:
        """The next message of ``kind``; on the way boot progress is recorded and weight syncs are acknowledged.

        Raises:
            AssertionError: the engine finished, or nothing came in time.
        """
        async with asyncio.timeout(seconds):
            while True:
                role, message = await self.link.receive()
                self._note(role, message)
                if isinstance(message, WeightsSynced):
                    self.syncs.append(message)
                    await self.link.send("rollout", Resume())
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, Goodbye), f"the engine finished: {message.error}\n{self.tail()}"

    def _note(self, role: Role, message: Message) -> None:
        if isinstance(message, BootProgress):
            self.boot.append((time.monotonic() - self.began, role, message.stage))
        elif isinstance(message, ResolvedConfig):
            self.config = message.config

    async def train(self, batch: TrainBatch, seconds: float) -> tuple[StepResult, RolloutReady | None]:
        """Send ``batch``; its result and, unless it was the last step, the announcement of the next one."""
        await self.link.send("rollout", BatchReady(batch=batch))
        done = await self.expect(StepDone, seconds)
        if done.result.step >= self.job.total_training_steps:
            return done.result, None
        return done.result, await self.expect(RolloutReady, seconds)

    async def stop(self, seconds: float = 30.0) -> Goodbye:
        """Ask the engine to end, and wait until its main process has."""
        for role in self.link.roles:
            await self.link.send(role, Stop())
        finished = await self.expect(Goodbye, seconds)
        async with asyncio.timeout(seconds):
            await self.process.wait()
        return finished

    def tail(self, lines: int = 40) -> str:
        """The last lines of the engine's log."""
        return "\n".join((self.run_dir / "engine.log").read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """Living processes of this run: those whose environment carries its token."""
        return processes_with("SWARM_LINK_TOKEN", self.token)


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Living processes whose environment has ``variable=value``, which a daemon that left its parent keeps."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        # it may be gone, or somebody else's
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value:
                found.append(process)
    return found


def title(process: psutil.Process) -> str:
    """What a process calls itself; empty once it is gone."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition`` came true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


async def sample(client: httpx.AsyncClient, ready: RolloutReady, text: str, max_tokens: int, **more: Any) -> ModelCall:
    """One chat completion of the engine's vLLM with its token ids, as the data plane records it."""
    answer = await client.post(
        f"http://{ready.addresses[0]}/v1/chat/completions",
        json={
            "model": ready.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": True,
            "return_token_ids": True,
            **more,
        },
    )
    answer.raise_for_status()
    body = answer.json()
    choice = body["choices"][0]
    return ModelCall(
        call_id=body["id"],
        prompt_ids=body["prompt_token_ids"],
        response_ids=choice["token_ids"],
        logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
        min_policy_version=ready.policy_version,
        max_policy_version=ready.policy_version,
        finish_reason=choice["finish_reason"],
    )


def timeline(call: ModelCall) -> Timeline:
    """The timeline of a single call."""
    return Timeline(
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        response_mask=[1] * len(call.response_ids),
        logprobs=call.logprobs,
        min_policy_version=call.min_policy_version,
        max_policy_version=call.max_policy_version,
        num_calls=1,
    )
