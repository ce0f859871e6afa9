"""What goes wrong while people use an application, and what they notice of it: one coroutine per trouble.

Each returns figures that a report shows; ``errors`` are what users saw, and ``leaks`` what was left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.gateway.resilience.rig import Rig, until
from tests.gateway.resilience.users import ALL, BEST, Answer, Ask, ask

#: So many errors need no further ones.
_HOPELESS = 50


@dataclass
class Seen:
    """What the users of one scenario got."""

    answers: int = 0
    errors: list[str] = field(default_factory=list[str])
    seconds: list[float] = field(default_factory=list[float])
    ways: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.sources[answer.source] += 1
        self.seconds.append(answer.seconds)
        self.ways[answer.ask.name] += 1
        if answer.error:
            self.errors.append(answer.error)

    def report(self) -> dict[str, Any]:
        ordered = sorted(self.seconds) or [0.0]
        return {
            "answers": self.answers,
            "errors": len(self.errors),
            "first_errors": self.errors[:5],
            "median_seconds": round(ordered[len(ordered) // 2], 3),
            "longest_seconds": round(ordered[-1], 3),
            "ways": dict(self.ways),
        }


@contextlib.asynccontextmanager
async def using(
    rig: Rig, seen: Seen, ways: Sequence[Ask], seed: int, users: int, about: str = "question"
) -> AsyncGenerator[None]:
    """``users`` at once, each asking again once it is answered, while the block runs; all get their last answer.

    Question 7 says ``question 7``, and its request has the id ``question-7``.
    """
    over = asyncio.Event()
    numbers = count()

    async def user(number: int) -> None:
        chance = random.Random(f"{seed}-{number}")
        while not over.is_set():
            place = next(numbers)
            seen.add(await ask(rig.gateway.port, chance.choice(ways), f"{about} {place}", f"{about}-{place}"))
            assert len(seen.errors) < _HOPELESS, seen.errors[:3]

    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(user(number))
        try:
            yield
        finally:
            over.set()


async def syncs(rig: Rig, wanted: int, seed: int, users: int) -> dict[str, Any]:
    """``wanted`` weight syncs under ``users`` users, with no upstream to hide behind."""
    seen, began = Seen(), time.monotonic()
    async with rig.serving(upstream=False):
        first = rig.steps
        async with using(rig, seen, ALL, seed, users):
            await rig.stepped(first + wanted, within=60 + 3 * wanted)
        leaks = await rig.leaks()
        trained = (await rig.stats())["groups"]["trained"]
    return {
        "syncs": rig.steps - first,
        **seen.report(),
        "groups_trained": trained,
        "leaks": leaks,
        "seconds": round(time.monotonic() - began, 1),
    }


async def restarts(rig: Rig, wanted: int, seed: int, users: int) -> dict[str, Any]:
    """The swarm server is killed and started again ``wanted`` times under ``users`` users, with an upstream."""

    async def restart(chance: random.Random) -> None:
        await rig.kill_server()
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        await rig.start_server()

    return {"restarts": wanted, **await _troubled(rig, restart, wanted, seed, users)}


async def crashes(rig: Rig, wanted: int, seed: int, users: int) -> dict[str, Any]:
    """The trainer is killed ``wanted`` times under ``users`` users, with an upstream; an operator starts it again."""

    async def crash(chance: random.Random) -> None:
        rig.signal_engine(signal.SIGKILL)
        # who was on the way to the upstream before says nothing of the crash
        await rig.offline()
        answered = len(rig.plain.got)
        # without a word about what was sampled when it died, everybody goes on by the upstream
        await until(lambda: len(rig.plain.got) >= answered + users, 60, "the upstream is not asked")

    return {"crashes": wanted, **await _troubled(rig, crash, wanted, seed, users)}


async def _troubled(
    rig: Rig, trouble: Callable[[random.Random], Awaitable[None]], wanted: int, seed: int, users: int
) -> dict[str, Any]:
    """Under ``users`` users with an upstream, ``trouble`` comes ``wanted`` times at any moment while weights sync, and
    the engine rolls again after each."""
    seen, began = Seen(), time.monotonic()
    chance = random.Random(seed)
    async with rig.serving(upstream=True, offline_wait_seconds=0.5):
        async with using(rig, seen, BEST, seed, users):
            for _ in range(wanted):
                await rig.stepped(rig.steps + 2, within=90)
                await asyncio.sleep(chance.uniform(0.0, 0.3))
                await trouble(chance)
                await rig.rolling()
            await rig.stepped(rig.steps + 2, within=90)
        leaks = await rig.leaks()
        fallbacks = (await rig.stats())["fallbacks"]
    return {
        **seen.report(),
        "by_upstream": len(rig.plain.got),
        "fallbacks": fallbacks,
        "leaks": leaks,
        "seconds": round(time.monotonic() - began, 1),
    }


async def shadow(rig: Rig, wanted: int, seed: int, users: int) -> dict[str, Any]:
    """``wanted`` requests of ``users`` users whom an incumbent answers, while the engine behind it syncs weights, hangs
    and dies, the swarm server dies, and the judge hangs."""
    seen, began, chance, troubles = Seen(), time.monotonic(), random.Random(seed), Counter[str]()

    async def hang() -> None:
        rig.signal_engine(signal.SIGSTOP)
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        rig.signal_engine(signal.SIGCONT)

    async def crash() -> None:
        rig.signal_engine(signal.SIGKILL)
        await rig.offline()

    async def restart() -> None:
        await rig.kill_server()
        await rig.start_server()

    async with rig.shadowing():
        first = rig.steps
        async with (
            using(rig, seen, BEST, seed, users - 1),
            using(rig, seen, BEST, seed + 1, 1, about="HANG"),
        ):
            while seen.answers < wanted:
                for trouble in (hang, crash, restart):
                    await rig.stepped(rig.steps + 1, within=90)
                    await trouble()
                    troubles[trouble.__name__] += 1
                    await rig.rolling()
        leaks = await rig.leaks()
        behind = (await rig.stats())["shadows"]
    return {
        **seen.report(),
        "sources": dict(seen.sources),
        "troubles": dict(troubles),
        "steps": rig.steps - first,
        "behind": behind,
        "leaks": leaks,
        "seconds": round(time.monotonic() - began, 1),
    }


async def hanging_judge(rig: Rig, wanted: int, seed: int, users: int) -> dict[str, Any]:
    """The judge hangs on ``wanted`` questions among others, with no upstream to hide behind."""
    seen, others, began = Seen(), Seen(), time.monotonic()
    judged = [way for way in BEST if way.name != "straight"]
    async with rig.serving(upstream=False, hook_timeout_seconds=0.5):
        async with using(rig, others, judged, seed, users=users // 4):
            for number in range(wanted):
                word = "HANG" if number % 2 else "BLOCK"
                seen.add(await ask(rig.gateway.port, judged[number % len(judged)], f"{word} {number}"))
        leaks = await rig.leaks()
        dropped = (await rig.stats())["groups"]["dropped"]
    return {
        "hangs": wanted,
        **seen.report(),
        "others": others.report(),
        "dropped": dropped,
        "leaks": leaks,
        "seconds": round(time.monotonic() - began, 1),
    }
