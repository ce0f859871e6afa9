"""The engine process without a trainer: it speaks the real link, takes batches, and serves a scripted vLLM.

:func:`command` gives the swarm server's engine command. Kinds that serve a vLLM: ``clients`` (for real clients),
``paced`` (the resilience tests), ``recording``, ``spelling`` (the kill tests). Others use none, or ``KIND@ADDRESS``:

* ``train``: a step per batch; ``train:imports`` reports what the synced code imports, ``train:elsewhere`` that it
  imports other files. ``one_step``: the same, then Finished.
* ``crash`` (traceback while booting), ``broken`` (Finished with an error), ``misconfigured`` (with an error of its
  job), ``failing`` (an error once it has a batch), ``torn`` (the same, and then it reports the step), ``lingering`` (an
  error once it rolls, and then five seconds to clean up).
* ``mute`` (never says Hello), ``silent`` (stops beating once it rolls), ``stubborn`` (ignores Stop; leaves a daemon, a
  shared-memory segment and a Ray folder), ``late`` (reports its step only after Stop), ``stuttering`` (``train``, but
  it sends each request once more when it has its batch), ``mortal`` (its trainer dies with its first batch, and vLLM
  serves on), ``doomed`` (with each batch).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

from swarm.job import TrainJob, parse_job
from swarm.link.engine import ADDRESS_VARIABLE, TOKEN_VARIABLE, BatchRequests, EngineEnd
from swarm.link.imported import CODE_VARIABLE, ImportedCode, imported, top_level
from swarm.link.messages import (
    BatchReady,
    BootProgress,
    CodeImported,
    Goodbye,
    Message,
    ResolvedConfig,
    Resume,
    RolloutReady,
    StartTrainer,
    Stop,
    TrainerDied,
    WeightsSynced,
    WeightSync,
)
from swarm.tokens import TrainBatch

FOLDER_VARIABLE = "STANDIN_FOLDER"


def command(kind: str) -> tuple[str, ...]:
    """Starts an engine of this kind; the server appends the path of the job.

    ``-P``: this folder has modules with the names of packages.
    """
    return sys.executable, "-P", __file__, kind


class Log:
    """Lines that survive the process: each is one write to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **fields: Any) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")


class Link:
    """The ``rollout`` end; it can repeat its last request for a batch."""

    def __init__(self, end: EngineEnd) -> None:
        self._end = end
        self._asked: RolloutReady | None = None

    def send(self, message: Message) -> None:
        if isinstance(message, RolloutReady):
            self._asked = message
        self._end.send(message)

    def repeat(self) -> None:
        if self._asked is not None:
            self._end.send(self._asked)


class Engine:
    """Trains each batch at once, until the server says Stop. Subclasses say what else happens.

    Args:
        address: ``host:port`` of its vLLM.
        lifetime: seconds after which it leaves in any case.
    """

    model = "m"
    server_timeout = 10.0

    def __init__(self, job: TrainJob, address: str, *, lifetime: float = 86400.0) -> None:
        self.job = job
        self.address = address
        self.version = 0
        self._end = time.monotonic() + lifetime

    def run(self) -> None:
        """Connect, and train until the end."""
        with self._connect("driver") as self.driver:
            self.start_trainer()
            with self.rollout:
                self.boot()
                self.ask()
                if self.rolling():
                    self._train()

    def start_trainer(self) -> None:
        """Connect a trainer."""
        self.rollout = self._connect("rollout")
        self.link = Link(self.rollout)
        always = self.job.serving == "always"
        self.requests = BatchRequests(self.link, serving="always" if always else "between_steps")

    def _connect(self, role: Any) -> EngineEnd:
        link, token = os.environ[ADDRESS_VARIABLE], os.environ[TOKEN_VARIABLE]
        return EngineEnd(role, link, token, server_timeout=self.server_timeout, on_lost=lambda: os._exit(1))

    def ask(self) -> None:
        self.requests.ask([self.address], self.model, self.version, self.version + 1)

    def boot(self) -> None:
        """Before the first request for a batch."""
        self.driver.send(ResolvedConfig(config={"lr": self.job.lr}))
        self.driver.send(BootProgress(stage="loading the model", detail="shard 1/2"))
        if folder := os.environ.get(CODE_VARIABLE):
            self.tell_code(Path(folder))

    def tell_code(self, folder: Path) -> None:
        """Tell what is imported of the synced code in ``folder``."""
        here = imported(top_level(folder), folder)
        self.rollout.send(CodeImported(processes={"the driver": here, "a Ray worker": here}))

    def rolling(self) -> bool:
        """After it; whether to train."""
        return True

    def step(self, batch: TrainBatch) -> bool:
        """Train ``batch``, report it as step ``version`` and ask for the next; whether to go on."""
        self.report()
        self.ask()
        return True

    def report(self) -> None:
        if self.job.serving == "always":
            self.sync()
        self.requests.report(self.version, {"loss": 0.25})

    def sync(self) -> None:
        """Put the weights of ``version`` into vLLM, as far as the server sees it."""
        self.rollout.send(WeightSync())
        self.rollout.send(WeightsSynced(policy_version=self.version))
        while not isinstance(self.rollout.receive(timeout=1.0), Resume | Stop):
            if time.monotonic() > self._end:
                return

    def stop(self) -> bool:
        """The server said Stop; whether to leave."""
        self.driver.send(Goodbye())
        return True

    def _train(self) -> None:
        while time.monotonic() < self._end:
            match self.rollout.receive(timeout=1.0):
                case BatchReady() as message if batch := self.requests.take(message):
                    self.version += 1
                    if not self.step(batch):
                        return
                case Stop() if self.stop():
                    return
                case _:
                    pass


class Failing(Engine):
    """The engine with its ways to fail; ``kind`` is in the module's docstring."""

    def __init__(self, kind: str, job: TrainJob, address: str) -> None:
        super().__init__(job, address, lifetime=60)
        self.kind, _, self.code = kind.partition(":")
        self.deaths = 0
        print("the engine starts", flush=True)
        if self.kind == "mute":
            time.sleep(60)

    def boot(self) -> None:
        super().boot()
        if self.kind == "crash":
            raise RuntimeError("out of memory")
        if self.kind in ("broken", "misconfigured"):
            self._fail("no such tokenizer", wrong_config=self.kind == "misconfigured")
            sys.exit()
        if self.kind == "stubborn":
            leave_traces()

    def tell_code(self, folder: Path) -> None:
        if self.code == "imports":
            super().tell_code(folder)
        elif self.code == "elsewhere":
            here = imported(top_level(folder), folder)
            there = ImportedCode(here.folder, dict.fromkeys(here.locations, "/elsewhere/mine.py"), here.digest)
            self.rollout.send(CodeImported(processes={"the driver": here, "a Ray worker": there}))

    def rolling(self) -> bool:
        if self.kind == "lingering":
            self._fail("out of memory")
            time.sleep(5)
            return False
        if self.kind == "silent":
            self.rollout.close(timeout=60)  # which sends the request for a batch
            os.kill(os.getpid(), signal.SIGSTOP)
        return True

    def step(self, batch: TrainBatch) -> bool:
        if self.kind == "late":
            return True
        if self.kind == "doomed" or (self.kind == "mortal" and not self.deaths):
            self.deaths += 1
            self.version -= 1
            self.rollout.close()
            self.driver.send(TrainerDied(error="out of memory"))
            while not isinstance(message := self.driver.receive(timeout=1.0), StartTrainer | Stop):
                pass
            if isinstance(message, StartTrainer):
                self.start_trainer()
                self.ask()
            return isinstance(message, StartTrainer)
        if self.kind in ("failing", "torn"):
            self._fail("out of memory")
            if self.kind == "torn":
                time.sleep(0.5)  # by then the server knows of the failure
                self.report()
            return False
        if self.kind == "one_step":
            self.report()
            self.driver.send(Goodbye())
            return False
        if self.kind == "stuttering":
            self.link.repeat()
            self.report()
            self.link.repeat()
            self.ask()
            return True
        return super().step(batch)

    def stop(self) -> bool:
        if self.kind == "late":
            self.report()
            return True
        return self.kind != "stubborn" and super().stop()

    def _fail(self, error: str, wrong_config: bool = False) -> None:
        self.driver.send(Goodbye(error=error, wrong_config=wrong_config))


def leave_traces() -> None:
    """Ignore SIGTERM and leave what Ray leaves: a daemon in a session of its own, a child, a segment, a folder."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_dir = Path(os.environ["SWARM_RUN_DIR"])
    spawn = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, start_new_session=True).pid)"
    daemon = subprocess.run([sys.executable, "-c", spawn], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    child = subprocess.Popen(["sleep", "60"])
    segment = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    (run_dir / "ray" / "session_1").mkdir(parents=True)
    (run_dir / "traces").write_text(f"{daemon} {child.pid} {segment.name}")


class Saving(Engine):
    """Notes its steps in ``$STANDIN_FOLDER/engine.jsonl``, begins with ``{"started": pid, "version": v, "address":
    "host:port"}``, and keeps the version of its weights in checkpoints, where and when verl does."""

    #: A killed server's engine leaves soon, so that few are there at a time.
    server_timeout = 4.0

    def boot(self) -> None:
        folder = Path(os.environ["SWARM_RUN_DIR"]) / "checkpoints"
        self._latest = folder / "latest_checkpointed_iteration.txt"
        # as verl: without `resume` it begins with the model
        self.version = int(self._latest.read_text()) if self.job.resume and self._latest.exists() else 0
        batch = self._latest.parent / f"global_step_{self.version}" / "batch"
        self.requests.begin_after(batch.read_text() if batch.exists() else "")
        self.log = Log(Path(os.environ[FOLDER_VARIABLE]) / "engine.jsonl")
        self.log.write(started=os.getpid(), version=self.version, address=self.address)
        super().boot()

    def save(self) -> None:
        """Write a checkpoint if one is due."""
        if not self.job.checkpoint_every or self.version % self.job.checkpoint_every:
            return
        beside = self._latest.with_suffix(".new")
        # a full disk costs the real one its checkpoint, and no more
        with contextlib.suppress(OSError):
            folder = self._latest.parent / f"global_step_{self.version}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "batch").write_text(self.requests.batch_id)
            beside.write_text(str(self.version))
            beside.replace(self._latest)


class Recording(Saving):
    """Notes what it trains, and now and then repeats a request:

    * ``{"trained": batch_id, "step": n, "episodes": {uuid: reward}}``: an attempt, before the server knows of it.
    * ``{"recorded": batch_id}``: the server gave another batch afterwards, which it does only once it has recorded the
      step. Of the last step before a kill the engine cannot know: it gets that batch again unless the server has it.
    """

    def boot(self) -> None:
        self._reported = ""
        super().boot()

    def step(self, batch: TrainBatch) -> bool:
        self._stutter()
        if self._reported and self._reported != batch.batch_id:
            self.log.write(recorded=self._reported)
        _pause(0.1)
        rewards = {one.episode_uuid: one.reward for group in batch.groups for one in group.trajectories}
        self.log.write(trained=batch.batch_id, step=self.version, episodes=rewards)
        self.save()
        _pause(0.05)
        self.report()
        self._reported = batch.batch_id
        self._stutter()
        _pause(0.05)
        self.ask()
        return True

    def _stutter(self) -> None:
        if random.random() < 0.3:
            self.link.repeat()


class Paced(Saving):
    """Takes a moment for each weight sync, and notes ``{"step": n}`` per sync.

    ``$STANDIN_FOLDER/calls.jsonl`` has ``{"asked": text, "ended": "served" or "cancelled", "at": seconds}`` per call,
    on the shared clock. ``GET /counts`` of its vLLM says how many calls run.
    """

    server_timeout = 3.0

    def step(self, batch: TrainBatch) -> bool:
        _pause(0.08)
        self.save()
        self.log.write(step=self.version)
        return super().step(batch)


def _pause(most: float) -> None:
    time.sleep(random.uniform(0.0, most))


async def serve(kind: str, job: TrainJob) -> None:
    """Run an engine whose vLLM is in this process."""
    # only these kinds need a server: the others start faster without its imports
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from tests.standins.models import ObedientVllm, PacedModel
    from tests.standins.spelling import Keeping, SpellingVllm
    from tests.standins.vllm import ScriptedVllm, listening, plain

    engine, vllm = Engine, ScriptedVllm(plain([1, 2, 3, 4, 5, 6]))
    if kind == "clients":
        vllm = ObedientVllm()
    elif kind == "recording":
        engine = Recording
    elif kind == "spelling":
        engine, vllm = Keeping, SpellingVllm()
    elif kind == "paced":
        calls = Log(Path(os.environ[FOLDER_VARIABLE]) / "calls.jsonl")
        paced = PacedModel(lambda text, ended: calls.write(asked=text, ended=ended, at=time.monotonic()))
        vllm = ScriptedVllm(paced.answer)
        vllm.app.routes.append(Route("/counts", lambda request: JSONResponse({"running": paced.running})))
        engine = Paced
    async with listening(vllm.app) as url:
        await asyncio.to_thread(engine(job, url.removeprefix("http://")).run)


def main(kind: str, job_path: str) -> None:
    job = parse_job(Path(job_path).read_text())
    if kind in ("clients", "paced", "recording", "spelling"):
        asyncio.run(serve(kind, job))
    else:
        kind, _, address = kind.partition("@")
        Failing(kind, job, address or "127.0.0.1:1").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
