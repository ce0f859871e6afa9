"""Whether credit for a session's outcome teaches what rewards of single answers cannot, with the real verl and vLLM.

``python -m benchmarks credit``: three arms of three seeds, each with an engine of its own; its figures are in
``docs/sessions.md``. A session has three turns; in each the user says a digit, and to say it again is right. The tiny
model has been taught to say digits, somewhat more often the right one. No answer is judged by itself beyond that it is
a digit; when the session is over, ``/end`` tells the share of its right answers, as a number from -1 to 1.

======== ===========================================================================
arm      what trains
======== ===========================================================================
session  the reward of each answer, and the outcome as credit
answers  the reward of each answer alone (``session_weight: 0``)
shuffled as session, with the outcomes permuted among the sessions of a step
======== ===========================================================================

A step trains all answers of some sessions. Printed for each arm: the share of right answers in the first and in the
last quarter of the steps, the mean over the seeds with its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import up
from swarm.intervals import mean_interval

ARMS = ("session", "answers", "shuffled")
TURNS, ANSWERS = 3, 2
DIGITS = "0123456789"
#: of the answers that the model learns from; the others are any digit
TAUGHT_RIGHT, TAUGHT_STEPS = 0.3, 300
ANSWER_SECONDS, STEP_SECONDS = 300.0, 120.0
REWARD = """\
def on_compute_relative_reward(task, candidates, context):
    return [float(one.text.strip() in tuple("0123456789")) for one in candidates]
"""
OUTCOME = """\
def on_session_end(session, context):
    return session.feedback.rating
"""


@dataclass
class Arm:
    """One run: the share of right answers in each step's sessions; ``credited`` turns, and those where it came late."""

    arm: str
    seed: int
    right: list[float] = field(default_factory=list[float])
    credited: int = 0
    credit_dropped: int = 0
    seconds: float = 0.0


def teach(folder: Path, seed: int) -> Path:
    """A tiny model in ``folder`` that answers a digit with a digit, somewhat more often with the same one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.engine import tiny_model

    tiny_model.build(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    draw = random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(TAUGHT_STEPS):
        rows: list[list[int]] = []
        labels: list[list[int]] = []
        for _ in range(16):
            messages: list[dict[str, str]] = []
            places: list[tuple[int, int]] = []
            for _ in range(TURNS):
                digit = draw.choice(DIGITS)
                messages.append({"role": "user", "content": digit})
                before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                said = digit if draw.random() < TAUGHT_RIGHT else draw.choice(DIGITS)
                places.append((len(tokenizer.encode(before)), tokenizer.encode(said)[0]))
                messages.append({"role": "assistant", "content": said})
            row = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
            assert all(row[place] == token for place, token in places), (
                "an answer has another token than it begins with"
            )
            rows.append(row)
            labels.append([row[at] if at in dict(places) else -100 for at in range(len(row))])
        loss = network(torch.tensor(rows), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    network.save_pretrained(folder)
    return folder


async def talk(http: httpx.AsyncClient, name: str, digits: list[str]) -> int:
    """One session; returns how many answers were right."""
    messages: list[dict[str, str]] = []
    right = 0
    for digit in digits:
        messages.append({"role": "user", "content": digit})
        body = {"model": "policy", "messages": messages, "max_tokens": 1}
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-swarm-session": name})
        said = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": said})
        right += said.strip() == digit
    return right


async def train(urls: dict[str, str], arm: Arm, options: argparse.Namespace) -> None:
    """Hold the sessions of one step after another until all steps are done."""
    draw = random.Random(arm.seed)
    async with httpx.AsyncClient(base_url=urls["gateway"], trust_env=False, timeout=ANSWER_SECONDS) as http:
        for step in range(1, options.steps + 1):
            names = [f"{step}-{number}" for number in range(options.sessions)]
            right = await asyncio.gather(*(talk(http, name, draw.choices(DIGITS, k=TURNS)) for name in names))
            arm.right.append(statistics.fmean(right) / TURNS)
            told = draw.sample(right, len(right)) if arm.arm == "shuffled" else right
            for name, count in zip(names, told, strict=True):
                said = {"score": 2 * count / TURNS - 1, "task": "copy"}
                (await http.post(f"/v1/sessions/{name}/end", json=said)).raise_for_status()
            await step_done(http, urls["swarm server"], step)
            print(f"{arm.arm} {arm.seed}: step {step}, {arm.right[-1]:.3f} right", file=sys.stderr, flush=True)
        counts = (await http.get("/status")).json()["sessions"]
        arm.credited, arm.credit_dropped = counts["credited"], counts["credit_dropped"]


async def step_done(http: httpx.AsyncClient, server: str, step: int) -> None:
    """Wait until ``step`` is done."""
    deadline = time.monotonic() + STEP_SECONDS
    while True:
        status = (await http.get(f"{server}/status", params={"steps": 0})).raise_for_status().json()
        if status["engine"]["global_step"] >= step and status["engine"]["engine_status"] == "ENGINE.ROLLING":
            return
        if status["engine_failure"] is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} does not come: {status['engine']} {status['engine_failure']}")
        await asyncio.sleep(0.1)


def summary(arms: list[Arm]) -> dict[str, Any]:
    """The figures of all seeds of one arm."""
    quarter = max(1, len(arms[0].right) // 4)
    return {
        "seeds": len(arms),
        "first": interval([statistics.fmean(arm.right[:quarter]) for arm in arms]),
        "last": interval([statistics.fmean(arm.right[-quarter:]) for arm in arms]),
        "credited": sum(arm.credited for arm in arms),
        "credit_dropped": sum(arm.credit_dropped for arm in arms),
        "seconds": [round(arm.seconds) for arm in arms],
    }


def interval(values: list[float]) -> dict[str, float]:
    """The mean of a few values with its 95 % interval, which one value alone has not."""
    mean, low, high = mean_interval(values, 0.95)
    ends = {"low": round(low, 3), "high": round(high, 3)} if len(values) > 1 else {}
    return {"mean": round(mean, 3), **ends}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--sessions", type=int, default=16, help="of each step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", choices=ARMS, nargs="+", default=ARMS)
    parser.add_argument("--json", type=Path, help="write the report, with all runs, there")


def run(options: argparse.Namespace) -> None:
    arms: list[Arm] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(options.seeds):
            model = teach(Path(place) / f"model-{seed}", seed)
            for name in options.only:
                began = time.monotonic()
                arms.append(arm := Arm(name, seed))
                groups = options.sessions * TURNS
                job = {
                    "model": str(model),
                    "batch_size": groups,
                    "num_repeat": ANSWERS,
                    # all groups of a step wait for the ends of their sessions: no more than half of the slots
                    "max_parallel_episodes": 2 * groups * ANSWERS,
                    "max_prompt_length": 128,
                    "max_response_length": 8,
                    "serving": "between_steps",
                    "lr": options.lr,
                    "seed": seed,
                }
                gateway = {"session_weight": float(name != "answers"), "session_discount": 1.0}
                with up(Path(place) / f"{name}-{seed}", job, gateway, REWARD, OUTCOME) as urls:
                    asyncio.run(train(urls, arm, options))
                arm.seconds = time.monotonic() - began
                print(json.dumps(asdict(arm)), file=sys.stderr, flush=True)
    report = {
        "steps": options.steps,
        "sessions": options.sessions,
        "lr": options.lr,
        "load": os.getloadavg()[0],
        "arms": {name: summary([arm for arm in arms if arm.arm == name]) for name in options.only},
    }
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report | {"runs": [asdict(arm) for arm in arms]}) + "\n")
