"""A client of the kill test: runs episodes for ever, and writes down what it was promised before it goes on.

``python -m tests.kill.client NAME PORT FOLDER SEED``; speaks to the proxy at PORT, in the way that NAME has in
:mod:`tests.kill.drivers`, and appends to ``FOLDER/NAME.jsonl``.
Started again under its name after a kill it reads that file and takes up every request that was not answered, under
the same idempotency key. It ends when there is a file ``FOLDER/stop`` and nothing of its own is unanswered.

Lines, each with the worker's number ``w``: ``claiming`` (a request is about to be sent), ``claimed`` (its answer),
``unclaimed``, ``ending`` and ``acked`` or ``late`` for ends, ``aborted``, and ``violation`` for an answer that
contradicts an earlier one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.wire import post
from tests.kill.drivers import DRIVERS, GROUP, Bare, Driver
from tests.standins.engine import Log

WORKERS = 4
_CHAT_GIVE_UP_AFTER = 10.0
_CHAT = b'{"messages": [{"role": "user", "content": "hello"}]}'


class Worker:
    """One episode, or one group, at a time."""

    def __init__(self, name: str, number: int, port: int, folder: Path, seed: str, driver: Driver) -> None:
        self._client = name
        self._number = number
        self._stop = folder / "stop"
        self._path = folder / f"{name}.jsonl"
        self._log = Log(self._path)
        self._driver = driver
        # of each life another sequence, or a client that is killed early would do the same for ever
        self._random = random.Random(f"{seed}-{number}-{time.time_ns()}")
        self._calls = Bare(name, port)

    async def run(self) -> None:
        work = self._left_over()
        while work is not None or not self._stop.exists():
            if work is None:
                work = self._new_claim()
            await self._episode(work)
            work = None
        await self._calls.close()

    # ------------------------------------------------------------------ what was begun

    def _lines(self) -> Iterator[dict[str, Any]]:
        for line in self._path.read_text().splitlines():
            fields: dict[str, Any] = json.loads(line)
            if fields["w"] == self._number:
                yield fields

    def _left_over(self) -> dict[str, Any] | None:
        """The last claim, with all that is known of it, unless it is done with."""
        work: dict[str, Any] | None = None
        for fields in self._lines():
            if "claiming" in fields:
                work = dict(fields)
            elif work is not None and fields["claim"] == work["claiming"]:
                work |= fields
        finished = ("acked", "late", "aborted", "unclaimed")
        return None if work is None or any(word in work for word in finished) else work

    def _new_claim(self) -> dict[str, Any]:
        kind = self._random.choices(["train", "eval", "group"], [0.6, 0.1, 0.3])[0]
        work = {"claiming": f"{self._random.getrandbits(64):x}", "kind": kind}
        self._write(**work)
        return work

    def _write(self, **fields: Any) -> None:
        self._log.write(w=self._number, at=round(time.time(), 3), **fields)

    # ------------------------------------------------------------------ one episode

    async def _episode(self, work: dict[str, Any]) -> None:
        claim = work["claiming"]
        if "claimed" not in work:
            answer = await self._driver.claim(work["kind"], claim)
            if not answer["success"]:
                self._write(claim=claim, unclaimed=answer["fail_cause"])
                return
            fields = {"claimed": members(answer), "group": group_address(answer)}
            self._write(claim=claim, **fields)
            work |= fields
            if self._random.random() < 0.1:
                again = await self._driver.claim(work["kind"], claim)
                if again["success"] and uuids(members(again)) != uuids(work["claimed"]):
                    self._write(claim=claim, replaced=uuids(work["claimed"]))
        if "ending" not in work:
            await self._chat(work)
            if self._random.random() < 0.05:
                await self._abort(work)
                return
            rewards = {one["episode_uuid"]: round(self._random.random(), 9) for one in work["claimed"]}
            task = self._task(work)
            work |= {"ending": self._driver.end_key(task, rewards), "rewards": rewards, "task": task}
            self._write(claim=claim, ending=work["ending"], rewards=rewards, task=work["task"])
        await self._end(work)

    def _task(self, work: dict[str, Any]) -> str:
        if work["kind"] == "group":
            return f"group-{work['claiming']}"
        done = sum("acked" in fields for fields in self._lines())
        return f"{self._client}-{self._number}-{done // GROUP}"

    async def _chat(self, work: dict[str, Any]) -> None:
        """One call each, or one for the whole group; an episode that is over is found out when it is ended."""
        if work["group"] and self._random.random() < 0.5:
            await self._call(*work["group"])
            return
        for one in work["claimed"]:
            await self._call(f"/episodes/{one['episode_uuid']}/v1", one["openai_api_key"])

    async def _call(self, base: str, key: str) -> None:
        deadline = time.monotonic() + _CHAT_GIVE_UP_AFTER
        while time.monotonic() < deadline:
            try:
                status, _ = await self._calls.once(post(f"{base}/chat/completions", _CHAT, key=key))
            except (OSError, TimeoutError):
                status = 503
            if status < 500:
                return
            await self._pause()

    async def _abort(self, work: dict[str, Any]) -> None:
        for one in work["claimed"]:
            if wrong := await self._driver.abort(one["episode_uuid"]):
                self._write(claim=work["claiming"], violation=wrong)
        self._write(claim=work["claiming"], aborted=True)

    async def _end(self, work: dict[str, Any]) -> None:
        claim, key = work["claiming"], work["ending"]
        status, answer = await self._send_end(work, key)
        if status != 200:
            code = answer["error"]["code"]
            self._write(claim=claim, late=key, status=status, code=code)
            return
        # what follows may be killed: the promise is written down first
        self._write(claim=claim, acked=key, rewards=work["rewards"], kind=work["kind"], error=answer["error"])
        if self._random.random() < 0.15:
            again = await self._send_end(work, key)
            if again != (status, answer):
                self._write(claim=claim, violation=f"a repeated end: first {answer}, then {again}")
        if self._random.random() < 0.1:
            other = await self._driver.end_otherwise(work["kind"], work["task"], work["rewards"])
            if other[0] != 409:
                self._write(claim=claim, violation=f"another end of an ended episode: {other}")

    async def _send_end(self, work: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        return await self._driver.end(work["kind"], key, work["task"], work["rewards"])

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(0.02, 0.2))


def members(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer.get("episodes", [answer])


def uuids(episodes: list[dict[str, Any]]) -> list[str]:
    return [one["episode_uuid"] for one in episodes]


def group_address(answer: dict[str, Any]) -> list[str]:
    """Path and key of a group's address; empty for single episodes."""
    if not answer.get("group_uuid"):
        return []
    return [f"/groups/{answer['group_uuid']}/v1", answer["openai_api_key"]]


async def main(name: str, port: int, folder: Path, seed: str) -> None:
    first = DRIVERS[name](name, port)
    more = [Bare(name, port) if isinstance(first, Bare) else first for _ in range(WORKERS - 1)]
    drivers: list[Driver] = [first, *more]
    async with asyncio.TaskGroup() as group:
        for number, driver in enumerate(drivers):
            group.create_task(Worker(name, number, port, folder, seed, driver).run())
    for driver in set(drivers):
        await driver.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
