"""Kills of ``up`` and of what it started, at seeded moments under traffic, each followed by the same command.

Invariant: whatever it starts is dead when it returns; its folder then holds the witnesses of
:mod:`tests.kill.invariants`. The servers are real; the engine is the stand-in or, with ``model``, the real one.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from swarm.checkpoints import saved_step
from swarm.http.serve import bind
from swarm.job import TrainJob
from swarm.states import EpisodeState
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import REWARD
from tests.kill.drivers import GIVE_UP_AFTER
from tests.kill.invariants import (
    Witnesses,
    contradictions,
    doubled_claims,
    doubled_training,
    foreign_rewards,
    lines,
    lost_rewards,
    wrong_counts,
)
from tests.kill.up import ENGINE_VARIABLE
from tests.ports import free_ports
from tests.standins.engine import FOLDER_VARIABLE
from tests.up_process import COMMAND, ROOT, Up, Users

#: How often which is killed.
VICTIMS = {"up": 0.4, "gateway": 0.2, "server": 0.2, "trainer": 0.2}
CLIENTS = ("ann", "eve")
#: What users may be told: without a server or a gateway nobody listens.
_ANSWERS = (0, 200, 503)
#: Words in the command lines of what ``up`` starts, and in the titles of the real trainer's processes.
_GATEWAY, _SERVER = ("serve",), ("swarm", "start")
_TRAINER = ("TaskRunner", "WorkerDict", "SwarmCpuWorker", "adapters.verl")


@dataclass
class Deadlines:
    """Seconds; a real engine boots for a minute or more on a busy machine."""

    ready: float = 180.0
    progress: float = 180.0
    gone: float = 45.0
    finish: float = 180.0


@dataclass
class GoingOn:
    """One run: ``up``, its users, clients that write down what they were promised, and whoever kills.

    Args:
        folder: of everything.
        model: path of a model for the real engine; ``None``: the stand-in.

    Attributes:
        enough: once it is set, nothing more is killed.
        kills: of each victim.
        origins: of each start after a kill: the step that was saved by then, and the one that it went on from.
        wrong: what does not hold, in words.
        witnesses: at the end.
    """

    folder: Path
    seed: int
    model: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    enough: threading.Event = field(default_factory=threading.Event)
    kills: Counter[str] = field(default_factory=Counter)
    origins: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    witnesses: Witnesses = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        # of each `up` that was killed or ended: until no process of it was left
        self._gone: list[float] = []
        # what `up` said of the trainers that were killed
        self._reasons: Counter[str] = Counter()
        self._ports = free_ports(2)
        self.users = Users(f"http://127.0.0.1:{self._ports[1]}/v1", patience=GIVE_UP_AFTER)
        self._up: Up | None = None
        self._clients: list[subprocess.Popen[bytes]] = []
        self._job = self._write()

    def run(self, kills: int) -> None:
        """Kill ``kills`` times, let everything finish in peace, stop it, go on once more, and collect the witnesses.

        Raises:
            AssertionError: something did not start, go on, or end in time; says what.
        """
        began = time.monotonic()
        with self._everything():
            self._start()
            self._clients += [self._client(name) for name in CLIENTS]
            # a kill before the first checkpoint may rightly begin anew
            self._until(lambda: self._saved() > 0, self.deadlines.ready, "there is no first checkpoint")
            for number, victim in enumerate(self._plan(kills), 1):
                if not self.enough.is_set():
                    seconds = time.monotonic() - began
                    print(f"{seconds:6.0f} s  kill {number} of {kills}: {victim}", file=sys.stderr, flush=True)
                    self._kill_one(victim)
            self._until(lambda: self._acknowledged() > kills, self.deadlines.progress, "too few ends were acknowledged")
            self._until(lambda: self._answered() > kills, self.deadlines.progress, "too few users were answered")
            (self.folder / "stop").touch()
            for client in self._clients:
                assert client.wait(self.deadlines.finish) == 0, self._last("client.log")
            self.users.leave()
            self._stop()
            self._again()
            pool = self._settled()
            self._stop()
            for port in self._ports:
                bind("127.0.0.1", port).close()
        seen = Witnesses.read(self.folder, CLIENTS, pool, engine=self.model is None)
        # users end episodes through the gateway, which nobody writes down
        written = {uuid: row for uuid, row in seen.episodes.items() if row["client_uuid"] in CLIENTS}
        self.wrong += [
            *(f"a user was answered: {one}" for one in self.users.answers if one.status not in _ANSWERS),
            *contradictions(seen),
            *lost_rewards(seen),
            *foreign_rewards(replace(seen, episodes=written)),
            *doubled_claims(seen),
            *(doubled_training(seen) if self.model is None else steps_twice(seen)),
            *wrong_counts(seen),
        ]
        self.witnesses, self._seconds = seen, time.monotonic() - began

    def summary(self) -> dict[str, Any]:
        """What it has shown, in a few numbers."""
        gone = sorted(self._gone)
        return {
            "seed": self.seed,
            "seconds": round(self._seconds, 1),
            "kills": dict(self.kills),
            "starts": len(self.origins),
            "of_these_from_the_last_saved_step": sum(origin >= saved for saved, origin in self.origins),
            "origins": self.origins,
            "until_nothing_was_left": {"most": round(gone[-1], 1), "middle": round(gone[len(gone) // 2], 1)},
            "trainers_died_of": dict(self._reasons),
            "answers_of_users": dict(Counter(one.status or "refused" for one in self.users.answers)),
            "acknowledged_rewards": len(self.witnesses.acknowledged),
            "journal": dict(Counter(one["state"] for one in self.witnesses.episodes.values())),
            "steps": len(self.witnesses.steps),
            "violations": self.wrong,
        }

    # ------------------------------------------------------------------ the command

    def _write(self) -> TrainJob:
        write_hooks(self.folder / "hooks", REWARD)
        model = self.model
        if model is None:
            model = self.folder / "stand-in"
            model.mkdir()
            (model / "config.json").write_text("{}")
        job: dict[str, Any] = {
            "model": str(model),
            "batch_size": 3,
            "num_repeat": 2,
            "max_parallel_episodes": 16,
            "max_staleness": 5,
            "save_freq": 2,
            "serving": "always",
        }
        if self.model is not None:
            job |= {"device": "cpu", "max_prompt_length": 256, "max_response_length": 16, "lr": 1e-5}
        swarm: dict[str, Any] = {"run_dir": "run", "port": self._ports[0]}
        if self.model is None:
            swarm |= {"stop_grace": 1.0}
        gateway: dict[str, Any] = {
            "hooks": "hooks",
            "port": self._ports[1],
            # episodes of a gateway that was killed are soon given to others
            **dict.fromkeys(("claim_wait_seconds", "submit_timeout_seconds"), 10.0),
            # a trainer that was killed is there again in this time, on a busy machine too
            "sample_timeout_seconds": 30.0,
        }
        text = yaml.safe_dump({"job": job, "swarm": swarm, "gateway": gateway})
        (self.folder / "up.yaml").write_text(text)
        return TrainJob.model_validate(job)

    def _spawn(self) -> Up:
        if self.model is not None:
            return Up(self.folder / "up.yaml")
        env = {FOLDER_VARIABLE: str(self.folder), ENGINE_VARIABLE: "recording"}
        return Up(self.folder / "up.yaml", (*COMMAND[:-1], "tests.kill.up"), env)

    def _start(self) -> None:
        self._up = self._spawn()
        self._up.expect("ready", self.deadlines.ready)

    def _again(self) -> None:
        """The same command once more: it goes on from what is saved."""
        saved = self._saved()
        self._start()
        told = [one for one in self.up.seen if one["event"] == "going_on"]
        if not told:
            self.wrong.append(f"`up` did not say that it goes on, at step {saved}: {self.up.seen}")
        self._check_origin(saved)

    def _check_origin(self, saved: int) -> None:
        """The weights that serve now are those of the step that was ``saved``, or of a later one."""
        if self.model is None:
            origin = [line["version"] for line in self._engine_lines() if "started" in line][-1]
        else:
            origin = self._status()["engine"]["global_step"]
        self.origins.append((saved, origin))
        if origin < saved:
            self.wrong.append(f"it went on from step {origin}, and step {saved} was saved")

    @property
    def up(self) -> Up:
        assert self._up is not None
        return self._up

    def _saved(self) -> int:
        return saved_step(self._job, self.folder / "run")

    # ------------------------------------------------------------------ killing

    def _plan(self, kills: int) -> list[str]:
        plan = [name for name in VICTIMS for _ in range(round(kills * VICTIMS[name]))][:kills]
        plan += self._random.choices(list(VICTIMS), k=kills - len(plan))
        self._random.shuffle(plan)
        return plan

    def _kill_one(self, victim: str) -> None:
        moment = self._random.random()
        if moment < 0.7:
            # there was something to lose since the last one
            enough = self._acknowledged() + self._random.randint(1, 12)
            self._until(lambda: self._acknowledged() >= enough, self.deadlines.progress, "no ends were acknowledged")
        time.sleep(self._random.uniform(0.0, 0.6))
        self.kills[victim] += 1
        if victim in ("gateway", "trainer"):
            self._kill_part(victim)
            # what `up` cures by itself; the same command is run again nevertheless
            if self._random.random() < 0.5:
                self._stop()
                self._again()
            return
        if victim == "up":
            self.up.process.kill()
        else:
            self.up.child(*_SERVER).kill()
        code = self.up.process.wait(self.deadlines.gone)
        assert code in (1, -signal.SIGKILL), code
        self._after_death()

    def _kill_part(self, victim: str) -> None:
        if victim == "gateway":
            self.up.child(*_GATEWAY).kill()
            self.up.expect("gateway_recovered", self.deadlines.ready)
            return
        saved = self._saved()
        if self.model is None:
            pid = [line["started"] for line in self._engine_lines() if "started" in line][-1]
            os.kill(pid, signal.SIGKILL)
        else:
            self._random.choice(self._trainers()).kill()
        self.up.expect("recovered", self.deadlines.ready)
        self._reasons[[one for one in self.up.seen if "reason" in one][-1]["reason"]] += 1
        self._check_origin(saved)

    def _after_death(self) -> None:
        """Run the command again, at once as a service manager would, or once nothing is left."""
        began, before = time.monotonic(), self.up
        if at_once := self._random.random() < 0.5:
            self._again()
        self._nothing_left(before, began)
        if not at_once:
            self._again()

    def _stop(self) -> None:
        """A Ctrl-C, after which nothing is left at once."""
        began = time.monotonic()
        assert self.up.interrupt() == 0, self.up.seen[-5:]
        self._nothing_left(self.up, began)

    def _nothing_left(self, up: Up, began: float) -> None:
        self._until(lambda: not up.processes(), self.deadlines.gone, f"left behind: {up.processes()}")
        self._gone.append(time.monotonic() - began)

    def _trainers(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in self.up.processes():
            with contextlib.suppress(psutil.Error):
                if any(name in " ".join(process.cmdline()) for name in _TRAINER):
                    found.append(process)
        return found

    # ------------------------------------------------------------------ traffic

    def _client(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / "client.log").open("ab") as output:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.kill.client",
                    name,
                    str(self._ports[0]),
                    str(self.folder),
                    f"{self.seed}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @contextlib.contextmanager
    def _everything(self) -> Generator[None]:
        try:
            with self.users:
                yield
        finally:
            (self.folder / "stop").touch()
            if self._up is not None:
                self._up.end()
            for client in self._clients:
                client.kill()
                client.wait()

    def _acknowledged(self) -> int:
        paths = [self.folder / f"{name}.jsonl" for name in CLIENTS]
        return sum(path.read_bytes().count(b'"acked"') for path in paths if path.exists())

    def _answered(self) -> int:
        return sum(one.status == 200 for one in self.users.answers)

    def _engine_lines(self) -> list[dict[str, Any]]:
        path = self.folder / "engine.jsonl"
        return lines(path) if path.exists() else []

    def _status(self) -> dict[str, Any]:
        return httpx.get(f"http://127.0.0.1:{self._ports[0]}/status", timeout=30, trust_env=False).json()

    def _settled(self) -> dict[str, Any]:
        """The pool's last word once nothing runs and no batch is out or ready."""
        status: dict[str, Any] = {}

        def quiet() -> bool:
            status.update(self._status())
            pool = status["pool"]
            rolls = status["engine"]["engine_status"] == "ENGINE.ROLLING"
            idle = not pool["running_episodes"] and not pool["batched_episodes"]
            return rolls and idle and pool["completed_tasks"] < self._job.batch_size

        self._until(quiet, self.deadlines.finish, "the pool does not come to rest")
        return status["pool"]

    def _until(self, condition: Callable[[], bool], within: float, otherwise: str) -> None:
        deadline = time.monotonic() + within
        while not condition():
            told = self._up.seen[-3:] if self._up is not None else []
            assert time.monotonic() < deadline, f"{otherwise} within {within:g} s; {told}"
            time.sleep(0.02)

    def _last(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-3000:]


def steps_twice(seen: Witnesses) -> list[str]:
    """Where no engine wrote down what it trained: each batch has one step, and its episodes no other batch."""
    recorded = Counter(step["batch_id"] for step in seen.steps)
    wrong = [f"batch {batch_id} has {count} recorded steps" for batch_id, count in recorded.items() if count > 1]
    trained = {row["batch_id"] for row in seen.episodes.values() if row["state"] == EpisodeState.TRAINED}
    return wrong + [f"episodes of batch {one} count as trained without a step" for one in trained - recorded.keys()]
