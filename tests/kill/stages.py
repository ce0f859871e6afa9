"""Moves of a stage under users who never stop: SIGKILLs of the swarm server and of gateways in the midst of each, and
the time that a rollback takes until it is everybody's.

The swarm server, its engine with a scripted vLLM, and three gateways before one incumbent are processes of their own.

Invariant: whatever it starts is gone when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gateway.config.takeover import ServeConfig
from swarm.job import TrainJob
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import REWARD, Rig, ask_here, running, until, until_async
from tests.gateway.resilience.users import Answer, Ask, ask
from tests.gateway.resilience.watching import GatewayProcess, gateway_process
from tests.ports import free_ports
from tests.standins.upstream import CHAT
from tests.standins.vllm import listening

#: All users may be the challenger's at once.
JOB = TrainJob(model="stand-in", batch_size=16, num_repeat=2, max_parallel_episodes=128, max_staleness=50)
GATEWAYS, USERS, SESSIONS = 3, 16, 32
LATEST_KILL = 0.06  # seconds after the command
VICTIMS = ("server", "gateway")
_SETTLE_SECONDS, _START_SECONDS = 60.0, 240.0
_TRIES = 5


class Standing(NamedTuple):
    """Where a challenger stands."""

    share: float
    pinned: bool = False


#: From where to where, by one command of a person.
MOVES = {
    "to the canary": (Standing(0.0), Standing(0.25)),
    "to a larger share": (Standing(0.25), Standing(0.5)),
    "to live": (Standing(0.5), Standing(1.0)),
    "rollback": (Standing(1.0), Standing(0.0)),
    "pin": (Standing(0.25), Standing(0.25, pinned=True)),
}
#: The incumbent is another one from now on, by the configuration.
SUCCESSION = "succession"
EVERY = [(name, victim) for name in (*MOVES, SUCCESSION) for victim in VICTIMS]


class Moment(NamedTuple):
    """An answer: from when to when, who gave it, and where its conversation was drawn."""

    began: float
    ended: float
    source: str
    position: float | None


class Period(NamedTuple):
    """Between ``began`` and ``ended`` the challenger answers conversations below ``share`` alone."""

    about: str
    began: float
    ended: float
    share: float


@dataclass
class StageKills:
    """One run of ``rig``.

    Attributes:
        violations: what does not hold, in words.
        errors: what users saw.
        ends: of each transition, by victim: how often it was found undone and done after the kill.
        rollbacks: of each one that was timed: when it was sent, when it was answered, and until when requests count.
        retries: requests that their user sent again to another gateway, for theirs was killed.
        stand_ins: the incumbent's answers for the challenger in the counts of sides.
    """

    rig: Rig
    seed: int
    violations: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    kills: Counter[str] = field(default_factory=Counter[str])
    rollbacks: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    retries: int = 0
    stand_ins: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._ports = free_ports(GATEWAYS)
        self._gateways: list[GatewayProcess] = []
        self._answers: list[Moment] = []
        self._periods: list[Period] = []
        #: of each user, when the request began that is on its way
        self._since: dict[int, float] = {}
        self._dying = False
        self._numbers = count(1)
        #: the version of the job that the incumbent is
        self._version = 0
        self._url = ""

    async def run(self, rollbacks: int, points: int, transitions: Sequence[tuple[str, str]]) -> None:
        """Time ``rollbacks``; then kill at so many ``points`` of each of ``transitions``: its name, and the victim."""
        began = time.monotonic()
        # its event loop is that of all users, who may keep it from noticing for seconds that a connection is used
        async with (
            listening(self.rig.plain.app, keep_alive=75) as self._url,
            contextlib.AsyncExitStack() as self._stack,
        ):
            for number in range(GATEWAYS):
                await self._start_gateway(number)
            async with self._asking():
                for _ in range(rollbacks):
                    await self._time_rollback()
                for name, victim in transitions:
                    for point in range(points):
                        # each point in its own part of the time
                        await self._round(name, victim, LATEST_KILL * (point + self._random.random()) / points)
                    print(f"{time.monotonic() - began:6.0f} s  {name}, {victim}", file=sys.stderr, flush=True)
        # only now all who asked meanwhile are answered
        for period in self._periods:
            wrong = sum(
                period.began < answer.began < answer.ended < period.ended
                and answer.source == "challenger"
                and (answer.position is None or answer.position >= period.share)
                for answer in self._answers
            )
            if wrong:
                self.violations.append(f"{period.about}: the challenger gave {wrong} answers beyond {period.share:g}")
        self._seconds = time.monotonic() - began

    def summary(self) -> dict[str, Any]:
        """What it has shown."""
        return {
            "seed": self.seed,
            "seconds": round(self._seconds, 1),
            "kills": dict(self.kills),
            "ends": dict(sorted(self.ends.items())),
            "answers": len(self._answers),
            "sources": dict(Counter(answer.source for answer in self._answers)),
            "errors": len(self.errors),
            "retries": self.retries,
            "stand_ins": self.stand_ins,
            "rollbacks": len(self.rollbacks),
            "seconds_to_last_other_answer_from_the_command": _spread(self._late(0)),
            "seconds_to_last_other_answer_from_its_answer": _spread(self._late(1)),
            "violations": self.violations + [f"a user saw {error}" for error in self.errors[:5]],
        }

    def _late(self, since: int) -> list[float]:
        """Of each rollback, how long after the moment with this index the last request began that the challenger
        answered; 0: none began after it."""
        return [
            max(
                answer.began - times[since]
                for answer in [*self._answers, Moment(times[since], times[since], "challenger", None)]
                if answer.source == "challenger" and times[since] <= answer.began < times[2]
            )
            for times in self.rollbacks
        ]

    # ------------------------------------------------------------------ the gateways

    def _serve(self) -> dict[str, Any]:
        upstream = {"base_url": f"{self._url}/v1", "model": "big"}
        incumbent = {"upstream": upstream} | ({"policy": self._version} if self._version else {})
        # a few are compared
        return {"incumbent": incumbent, "shadow_fraction": 0.1, "watch_share": 0.1}

    def _incumbent(self) -> str:
        return ServeConfig.model_validate(self._serve()).incumbent_name

    def _configure(self, number: int) -> tuple[Path, dict[str, Any]]:
        folder = self.rig.folder / f"gateway-{number}"
        folder.mkdir(exist_ok=True)
        hooks = write_hooks(folder / "hooks", REWARD)
        config = {"port": self._ports[number], "swarm_url": self.rig.url, "hooks": str(hooks), "serve": self._serve()}
        (folder / "gateway.yaml").write_text(yaml.safe_dump(config))
        return folder, config

    async def _start_gateway(self, number: int) -> None:
        gateway = await self._stack.enter_async_context(gateway_process(*self._configure(number)))
        self._gateways[number : number + 1] = [gateway]

    # ------------------------------------------------------------------ users

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncGenerator[None]:
        """Users who never stop, each request in a conversation of its own."""
        over = asyncio.Event()

        async def user(number: int) -> None:
            for turn in count():
                if over.is_set():
                    return
                began = self._since[number] = time.monotonic()
                session = f"user-{number}-{turn}"
                answer = await self._ask_again(number % GATEWAYS, session)
                position = answer.header("x-swarm-position")
                self._answers.append(
                    Moment(began, time.monotonic(), answer.source, float(position) if position else None)
                )
                if answer.error:
                    self.errors.append(answer.error)

        async with asyncio.TaskGroup() as group:
            for number in range(USERS):
                group.create_task(user(number))
            try:
                yield
            finally:
                over.set()

    async def _ask_again(self, gateway: int, session: str) -> Answer:
        """Ask ``gateway``, and the next one where nobody answers there, as a balancer does."""
        for attempt in range(_TRIES):
            answer = await ask(self._ports[(gateway + attempt) % GATEWAYS], _way(session), "question", "")
            broken_off = answer.status in (0, 200) and answer.error
            if not (broken_off and self._dying):
                break
            self.retries += 1
        return answer

    # ------------------------------------------------------------------ moves

    async def _stage(self) -> dict[str, Any]:
        policies = (await self.rig.ask_server("/policies"))["policies"]
        return next(one["stage"] for one in policies if one["stage"]["incumbent"] == self._incumbent())

    async def _standing(self) -> Standing:
        stage = await self._stage()
        return Standing(stage["share"], stage["pinned"])

    async def _move(self, to: Standing, share: float, pinned: bool) -> None:
        """One command, which leads from ``share`` and ``pinned`` to ``to``."""
        body: dict[str, Any] = {"incumbent": self._incumbent(), "reason": f"move {next(self._numbers)}"}
        if to.pinned != pinned:
            await self.rig.ask_server("/policies/pin", body | {"pinned": to.pinned})
        elif to.share > share:
            await self.rig.ask_server("/policies/promote", body | {"share": to.share})
        else:
            await self.rig.ask_server("/policies/rollback", body)

    async def _reach(self, standing: Standing) -> None:
        """Be at ``standing``, at all gateways."""
        while (now := await self._standing()) != standing:
            pinning = now.pinned != standing.pinned
            await self._move(Standing(now.share, standing.pinned) if pinning else standing, *now)
        await self._agreed()

    async def _agreed(self) -> None:
        """Wait until each gateway says the stage of the server."""
        stage = await self._stage()
        label = f"canary {stage['share']:g}" if stage["stage"] == "canary" else stage["stage"]
        for number, port in enumerate(self._ports):

            async def follows(port: int = port) -> bool:
                return (await ask_here(port, "/status"))["routes"]["default"]["stage"] == label

            await until_async(follows, _SETTLE_SECONDS, f"gateway {number} does not follow the server to {label}")

    async def _time_rollback(self) -> None:
        """A rollback under users who are all the challenger's."""
        await self._reach(Standing(1.0))
        first = len(self._answers)
        await until(
            lambda: sum(answer.source == "challenger" for answer in self._answers[first:]) >= USERS,
            _SETTLE_SECONDS,
            "nobody is the challenger's",
        )
        sent = time.monotonic()
        await self._move(Standing(0.0), 1.0, False)
        answered = time.monotonic()
        until_then = await self._answered(SESSIONS)
        self.rollbacks.append((sent, answered, until_then))

    async def _answered(self, requests: int) -> float:
        """Wait until that many requests began from now on, and all that have begun by then, which is given, ended."""
        now = time.monotonic()
        await until(
            lambda: sum(answer.began > now for answer in self._answers[-10 * requests :]) >= requests,
            _SETTLE_SECONDS,
            "nobody asks any more",
        )
        now = time.monotonic()
        await until(lambda: min(self._since.values()) > now, _SETTLE_SECONDS, "somebody is not answered")
        return now

    async def _round(self, name: str, victim: str, after: float) -> None:
        """One transition with the death of ``victim`` ``after`` seconds of it."""
        before, to = MOVES.get(name, (Standing(0.0), Standing(0.0)))
        await self._reach(before)
        began = time.monotonic()
        moving = asyncio.create_task(self._succeed() if name == SUCCESSION else self._move(to, *before))
        await asyncio.sleep(after)
        self.kills[victim] += 1
        if victim == "server":
            await self.rig.kill_server()
        else:
            self._dying = True
            number = self._random.randrange(GATEWAYS)
            await self._gateways[number].kill()
        [failure] = await asyncio.gather(moving, return_exceptions=True)
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        if victim == "server":
            await self.rig.start_server()
        else:
            await self._start_gateway(number)
            self._dying = False
        await self.rig.rolling()
        now = await self._standing()
        about = f"{name}, {victim} killed after {1000 * after:.1f} ms"
        if now not in (before, to) or (failure is None and now != to):
            self.violations.append(f"{about}: {now}, neither {before} nor {to}, acknowledged: {failure is None}")
        self.ends[f"{name}, {victim}: {'done' if now == to else 'undone'}"] += 1
        await self._agreed()
        agreed = time.monotonic()
        await self._compare(about, now.share)
        ended = time.monotonic()
        self._periods.append(Period(about, agreed, ended, now.share))
        # an undone move has never been
        most = now.share if now == before else max(before.share, now.share)
        self._periods.append(Period(about, began, ended, most))

    async def _succeed(self) -> None:
        """The next incumbent, by the configuration of each gateway."""
        self._version += 1
        for number in range(GATEWAYS):
            self._configure(number)
        reloads = (ask_here(port, "/admin/reload", {}) for port in self._ports)
        for failure in await asyncio.gather(*reloads, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    # ------------------------------------------------------------------ sides

    async def _compare(self, about: str, share: float) -> None:
        """New conversations are on the side that ``share`` says, the same at each gateway."""
        number = next(self._numbers)
        sessions = [f"session-{number}-{place}" for place in range(SESSIONS)]
        sides = await asyncio.gather(*(self._sides(session, share) for session in sessions))
        for session, seen in zip(sessions, sides, strict=True):
            if len(seen) != 1:
                self.violations.append(f"{about}: {session} is on {sorted(seen)} at {share:g}")

    async def _sides(self, session: str, share: float) -> set[tuple[str, str, str]]:
        """What the gateways say of ``session``: source, position and incumbent; and what ``share`` demands of them."""
        seen: set[tuple[str, str, str]] = set()
        for port in self._ports:
            deadline = time.monotonic() + _SETTLE_SECONDS
            while True:
                answer = await ask(port, _way(session), "question")
                if answer.error:
                    self.errors.append(answer.error)
                position = answer.header("x-swarm-position")
                side = "challenger" if position and float(position) < share else "incumbent"
                if answer.source in (side, "challenger") or time.monotonic() > deadline:
                    break
                # an engine that has just come back may not serve yet
                self.stand_ins += 1
            version = answer.header("x-swarm-policy-version") if answer.source == "incumbent" else ""
            seen.add((answer.source, position, version))
            seen.add((side, position, str(self._version or "") if side == "incumbent" else ""))
        return seen


def _way(session: str) -> Ask:
    return Ask("chat", CHAT, {"messages": []}, {"x-swarm-session": session})


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(ordered[len(ordered) // 2], 3), "longest": round(ordered[-1], 3)} if ordered else {}


async def killing(
    folder: Path, seed: int, rollbacks: int, points: int, transitions: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """One run; its :meth:`StageKills.summary`."""
    async with running(folder, JOB) as rig:
        kills = StageKills(rig, seed)
        await kills.run(rollbacks, points, transitions)
    return kills.summary()
