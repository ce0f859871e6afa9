"""What the hook runner adds to a hook that does nothing, in milliseconds per group.

A group of N answers of 100 words each is scored over and over, one group at a time, by a sync hook (a thread each) and
by an async one; ``blend`` is a gate and two weighted parts, all of them sync. Prints JSON: median and 99th percentile
of the time that passed, and the same of the processor's time in this process, which other load hardly moves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from reward_hooks import Candidate, HookContext, HookRunner, Hooks, Task
from reward_hooks.compose import Blend, BlendConfig, PartConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=8, help="answers per group")
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the report there too")


def trivial(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [0.5] * len(candidates)


async def trivial_async(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [0.5] * len(candidates)


async def measure(runner: HookRunner, size: int, groups: int) -> dict[str, float]:
    """Milliseconds per group, passed and of the processor; the first tenth is not counted."""
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "why? " * 100}]}
    candidates = [
        Candidate(
            index=index,
            message={"role": "assistant", "content": "word " * 100},
            text="word " * 100,
            request=request,
            completion_tokens=100,
        )
        for index in range(size)
    ]
    task = Task(task_id="t", main_query="why?", init_messages=request["messages"])
    context = HookContext(num_repeat=size)
    passed: list[float] = []
    worked: list[float] = []
    for _ in range(groups + groups // 10):
        began, began_working = time.perf_counter(), time.process_time()
        await runner.score(task, candidates, context)
        passed.append((time.perf_counter() - began) * 1e3)
        worked.append((time.process_time() - began_working) * 1e3)
    return _summary("", passed[groups // 10 :]) | _summary("cpu_", worked[groups // 10 :])


def _summary(kind: str, times: list[float]) -> dict[str, float]:
    return {
        f"{kind}median_ms": round(statistics.median(times), 4),
        f"{kind}p99_ms": round(statistics.quantiles(times, n=100, method="inclusive")[98], 4),
    }


def run(options: argparse.Namespace) -> None:
    parts = [PartConfig(hook="gate", gate=0.5), PartConfig(hook="first"), PartConfig(hook="second")]
    blend = Blend(BlendConfig(parts=parts), [Hooks(trivial)] * 3)
    hooks = {"sync": trivial, "async": trivial_async, "blend": blend.on_compute_relative_reward}
    report = {
        name: asyncio.run(measure(HookRunner(Hooks(hook)), options.size, options.groups))
        for name, hook in hooks.items()
    }
    text = json.dumps({"size": options.size, "groups": options.groups, **report}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
