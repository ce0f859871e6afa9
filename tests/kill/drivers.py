"""The ways in which a client of the kill test speaks: bare requests, ``SwarmClient`` and ``AsyncSwarmClient``.

Invariant: a driver's answer is the server's, whether it is an HTTP answer or what a client of ours made of it; whoever
is started again after a kill repeats its claim and its end under the keys that it had.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from benchmarks.wire import Connection, post
from swarm.client import AsyncSwarmClient, SwarmClient, wire
from swarm.client.wire import RetryPolicy
from swarm.errors import SwarmGatewayError, UnavailableError
from swarm.types import WorkflowOutput

Answer = dict[str, Any]

GROUP = 2
#: seconds without an answer after which a request is repeated
REPEAT_AFTER = 3.0
#: seconds after which the server counts as gone for good
GIVE_UP_AFTER = 120.0
_IDLE_TIMEOUT = 8.0
_CLAIM_WAIT = 2.0


class Driver(Protocol):
    """Claims and ends, each repeated until there is an answer; ``kind`` is ``train``, ``eval`` or ``group``."""

    async def claim(self, kind: str, key: str) -> Answer:
        """As ``/claim_episode`` and ``/claim_group`` answer."""
        ...

    def end_key(self, task: str, rewards: Mapping[str, float]) -> str:
        """The key under which :meth:`end` will end them."""
        ...

    async def end(self, kind: str, key: str, task: str, rewards: Mapping[str, float]) -> tuple[int, Answer]:
        """Status and answer."""
        ...

    async def end_otherwise(self, kind: str, task: str, rewards: Mapping[str, float]) -> tuple[int, Answer]:
        """The same for another end of the same episodes."""
        ...

    async def abort(self, episode_uuid: str) -> str:
        """What was wrong with the answer, or an empty string."""
        ...

    async def close(self) -> None: ...


class Bare:
    """The requests themselves, one at a time; each worker needs one of its own."""

    def __init__(self, client: str, port: int) -> None:
        self._client = client
        self._port = port
        self._random = random.Random()
        self._connection: Connection | None = None

    async def claim(self, kind: str, key: str) -> Answer:
        body: dict[str, Any] = {
            "client_uuid": self._client,
            "idempotency_key": key,
            "discard_episode_timeout": _IDLE_TIMEOUT,
            "wait_seconds": _CLAIM_WAIT,
        }
        if kind == "group":
            _, answer = await self._ask("/claim_group", body | {"count": GROUP})
        else:
            _, answer = await self._ask("/claim_episode", body | {"episode_type": kind})
        return answer

    def end_key(self, task: str, rewards: Mapping[str, float]) -> str:
        return f"{self._random.getrandbits(64):x}"

    async def end(self, kind: str, key: str, task: str, rewards: Mapping[str, float]) -> tuple[int, Answer]:
        ends = [{"episode_uuid": name, "workflow_output": {"reward": r}} for name, r in rewards.items()]
        body: dict[str, Any] = {"client_uuid": self._client, "task_id": task, "idempotency_key": key}
        if kind == "group":
            return await self._ask("/end_group", body | {"ends": ends})
        return await self._ask("/end_episode", body | ends[0])

    async def end_otherwise(self, kind: str, task: str, rewards: Mapping[str, float]) -> tuple[int, Answer]:
        return await self.end(kind, "another-key", task, rewards)

    async def abort(self, episode_uuid: str) -> str:
        status, answer = await self._ask("/abort_episode", {"client_uuid": self._client, "episode_uuid": episode_uuid})
        return "" if status == 200 and answer["success"] else f"an abort was answered {status} {answer}"

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def once(self, request: bytes) -> tuple[int, bytes]:
        """One try, for which there are :data:`REPEAT_AFTER` seconds."""
        try:
            async with asyncio.timeout(REPEAT_AFTER):
                if self._connection is None:
                    self._connection = await Connection.open("127.0.0.1", self._port)
                return await self._connection.ask(request)
        except BaseException:
            # whatever comes on this connection later belongs to a request that was given up
            await self.close()
            raise

    async def _ask(self, path: str, body: Answer) -> tuple[int, Answer]:
        """Repeat the request until there is an answer that is none of trouble."""
        request = post(path, json.dumps(body).encode())
        deadline = time.monotonic() + GIVE_UP_AFTER
        last: object = None
        while time.monotonic() < deadline:
            try:
                status, content = await self.once(request)
            except (OSError, TimeoutError) as exc:
                last = repr(exc)
            else:
                if status < 500:
                    return status, json.loads(content)
                last = content
            await asyncio.sleep(self._random.uniform(0.02, 0.2))
        raise TimeoutError(f"{path} was not answered within {GIVE_UP_AFTER:g} s; last: {last!r}")


class OurClient:
    """A client of ours, for any number of workers; the blocking one is called in threads."""

    def __init__(self, kind: type[SwarmClient] | type[AsyncSwarmClient], client: str, port: int) -> None:
        # a dropped reply to a long poll is to be noticed while the episode that it granted lives
        wire.WAIT_GRACE = 1.0
        self._client = kind(
            f"http://127.0.0.1:{port}",
            client_uuid=client,
            request_timeout=REPEAT_AFTER,
            begin_timeout=_CLAIM_WAIT,
            policy=RetryPolicy(attempts=10_000, base=0.05, cap=0.2, total=GIVE_UP_AFTER),
        )

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        method = getattr(self._client, name)
        if isinstance(self._client, SwarmClient):
            return await asyncio.to_thread(method, *args, **options)
        return await method(*args, **options)

    async def claim(self, kind: str, key: str) -> Answer:
        deadline = time.monotonic() + GIVE_UP_AFTER
        while True:
            try:
                return as_answer(await self._begin(kind, key))
            except UnavailableError as exc:
                # whether it was granted is not known: only the same claim can tell
                if exc.code != "server_unreachable" or time.monotonic() > deadline:
                    return {"success": False, "fail_cause": exc.message}

    async def _begin(self, kind: str, key: str) -> wire.EpisodeGroup | wire.EpisodeEndpoint:
        given = {"idempotency_key": key, "discard_episode_timeout": _IDLE_TIMEOUT}
        if kind == "group":
            return await self._call("claim_group", GROUP, _CLAIM_WAIT, **given)
        return (await self._call("begin_episode", episode_type="eval" if kind == "eval" else "train", **given))[1]

    def end_key(self, task: str, rewards: Mapping[str, float]) -> str:
        return wire.end_key(task, outputs(rewards))

    async def end(self, kind: str, key: str, task: str, rewards: Mapping[str, float]) -> tuple[int, Answer]:
        assert key == self.end_key(task, rewards)
        results = outputs(rewards)
        try:
            if kind == "group":
                dropped = await self._call("end_group", task, results)
            else:
                [(name, result)] = results.items()
                dropped = await self._call("end_episode", task, name, result)
        except UnavailableError:
            raise
        except SwarmGatewayError as exc:
            return exc.status, exc.body()
        return 200, {"success": True, "error": dropped or None}

    async def end_otherwise(self, kind: str, task: str, rewards: Mapping[str, float]) -> tuple[int, Answer]:
        others = {name: reward + 1 for name, reward in rewards.items()}
        return await self.end(kind, self.end_key(task, others), task, others)

    async def abort(self, episode_uuid: str) -> str:
        await self._call("abort_episode", episode_uuid)
        return ""

    async def close(self) -> None:
        await self._call("close")


def outputs(rewards: Mapping[str, float]) -> dict[str, WorkflowOutput]:
    return {name: WorkflowOutput(reward=reward) for name, reward in rewards.items()}


def as_answer(got: wire.EpisodeGroup | wire.EpisodeEndpoint) -> Answer:
    """What a claim got, as the server tells it."""
    if isinstance(got, wire.EpisodeEndpoint):
        return {"success": True, "episode_uuid": got.episode_uuid, "openai_api_key": got.api_key}
    members = [{"episode_uuid": one.episode_uuid, "openai_api_key": one.api_key} for one in got]
    return {"success": True, "episodes": members, "group_uuid": got.group_uuid, "openai_api_key": got.api_key}


#: by which client of the test it is used
DRIVERS: dict[str, Callable[[str, int], Bare | OurClient]] = {
    "ann": partial(OurClient, SwarmClient),
    "bob": partial(OurClient, AsyncSwarmClient),
    "eve": Bare,
}
