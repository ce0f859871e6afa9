"""A stand-in engine process that speaks the real link: both roles, scripted by its arguments.

``python fake_engine.py MODE JOB.yaml`` with MODE one of ``train`` (a step per batch), ``one_step`` (then Finished),
``crash`` (traceback while booting), ``broken`` (Finished with an error), ``misconfigured`` (with one of its job),
``failing`` (the same as ``broken`` once it has a batch),
``lingering`` (the same once it rolls, and then five seconds to clean up), ``mute`` (never says Hello), ``silent``
(stops beating once it rolls), ``stubborn`` (ignores Stop; leaves a daemon, a shared-memory segment and a Ray folder),
``stuttering`` (as ``train``, but sends each request once more when it has its batch), ``late`` (reports its step only
after Stop), ``torn`` (reports its step after it has said that it failed). ``train:imports`` tells of the synced code
what it imports, ``train:elsewhere`` that it imports another.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

from swarm.job import parse_job
from swarm.link.batches import BatchRequests
from swarm.link.code import CODE_VARIABLE, imported, top_level
from swarm.link.engine import EngineEnd
from swarm.link.messages import BatchReady, BootProgress, CodeImported, Finished, ResolvedConfig, RolloutReady, Stop

BOUND = time.monotonic() + 60
METRICS = {"loss": 0.25}


def main(mode: str, job_path: str, vllm: str = "127.0.0.1:1") -> None:
    job = parse_job(Path(job_path).read_text())
    mode, _, code = mode.partition(":")
    print("the engine starts", flush=True)
    if mode == "mute":
        time.sleep(60)
    with EngineEnd.from_environment("driver") as driver, EngineEnd.from_environment("rollout") as rollout:
        driver.send(ResolvedConfig(config={"lr": job.lr}))
        driver.send(BootProgress(stage="loading the model", detail="shard 1/2"))
        if mode == "crash":
            raise RuntimeError("out of memory")
        if mode in ("broken", "misconfigured"):
            driver.send(Finished(error="no such tokenizer", wrong_config=mode == "misconfigured"))
            return
        if mode == "stubborn":
            leave_traces()
        if code:
            files = imported(top_level(Path(os.environ[CODE_VARIABLE])))
            told = files if code == "imports" else dict.fromkeys(files, "/elsewhere/mine.py")
            rollout.send(CodeImported(processes={"the driver": files, "a Ray worker": told}))
        train(mode, driver, rollout, vllm)


def train(mode: str, driver: EngineEnd, rollout: EngineEnd, vllm: str) -> None:
    version = 0
    requests = BatchRequests(rollout)
    requests.ask([vllm], "m", version, version + 1)
    if mode == "lingering":
        driver.send(Finished(error="out of memory"))
        time.sleep(5)
        return
    if mode == "silent":
        rollout.receive(timeout=1.0)  # by then the link's thread has sent the above
        os.kill(os.getpid(), signal.SIGSTOP)
    while time.monotonic() < BOUND:
        before = requests.batch_id
        match rollout.receive(timeout=1.0):
            case BatchReady() as message if requests.take(message):
                version += 1
                if mode == "late":
                    continue
                if mode in ("failing", "torn"):
                    driver.send(Finished(error="out of memory"))
                    if mode == "torn":
                        time.sleep(0.5)  # the server has heard of the failure by now
                        requests.report(version, METRICS)
                    return
                if mode == "stuttering":
                    rollout.send(request(vllm, version - 1, before))
                requests.report(version, METRICS)
                if mode == "stuttering":
                    rollout.send(request(vllm, version - 1, before))
                if mode == "one_step":
                    driver.send(Finished())
                    return
                requests.ask([vllm], "m", version, version + 1)
            case Stop() if mode == "late":
                requests.report(version, METRICS)
                return
            case Stop() if mode != "stubborn":
                driver.send(Finished())
                return
            case _:
                pass


def request(vllm: str, version: int, last_batch: str) -> RolloutReady:
    return RolloutReady(
        addresses=[vllm], model="m", policy_version=version, next_step=version + 1, last_batch=last_batch
    )


def leave_traces() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_dir = Path(os.environ["SWARM_RUN_DIR"])
    # as Ray does: a daemon in a session of its own, whose parent is gone
    spawn = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, start_new_session=True).pid)"
    daemon = subprocess.run([sys.executable, "-c", spawn], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    child = subprocess.Popen(["sleep", "60"])
    segment = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    (run_dir / "ray" / "session_1").mkdir(parents=True)
    (run_dir / "traces").write_text(f"{daemon} {child.pid} {segment.name}")


if __name__ == "__main__":
    # MODE or MODE@ADDRESS, where its vLLM is
    main(sys.argv[1].partition("@")[0], sys.argv[2], sys.argv[1].partition("@")[2] or "127.0.0.1:1")
