"""Every token of a session is accounted for: sampled is trained, dropped for a reason, or under way."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.conversation import AgentLedger
from gateway.stats import DropReason
from tests.gateway.conftest import OpenGateway, ask
from tests.standins.swarm import Swarm

#: Fails for questions that hold the word.
HOOK = """
def on_compute_relative_reward(task, candidates, context):
    if "fail" in task.main_query:
        raise ValueError("cannot tell")
    return [float(candidate.index) for candidate in candidates]
"""
OUTCOME = "def on_session_end(session, context):\n    return session.feedback.rating\n"
CODEX = {"user-agent": "codex_exec/0.169.0", "session-id": "s", "thread-id": "s", "x-swarm-policy": "best"}
SUB = {**CODEX, "thread-id": "sub"}
GROUP = 4
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


async def told(http: httpx.AsyncClient, name: str = "s") -> dict[str, Any]:
    answer = await http.get(f"/v1/sessions/{name}")
    assert answer.status_code == 200
    assert answer.json()["session_id"] == name
    [on] = answer.json()["on"]
    return on


@pytest.mark.anyio
@pytest.mark.parametrize("path", DIALECTS)
async def test_metadata_names_a_session_in_every_dialect(gateway: httpx.AsyncClient, path: str) -> None:
    body = {"model": "tiny", "metadata": {"session_id": "s"}, **DIALECTS[path]}
    assert (await gateway.post(path, json=body)).status_code == 200
    assert (await told(gateway))["agents"][""]["requests"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_a_session_has_one_name_in_header_body_and_address(gateway: httpx.AsyncClient, encoding: str) -> None:
    """curl and Go send UTF-8 in headers, browsers and Python's requests Latin-1."""
    body, name = {"model": "tiny", **DIALECTS["/v1/chat/completions"]}, "Voilà Zürich"
    headers = {"x-swarm-session": name.encode(encoding)}
    assert (await gateway.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    named = {**body, "metadata": {"session_id": name}}
    assert (await gateway.post("/v1/chat/completions", json=named)).status_code == 200
    assert (await told(gateway, name))["agents"][""]["requests"] == 2


@pytest.mark.anyio
async def test_a_session_says_what_became_of_its_tokens(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(reward=HOOK) as http:
        for headers, text in [(CODEX, "repair it"), (SUB, "look for tests"), (SUB, "and fail")]:
            await ask(http, headers=headers, messages=[{"role": "user", "content": text}])
        await swarm.until(lambda: not swarm.open_episodes)
        on = await told(http)
        sampled = on["agents"][""]["trained"]["sampled"]
        # the stand-in for the swarm server counts none; tests/gateway/test_with_swarm_server.py has the real one
        untold = {"accounted": {"tokens": {}, "why": {}}}
        each = {"answers": GROUP, "sampled": sampled, "masked": on["agents"][""]["trained"]["masked"]}
        assert sampled >= GROUP and each["masked"] >= GROUP
        assert on["agents"] == {
            "": {"requests": 1, "passed": {}, "under_way": 0, "trained": each, "dropped": {}, **untold},
            "sub": {
                "requests": 2,
                "passed": {},
                "under_way": 0,
                "trained": each,
                "dropped": {"reward_hook_failed": each},
                **untold,
            },
        }
        totals = (await http.get("/status")).json()["tokens"]
        assert totals["delivered"] + totals["wasted"] == 3 * sampled
        assert (on["route"], on["ended"]) == ("default", "")
        assert (await http.post("/v1/sessions/s/end")).status_code == 200
        assert (await told(http))["ended"] == "endpoint"
        missing = await http.get("/v1/sessions/unknown")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.anyio
async def test_what_waits_for_the_end_of_its_session_is_under_way(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(reward=HOOK, session_end=OUTCOME) as http:
        await ask(http, headers=CODEX)
        on = await told(http)
        assert (on["agents"][""]["under_way"], on["agents"][""]["trained"]["answers"]) == (1, 0)
        await http.post("/v1/sessions/s/end", json={"score": 0.5})
        async with asyncio.timeout(30):
            # until the gateway has heard that the swarm server took the end
            while (on := await told(http))["agents"][""]["under_way"]:
                pass
        assert on["agents"][""]["trained"]["answers"] == GROUP
        assert (on["credited"], on["credit_dropped"]) == (1, 0)
    [group] = swarm.ends
    # the outcome is of the delivered answer alone, the last; the others have their own rewards
    outputs = [end["workflow_output"] for end in group["ends"]]
    assert [output["credit"] for output in outputs] == [0.0, 0.0, 0.0, 0.5]
    assert [output["reward"] for output in outputs] == [0.0, 1.0, 2.0, 3.0]


_FATES = st.tuples(st.sampled_from([None, *DropReason]), st.integers(0, 8), st.integers(0, 500), st.integers(0, 900))


@given(st.lists(_FATES, max_size=20), st.integers(0, 5))
def test_nothing_is_lost_or_counted_twice(fates: list[tuple[DropReason | None, int, int, int]], more: int) -> None:
    ledger = AgentLedger(under_way=len(fates) + more)
    for fate in fates:
        ledger.add(*fate)
    every = [ledger.trained, *ledger.dropped.values()]
    assert ledger.under_way == more
    assert sum(fate.answers for fate in every) == sum(answers for _, answers, _, _ in fates)
    assert sum(fate.sampled for fate in every) == sum(sampled for _, _, sampled, _ in fates)
    assert sum(fate.masked for fate in every) == sum(masked for _, _, _, masked in fates)
