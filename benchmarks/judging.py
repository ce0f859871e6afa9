"""Whether judgements by keyboard on the page teach, with the real verl and vLLM, and a browser that presses the keys.

``python -m benchmarks judging``: three arms of some seeds, each with an engine of its own; needs Chromium on PATH. A
user says a digit, the tiny model answers with one, and the reward hook is ``feedback``: it knows nothing but what
people say. Who judges likes an answer that repeats the digit; the model has been taught to say digits, somewhat more
often that one.

========= ============================================================================
arm       which key is pressed in each group
========= ============================================================================
judged    the number of an answer that repeats the digit, ``0`` where none does
random    the number of any answer: as many judgements, of no preference
unjudged  none: such a group is not trained
========= ============================================================================

A step trains the groups of one round. Printed for each arm: the share of answers that repeat the digit, in the first
and in the last quarter of the rounds, the mean over the seeds with its 95 % interval (Student's t), and the judgements
per minute.
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

from benchmarks.credit import ANSWER_SECONDS, DIGITS, interval, step_done, teach
from benchmarks.processes import up
from tests.gateway.page.browser import Tab, browser, running

ARMS = ("judged", "random", "unjudged")
ANSWERS = 4
REWARD = """\
from reward_hooks.builtin.feedback import UserFeedback


def on_compute_relative_reward(task, candidates, context):
    return UserFeedback().on_compute_relative_reward(task, candidates, context)
"""
#: There is a hook for the outcome, so that a group stays open until its session ends.
OUTCOME = """\
def on_session_end(session, context):
    return None
"""
_SHOWN = """JSON.stringify({
    asked: document.querySelector('.question > .text')?.innerText.trim(),
    said: [...document.querySelectorAll('.card')].map((card) => card.querySelector('.text').innerText.trim()),
    open: document.querySelector('.hint')?.innerText.includes('Your pick trains') ?? false,
})"""


@dataclass
class Arm:
    """One run: the share of right answers in each round; judgements, those too late to train, and their seconds."""

    arm: str
    seed: int
    right: list[float] = field(default_factory=list[float])
    judgements: int = 0
    late: int = 0
    seconds: float = 0.0


async def ask_all(http: httpx.AsyncClient, names: list[str], draw: random.Random) -> None:
    """Ask for a digit in a session of each name."""

    async def ask(name: str) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": draw.choice(DIGITS)}], "max_tokens": 1}
        (await http.post("/v1/chat/completions", json=body, headers={"x-swarm-session": name})).raise_for_status()

    await asyncio.gather(*(ask(name) for name in names))


async def judge_all(tab: Tab, gateway: str, groups: int, draw: random.Random, arm: Arm) -> None:
    """Go through the newest ``groups`` to judge by keyboard, and judge each as the arm does."""
    await tab.goto(f"{gateway}/ui")
    for view, key in (("Newest", "v"), ("To judge", "Enter")):
        pressed = f"document.querySelector('.views [aria-pressed=true]')?.innerText === '{view}'"
        await tab.until(f"{pressed} && document.querySelectorAll('.row').length >= {groups}")
        await tab.press(key)
    shares: list[float] = []
    began = time.monotonic()
    for number in range(1, groups + 1):
        place = f"document.querySelector('.crumbs span')?.innerText.startsWith('{number} of ')"
        await tab.until(f"{place} && document.querySelectorAll('.card').length === {ANSWERS}")
        shown: dict[str, Any] = json.loads(await tab.js(_SHOWN))
        right = [text == shown["asked"] for text in shown["said"]]
        shares.append(statistics.fmean(right))
        if arm.arm != "unjudged":
            liked = right.index(True) + 1 if any(right) else 0
            await tab.press(str(liked if arm.arm == "judged" else draw.randint(1, ANSWERS)))
            await tab.until("/^You (picked|said)/.test(document.querySelector('.hint')?.innerText ?? '')")
            arm.judgements += 1
            arm.late += not shown["open"]
        if number < groups:
            await tab.press("j")
    arm.seconds += time.monotonic() - began
    arm.right.append(statistics.fmean(shares))


async def train(urls: dict[str, str], chromium: str, arm: Arm, options: argparse.Namespace) -> None:
    """One round after another: the users ask, somebody judges, the groups close, a step is trained."""
    draw = random.Random(arm.seed)
    async with (
        httpx.AsyncClient(base_url=urls["gateway"], trust_env=False, timeout=ANSWER_SECONDS) as http,
        browser(chromium) as chrome,
        chrome.tab() as tab,
    ):
        for number in range(1, options.rounds + 1):
            names = [f"{number}-{group}" for group in range(options.groups)]
            await ask_all(http, names, draw)
            await judge_all(tab, urls["gateway"], options.groups, draw, arm)
            for name in names:
                (await http.post(f"/v1/sessions/{name}/end", json={})).raise_for_status()
            if arm.arm != "unjudged":
                await step_done(http, urls["swarm server"], number)
            print(f"{arm.arm} {arm.seed}: round {number}, {arm.right[-1]:.3f} right", file=sys.stderr, flush=True)


def summary(arms: list[Arm]) -> dict[str, Any]:
    """The figures of all seeds of one arm."""
    quarter = max(1, len(arms[0].right) // 4)
    judgements, seconds = sum(arm.judgements for arm in arms), sum(arm.seconds for arm in arms)
    return {
        "seeds": len(arms),
        "first": interval([statistics.fmean(arm.right[:quarter]) for arm in arms]),
        "last": interval([statistics.fmean(arm.right[-quarter:]) for arm in arms]),
        "judgements": judgements,
        "late": sum(arm.late for arm in arms),
        "per_minute": round(60 * judgements / seconds) if seconds else 0,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="of each run; a step each")
    parser.add_argument("--groups", type=int, default=16, help="of each round")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", choices=ARMS, nargs="+", default=ARMS)
    parser.add_argument("--json", type=Path, help="write the report, with all runs, there")


def run(options: argparse.Namespace) -> None:
    arms: list[Arm] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(options.seeds):
            model = teach(Path(place) / f"model-{seed}", seed)
            for name in options.only:
                arms.append(arm := Arm(name, seed))
                job = {
                    "model": str(model),
                    "batch_size": options.groups,
                    "num_repeat": ANSWERS,
                    # all groups of a step are open at once: no more than half of the slots
                    "max_parallel_episodes": 2 * options.groups * ANSWERS,
                    "max_prompt_length": 128,
                    "max_response_length": 8,
                    "serving": "between_steps",
                    "lr": options.lr,
                    "seed": seed,
                }
                gateway = {"ui": {}, "session_weight": 0.0}
                folder = Path(place) / f"{name}-{seed}"
                with up(folder, job, gateway, REWARD, OUTCOME) as urls, running(folder / "chrome") as chromium:
                    asyncio.run(train(urls, chromium, arm, options))
                print(json.dumps(asdict(arm)), file=sys.stderr, flush=True)
    report = {
        "rounds": options.rounds,
        "groups": options.groups,
        "lr": options.lr,
        "load": os.getloadavg()[0],
        "arms": {name: summary([arm for arm in arms if arm.arm == name]) for name in options.only},
    }
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report | {"runs": [asdict(arm) for arm in arms]}) + "\n")
