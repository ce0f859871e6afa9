"""End groups on several servers, all or none: the client's part of two phases.

Invariant: nothing is committed anywhere before every server has promised; the first server's commit is the decision:
after it only commits are sent, before it only cancellations.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from swarm.client import wire
from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.flows import ABORT_POLICY
from swarm.client.handles import task_id_of
from swarm.client.policy import RetryPolicy
from swarm.client.sync import SwarmClient
from swarm.errors import RequestError, SwarmGatewayError, UnavailableError
from swarm.protocol import SuccessResponse
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

#: Seconds that the servers keep their promises before they settle the matter among themselves.
HOLD_SECONDS = 60.0
_GROUP_CODE = "group_end_in_doubt"

Outputs = Mapping[str, WorkflowOutput]


def end_groups(
    parts: Sequence[tuple[SwarmClient, Task | str, Outputs]], hold_seconds: float = HOLD_SECONDS
) -> list[str]:
    """End a group on each of several servers, or on none; ``parts`` has a client, its task, and the results by episode.

    The first server decides, so each other one must have its address among its ``peers``, as that first client
    gives it: there it asks should we vanish. If not all accept, what the others have accepted is given up. Repeating
    the same call is safe.

    Returns:
        For each part why it will not be trained although it was ended, or an empty string.

    Raises:
        UnavailableError: ``group_end_in_doubt``: the first server did not say whether it committed; they will all come
            to the same result, which a repetition tells. With any other code nothing was ended.
        ConflictError, RequestError: a server refused; nothing was ended.
    """
    transaction = _transaction([(client, task, outputs) for client, task, outputs in parts], hold_seconds)
    clients = [client for client, _, _ in parts]

    def send(one: _Send) -> _Outcome:
        try:
            return clients[one.index].send(one.call, one.policy)
        except SwarmGatewayError as exc:
            return exc

    with ThreadPoolExecutor(max(1, len(parts)), thread_name_prefix="ending") as pool:
        outcomes: list[_Outcome] | None = None
        while True:
            try:
                batch = transaction.send(outcomes)
            except StopIteration as stop:
                return stop.value
            outcomes = list(pool.map(send, batch))


async def end_groups_async(
    parts: Sequence[tuple[AsyncSwarmClient, Task | str, Outputs]], hold_seconds: float = HOLD_SECONDS
) -> list[str]:
    """:func:`end_groups` on an event loop. Once it has begun it is carried through in the background, should its caller
    be cancelled."""
    transaction = _transaction([(client, task, outputs) for client, task, outputs in parts], hold_seconds)
    clients = [client for client, _, _ in parts]

    async def send(one: _Send) -> _Outcome:
        try:
            return await clients[one.index].send(one.call, one.policy)
        except SwarmGatewayError as exc:
            return exc

    async def run() -> list[str]:
        outcomes: list[_Outcome] | None = None
        while True:
            try:
                batch = transaction.send(outcomes)
            except StopIteration as stop:
                return stop.value
            outcomes = await asyncio.gather(*(send(one) for one in batch))

    if not parts:
        return []
    return await asyncio.shield(clients[0].in_background(run()))


@dataclass(frozen=True)
class _Send:
    """One call to the server of the part ``index``."""

    index: int
    call: wire.Call[SuccessResponse]
    policy: RetryPolicy | None = None


_Outcome = SuccessResponse | SwarmGatewayError
_Part = tuple[SwarmClient | AsyncSwarmClient, Task | str, Outputs]


def _transaction(
    parts: Sequence[_Part], hold_seconds: float
) -> Generator[list[_Send], list[_Outcome] | None, list[str]]:
    """Free of I/O: yields calls that are sent at once, and is sent their outcomes in order."""
    clients = [client for client, _, _ in parts]
    if not parts:
        return []
    if len(parts) == 1:
        client, task, outputs = parts[0]
        [only] = yield from _ask([_Send(0, wire.end_group_call(client.client_uuid, task_id_of(task), outputs))])
        return [_note(only)]
    name = _name(parts)
    prepares = [
        _Send(
            index,
            wire.prepare_group_end_call(
                client.client_uuid,
                task_id_of(task),
                outputs,
                name,
                hold_seconds,
                clients[0].server_url if index else "",
            ),
        )
        for index, (client, task, outputs) in enumerate(parts)
    ]

    def decide(indices: Sequence[int], commit: bool, policy: RetryPolicy | None = None) -> list[_Send]:
        return [
            _Send(index, wire.decide_group_end_call(clients[index].client_uuid, name, commit), policy)
            for index in indices
        ]

    everyone = range(len(parts))
    # the first one before the others: whoever has promised may ask it, and what it does not know counts as cancelled
    for asked in (range(1), everyone[1:]):
        failed = _first_error([clients[i] for i in asked], (yield from _ask([prepares[i] for i in asked])))
        if failed is not None:
            yield from _ask(decide(everyone[: asked.stop], False, ABORT_POLICY))
            raise failed
    [first] = yield from _ask(decide([0], True))
    if isinstance(first, RequestError):
        # it has decided otherwise: its time was over
        yield from _ask(decide(everyone, False, ABORT_POLICY))
        raise first
    if isinstance(first, SwarmGatewayError):
        raise UnavailableError(
            f"whether {clients[0].server_url} committed is not known ({first.message}); the servers will come to one "
            "result, repeat the call to learn it",
            code=_GROUP_CODE,
        ) from first
    others = yield from _ask(decide(everyone[1:], True))
    for index, outcome in enumerate(others, 1):
        if isinstance(outcome, RequestError):
            outcome.add_note(f"this is the swarm server {clients[index].server_url}; the others ended their groups")
            raise outcome
        if isinstance(outcome, SwarmGatewayError):
            # it is decided: it asks the first server once its time is over
            logger.warning("%s ends its group later: %s", clients[index].server_url, outcome.message)
    return [_note(first), *("" if isinstance(one, SwarmGatewayError) else _note(one) for one in others)]


def _ask(batch: list[_Send]) -> Generator[list[_Send], list[_Outcome] | None, list[_Outcome]]:
    outcomes = yield batch
    assert outcomes is not None
    return outcomes


def _note(outcome: _Outcome) -> str:
    if isinstance(outcome, SwarmGatewayError):
        raise outcome
    return outcome.error or ""


def _first_error(clients: Sequence[Any], outcomes: Sequence[_Outcome]) -> SwarmGatewayError | None:
    for client, outcome in zip(clients, outcomes, strict=True):
        if isinstance(outcome, SwarmGatewayError):
            outcome.add_note(f"this is the swarm server {client.server_url}; nothing was ended anywhere")
            return outcome
    return None


def _name(parts: Sequence[_Part]) -> str:
    # from the content, so that a repetition is the same transaction
    keys = [wire.end_key(task_id_of(task), outputs) for _, task, outputs in parts]
    return hashlib.sha256("".join(keys).encode()).hexdigest()
