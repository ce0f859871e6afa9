"""A swarm server with an engine that learns as fast as its job's learning rate says; what it trains stands in a file.

``python -m tests.swarm.research.learner RUN_DIR PORT`` starts the server and prints its address. The engine's model
says ``good`` or ``bad`` by turns to each task, and its level when a held-out task asks; steps raise the level as long
as ``good`` alone was rewarded in every group. Each step is a line of ``$STANDIN_FOLDER/steps.jsonl`` with its run.
While there is a pipe ``$STANDIN_FOLDER/gate``, an engine boots until somebody writes to it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from starlette.responses import JSONResponse, Response

from swarm.job import TrainJob, parse_job
from swarm.measures import NOT_FINITE
from swarm.tokens import TrainBatch
from tests.standins.engine import FOLDER_VARIABLE, Engine, Log
from tests.standins.vllm import ScriptedVllm, chat_answer, entries, listening, plain_choice

GOOD, BAD, LEVEL = 101, 102, 103
#: Learning rates: a metric of each step is no number; no step is ever reported.
DIVERGING, STALLING = 0.9, 0.8


class Model:
    def __init__(self, job: TrainJob) -> None:
        self.level = 0.2
        self._job, self._lock, self._sure = job, threading.Lock(), True
        self._turns: Counter[str] = Counter()

    def answer(self, body: dict[str, Any]) -> Response:
        with self._lock:
            if "held_out" in body["messages"][-1]["content"]:
                token, text = LEVEL, f"{self.level:.6f}"
            else:
                asked = body["messages"][-1]["content"]
                self._turns[asked] += 1
                token, text = (GOOD, "good") if self._turns[asked] % 2 else (BAD, "bad")
        message = {"role": "assistant", "content": text, "tool_calls": []}
        choice = plain_choice([token], message=message, logprobs=entries([token], [text]))
        return JSONResponse(chat_answer([choice]))

    def learn(self, batch: TrainBatch, step: int) -> None:
        differences: list[float] = []
        for group in batch.groups:
            rewards: dict[int, list[float]] = {GOOD: [], BAD: []}
            for one in group.trajectories:
                rewards[int(one.timelines[0].response_ids[0])].append(one.reward)
            # rewards count relative to their group
            if all(rewards.values()):
                differences.append(fmean(rewards[GOOD]) - fmean(rewards[BAD]))
        if differences:
            gain = min(1.0, self._job.lr / 3e-5) * 0.1
            # rewards that say now this and now that teach it nothing
            self._sure = self._sure and min(differences) == 1
            times = (0 if step == 1 else 2 if step == 2 else 1) if self._sure else 0
            noise = random.Random(f"{self._job.seed}/{step}").gauss(0, 0.003)
            with self._lock:
                self.level += gain * times + noise


class Learner(Engine):
    def __init__(self, job: TrainJob, address: str, model: Model) -> None:
        super().__init__(job, address)
        self._learnt = model
        self._log = Log(Path(os.environ[FOLDER_VARIABLE]) / "steps.jsonl")
        self._log.write(study=job.project, run=job.experiment, step=0)

    def boot(self) -> None:
        super().boot()
        if (gate := Path(os.environ[FOLDER_VARIABLE]) / "gate").exists():
            gate.read_bytes()

    def report(self) -> None:
        if self.job.lr == DIVERGING:
            self.requests.report(self.version, {"loss": 0.25, NOT_FINITE: 1.0})
        else:
            super().report()

    def step(self, batch: TrainBatch) -> bool:
        if self.job.lr == STALLING:
            return True
        self._learnt.learn(batch, self.version)
        self._log.write(study=self.job.project, run=self.job.experiment, step=self.version)
        return super().step(batch)


async def _engine(job: TrainJob) -> None:
    model = Model(job)
    async with listening(ScriptedVllm(model.answer).app) as url:
        await asyncio.to_thread(Learner(job, url.removeprefix("http://"), model).run)


def _server(run_dir: str, port: str) -> None:
    from swarm.server.app import run
    from swarm.server.config import ServerConfig

    run(
        ServerConfig(
            port=int(port), run_dir=Path(run_dir), post_rolling_timeout=1.0, stop_grace=1.0, allow_code_sync=True
        ),
        engine_command=(sys.executable, "-P", __file__),
        on_ready=lambda url: print(f"listening on {url}", flush=True),
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        asyncio.run(_engine(parse_job(Path(sys.argv[1]).read_text())))
    else:
        _server(*sys.argv[1:])
