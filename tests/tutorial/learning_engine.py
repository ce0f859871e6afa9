"""A stand-in engine with a "model" that learns: it speaks the real link and serves vLLM's chat completions.

Its one weight is the share of concise answers. A step moves it towards the kind of answer that had the higher mean
reward, so it rises with real rewards and wanders with shuffled ones, like GRPO would.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.job import TrainJob, parse_job
from swarm.link.batches import BatchRequests
from swarm.link.engine import EngineEnd
from swarm.link.messages import BatchReady, BootProgress, Finished, ResolvedConfig, Stop
from swarm.tokens import TrainBatch

CONCISE, RAMBLING = [7, 7, 7], list(range(20, 36))
DEADLINE = 120


class Policy:
    def __init__(self) -> None:
        self.share = 0.3
        self.random = random.Random(0)
        self.lock = threading.Lock()

    def sample(self) -> list[int]:
        with self.lock:
            return CONCISE if self.random.random() < self.share else RAMBLING

    def learn(self, batch: TrainBatch) -> None:
        for group in batch.groups:
            kinds: dict[bool, list[float]] = {True: [], False: []}
            for trajectory in group.trajectories:
                kinds[trajectory.timelines[0].response_ids.tolist() == CONCISE].append(trajectory.reward)
            if all(kinds.values()):
                better = fmean(kinds[True]) > fmean(kinds[False])
                self.share = min(0.95, max(0.05, self.share + (0.1 if better else -0.1)))


def answer_to(body: dict[str, Any], answers: list[list[int]]) -> dict[str, Any]:
    question = body["messages"][-1]["content"].removesuffix("Answer in one short sentence.").strip(" ?")
    sampled = sum(map(len, answers))
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice(index, tokens, question) for index, tokens in enumerate(answers)],
        "usage": {"prompt_tokens": 3, "completion_tokens": sampled, "total_tokens": 3 + sampled},
        "prompt_token_ids": [1, 2, 3],
    }


def choice(index: int, tokens: list[int], question: str) -> dict[str, Any]:
    text = f"It is about {question} in the language." if tokens == CONCISE else "word " * 60
    return {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in tokens]},
        "finish_reason": "stop" if tokens == CONCISE else "length",
        "token_ids": tokens,
    }


def serve(policy: Policy) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answers = [policy.sample() for _ in range(body.get("n") or 1)]
            data = json.dumps(answer_to(body, answers)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(job: TrainJob) -> None:
    policy = Policy()
    server = serve(policy)
    with EngineEnd.from_environment("driver") as driver, EngineEnd.from_environment("rollout") as rollout:
        requests = BatchRequests(rollout)
        driver.send(ResolvedConfig(config={"lr": job.lr}))
        driver.send(BootProgress(stage="model", detail="loading the model"))
        for version in range(DEADLINE):
            requests.ask([f"127.0.0.1:{server.server_port}"], "m", version, version + 1)
            match rollout.receive(timeout=DEADLINE):
                case BatchReady() as message if batch := requests.take(message):
                    policy.learn(batch)
                    requests.report(version + 1, {})
                case Stop() | None:
                    break
                case other:
                    raise AssertionError(other)
        driver.send(Finished())


if __name__ == "__main__":
    run(parse_job(Path(sys.argv[1]).read_text()))
