"""Users who hang up, wherever their request is: what is cancelled for them, how soon, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.gateway.resilience.rig import Rig
from tests.gateway.resilience.users import ALL, BEST, LIVE, Ask, Left, ask, hang_up

#: Where a request can be.
PHASES = ("queued", "claiming", "sampling", "judging", "streaming")
#: In which ways a request is surely in a phase for as long as its user likes, and the word that makes it so.
_LASTING: dict[str, tuple[Sequence[Ask], str]] = {
    "queued": (ALL, "LONG"),
    "claiming": ([way for way in ALL if "straight" not in way.name], "LONG"),
    "sampling": (BEST, "LONG"),
    "judging": ([way for way in BEST if way.name != "straight"], "HANG"),
    "streaming": (LIVE, "LONG"),
}
#: Longest time that somebody stays in a phase, and that one waits in vain for it; seconds.
_RANDOM_SECONDS, _IN_VAIN_SECONDS = 0.2, 5.0
#: What is cancelled later than this was not cancelled for the user who left.
_LATE_SECONDS = 5.0


@dataclass
class Leavers:
    """All who hung up."""

    left: list[Left] = field(default_factory=list[Left])
    phases: Counter[str] = field(default_factory=Counter[str])
    ways: Counter[str] = field(default_factory=Counter[str])
    phase_of: dict[str, str] = field(default_factory=dict[str, str])
    way_of: dict[str, str] = field(default_factory=dict[str, str])
    errors: list[str] = field(default_factory=list[str])
    answered: int = 0
    #: phases that somebody waits to leave in
    aims: Counter[str] = field(default_factory=Counter[str])

    @property
    def missing(self) -> set[str]:
        """Phases that nobody has left in."""
        return {phase for phase in PHASES if not self.phases[phase]}


async def disconnects(rig: Rig, wanted: int, seed: int, users: int) -> dict[str, Any]:
    """``wanted`` users hang up, ``users`` at a time, at least one in each phase; weights sync meanwhile."""
    began, leavers = time.monotonic(), Leavers()
    chance, numbers = random.Random(seed), count()

    async def leaver() -> None:
        while leavers.phases.total() < wanted or leavers.missing:
            number = next(numbers)
            name = f"question-{seed}-{number}"
            if number % 2:
                # sees to it that each phase has its share
                aim = min(PHASES, key=lambda phase: leavers.phases[phase] + leavers.aims[phase])
                leavers.aims[aim] += 1
                ways, word = _LASTING[aim]
                await _one(rig, leavers, name, chance.choice(ways), word, aim, chance)
                leavers.aims[aim] -= 1
            else:
                word = chance.choice(["", "LONG", "HANG"])
                await _one(rig, leavers, name, chance.choice(ALL), word, chance.choice(PHASES), chance)

    # of a judge that hangs nobody waits for the end
    async with rig.serving(upstream=False, hook_timeout_seconds=30):
        first = rig.steps
        try:
            async with asyncio.timeout(180 + wanted), asyncio.TaskGroup() as group:
                for _ in range(users):
                    group.create_task(leaver())
        except TimeoutError:
            raise AssertionError(f"users left in {dict(leavers.phases)} only, {leavers.answered} were faster") from None
        leaks = await rig.leaks()
        stats = await rig.stats()
        # it still serves, and nothing of the past is in its way
        for way in ALL:
            if error := (await ask(rig.gateway.port, way, "still there?")).error:
                leavers.errors.append(error)
        leaks_after = await rig.leaks()
    return {
        "disconnects": leavers.phases.total(),
        "phases": dict(leavers.phases),
        "ways": dict(leavers.ways),
        "answered_before": leavers.answered,
        **_cancellations(rig, leavers),
        "groups": stats["groups"],
        "syncs": rig.steps - first,
        "leaks": {name: leaks[name] + leaks_after[name] for name in leaks},
        "errors": len(leavers.errors),
        "first_errors": leavers.errors[:5],
        "seconds": round(time.monotonic() - began, 1),
    }


async def _one(rig: Rig, leavers: Leavers, name: str, way: Ask, word: str, aim: str, chance: random.Random) -> None:
    """One who leaves some time after the request is in phase ``aim``, if it ever is."""

    async def moment() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IN_VAIN_SECONDS):
                await rig.gateway.reached(name, aim)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.uniform(0, _RANDOM_SECONDS))

    left = await hang_up(rig.gateway.port, way, name, f"{word} {name}", chance, moment())
    if left.answer is not None:
        leavers.answered += 1
        if left.answer.error:
            leavers.errors.append(left.answer.error)
        return
    phase = await rig.gateway.left(name) if left.asked else "asking"
    if not phase:
        # the answer was out, if not read: there was nothing to cancel
        leavers.answered += 1
        return
    leavers.left.append(left)
    leavers.phase_of[name], leavers.way_of[name] = phase, way.name
    leavers.phases[phase] += 1
    leavers.ways[way.name] += 1


def _cancellations(rig: Rig, leavers: Leavers) -> dict[str, Any]:
    """How soon the calls of those who left were cancelled upstream, and which were not."""
    left = {one.name: one for one in leavers.left}
    delays: list[float] = []
    by_way: dict[str, list[float]] = {}
    served: Counter[str] = Counter()
    late: list[str] = []
    for call in rig.calls():
        name = str(call["asked"]).rpartition(" ")[2]
        if name not in left:
            continue
        delay = float(call["at"]) - left[name].at
        if call["ended"] == "cancelled" and delay >= 0:
            delays.append(delay)
            by_way.setdefault(leavers.way_of[name], []).append(delay)
            if delay > _LATE_SECONDS:
                late.append(f"{name}, {leavers.phase_of[name]}: {delay:.3f} s")
        elif call["ended"] == "served" and delay > 0.1:
            served[leavers.phase_of[name]] += 1
    delays.sort()
    return {
        "cancelled_upstream": len(delays),
        "cancelled_after_ms": {
            "p50": _quantile(delays, 0.5),
            "p99": _quantile(delays, 0.99),
            "longest": _quantile(delays, 1.0),
        },
        "longest_ms_by_way": {way: _quantile(sorted(some), 1.0) for way, some in sorted(by_way.items())},
        "cancelled_late": late[:10],
        "served_to_nobody": dict(served),
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """In milliseconds."""
    if not ordered:
        return None
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
