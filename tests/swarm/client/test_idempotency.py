"""Idempotency keys: one per logical call, the same on its retries, and the same for an end repeated later."""

from __future__ import annotations

from typing import cast

import pytest

from swarm.client import SwarmClient
from swarm.errors import RequestError
from swarm.protocol import NO_EPISODES
from swarm.types import WorkflowOutput
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_sync import OUTPUT, TASK, claimed, not_yet


def keys(server: ScriptedServer, path: str) -> list[str]:
    return [body["idempotency_key"] for body in server.bodies(path)]


def test_all_polls_of_one_claim_carry_one_key(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_episode", not_yet(NO_EPISODES), DROP, Answer({}, 503), claimed("a"), claimed("b"))
    client.begin_episode()
    client.begin_episode()
    *first, second = keys(server, "/claim_episode")
    assert len(first) == 4
    assert len(set(first)) == 1
    assert second not in first


def test_a_claim_may_be_repeated_under_its_own_key(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_episode", claimed())
    server.script("/claim_group", {"success": True, "client_uuid": "me", "episodes": []})
    client.begin_episode(idempotency_key="mine")
    client.claim_group(2, idempotency_key="mine too")
    assert keys(server, "/claim_episode") == ["mine"]
    assert keys(server, "/claim_group") == ["mine too"]


def test_an_end_has_the_key_of_what_it_says(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/end_episode", DROP, {"success": True})
    client.end_episode(TASK, "e1", OUTPUT)
    client.end_episode("t", "e1", OUTPUT)
    client.end_episode(TASK, "e1", WorkflowOutput(reward=0.25))
    client.end_episode("other", "e1", OUTPUT)
    retried, again, later, reward, task = keys(server, "/end_episode")
    assert retried == again == later
    assert len({later, reward, task}) == 3


def test_a_group_end_has_one_key_in_any_order(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/end_group", {"success": True})
    one, other = {"a": OUTPUT}, {"b": WorkflowOutput(reward=1.0)}
    client.end_group(TASK, one | other)
    client.end_group(TASK, other | one)
    first, second = keys(server, "/end_group")
    assert first == second


def test_a_task_without_id_is_refused_at_once(server: ScriptedServer, client: SwarmClient) -> None:
    with pytest.raises(RequestError, match="task_id"):
        client.end_episode("", "e1", OUTPUT)
    with pytest.raises(RequestError, match="task_id: Input should be a valid string"):
        client.end_episode(cast("str", 17), "e1", OUTPUT)
    assert server.requests == []
