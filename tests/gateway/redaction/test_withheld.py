"""``redact: group``: what holds private data is answered as ever, and neither kept nor trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.data.consent import Consent
from gateway.redaction.rules import Rules
from tests.gateway.conftest import CHAT, ask, gateway_before
from tests.gateway.data.test_erasure import traces
from tests.standins.vllm import (
    completion_chunk,
    plain,
    plain_choice,
    role_chunk,
    several,
    streamed,
    token_chunk,
    told,
    usage_chunk,
)
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig

EMAIL = "anna.schmidt@example.org"
REDACT: dict[str, Any] = {"data": {"redact": "group"}}
BEST = "t1 t2 t3"
#: Adds a line to each prompt.
SUBMIT = """
from reward_hooks import Submission, Task

def on_user_submit_new_requests(request, context):
    words = [*request.body["messages"], {"role": "user", "content": "Signed, anna.schmidt@example.org"}]
    bodies = [{**request.body, "messages": words}] * context.num_repeat
    return Submission(task=Task(task_id=request.request_id), requests=bodies)
"""


#: Says why, in the user's words.
QUOTES = """
from reward_hooks import Reward

def on_compute_relative_reward(task, candidates, context):
    given = [c.feedback for c in candidates]
    said = [f"rated {f.rating} {f.comment} {f.better}" if f else "" for f in given]
    return [Reward(value=place, reason=reason) for place, reason in enumerate(said)]
"""


def asked(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def fate(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-swarm-trained"], answer.headers.get("x-swarm-drop-reason", "")


def answers(*texts: str) -> Any:
    """Groups whose answers have these texts, of as many tokens as places."""
    choices = [plain_choice(list(range(1, place + 2)), index=place) for place in range(len(texts))]
    for choice, text in zip(choices, texts, strict=True):
        choice["message"]["content"] = text
    return several(*choices)


async def ended(rig: server.Rig) -> None:
    while rig.controller.pool.information().running_episodes:
        await rig.client.get("/health")


@pytest.mark.parametrize("policy", ["best", "first"])
async def test_a_private_prompt_is_answered_and_nothing_is_claimed(
    rig: server.Rig, tmp_path: Path, policy: str
) -> None:
    async with gateway_before(str(rig.client.base_url), tmp_path, policy=policy, **REDACT) as http:
        rig.vllm.default = answers("t1", BEST) if policy == "best" else rig.vllm.default
        answer = await ask(http, **asked(f"write to {EMAIL}"))
        assert fate(answer) == ("false", "private_data")
        assert policy == "first" or answer.json()["choices"][0]["message"]["content"] == BEST
        # the user's text is not masked
        assert EMAIL in rig.vllm.requests[0][1]["messages"][0]["content"]
        counts = (await http.get("/status")).json()
        assert counts["withheld"] == {"prompt": 1} and counts["sessions"]["open"] == 0
        metrics = (await http.get("/metrics")).text
        assert 'gateway_withheld_total{route="default",where="prompt"} 1.0' in metrics
        assert rig.controller.pool.information().completed_episodes == 0
        harmless = await ask(http, **asked("write to nobody, of order no. 0171 1234567"))
        assert harmless.headers["x-swarm-trained"] in ("true", "pending")


async def test_a_group_with_one_private_answer_is_not_trained(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = answers(f"{EMAIL}", BEST)
    async with gateway_before(str(rig.client.base_url), tmp_path, **REDACT) as http:
        answer = await ask(http)
        assert fate(answer) == ("false", "private_data")
        assert answer.json()["choices"][0]["message"]["content"] == BEST
        counts = (await http.get("/status")).json()
        assert (counts["withheld"], counts["groups"]["dropped"]) == ({"answer": 1}, {"private_data": 1})
        await ended(rig)
        assert rig.controller.pool.information().completed_episodes == 0


async def test_a_hook_that_quotes_the_private_answer_it_fails_on_is_not_quoted(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = answers(EMAIL, BEST)
    fails = "def on_compute_relative_reward(task, candidates, context): int(candidates[0].text)"
    async with gateway_before(str(rig.client.base_url), tmp_path, reward=fails, **REDACT) as http:
        assert fate(await ask(http)) == ("false", "private_data")
        await ended(rig)
    assert traces(tmp_path, EMAIL.encode()) == set()


@pytest.mark.parametrize("redact", ["group", "before_sampling"])
async def test_what_is_private_in_feedback_reaches_no_hook_and_no_journal(
    rig: server.Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture, redact: str
) -> None:
    async with gateway_before(
        str(rig.client.base_url),
        tmp_path,
        reward=QUOTES,
        session_end='def on_session_end(session, context): assert "@" not in str(session)',
        data={"redact": redact},
        feedback_window_seconds=600,
        session_window_seconds=600,
        acknowledge_seconds=0,
    ) as http:
        answer = await ask(http, {"x-swarm-session": "chat-1"})
        given = {"score": 1, "comment": f"say {EMAIL}", "better": f"Ask {EMAIL}."}
        rated = await http.post("/v1/feedback", json={"completion_id": answer.json()["id"], **given})
        assert rated.json()["trains"] is True
        assert (await http.post("/v1/sessions/chat-1/end", json=given)).json()["ended"]
    await rig.eventually(lambda: rig.controller.pool.information().completed_episodes == 2)
    assert traces(tmp_path, b"rated 1.0") and "hook fails" not in caplog.text
    assert traces(tmp_path, EMAIL.encode()) == set()


async def test_a_private_answer_is_in_no_session_and_not_kept(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = answers("t1", f"so ask {EMAIL} or {EMAIL}")
    log: dict[str, Any] = {"request_log": {"path": tmp_path / "requests.jsonl"}}
    async with gateway_before(str(rig.client.base_url), tmp_path, **REDACT, **log) as http:
        counted = asked(EMAIL) | {"model": "tiny", "max_tokens": 9}
        await http.post("/v1/messages/count_tokens", json=counted)
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": "whom?"})
        assert fate(answer) == ("false", "private_data") and EMAIL in answer.text
        assert (await http.get(f"/v1/responses/{answer.json()['id']}")).status_code == 404
        assert (await http.get("/status")).json()["sessions"]["open"] == 0
    assert EMAIL not in (tmp_path / "requests.jsonl").read_text()


async def test_a_private_answer_that_was_streamed_live_is_not_kept_either(rig: server.Rig, tmp_path: Path) -> None:
    live = streamed(
        role_chunk(),
        token_chunk([1], delta={"content": EMAIL[:9]}),
        token_chunk([2], "stop", delta={"content": EMAIL[9:]}),
        usage_chunk(2),
    )
    rig.vllm.default = lambda sent: (live if sent.get("stream") else plain([1]))(sent)
    log: dict[str, Any] = {"request_log": {"path": tmp_path / "requests.jsonl"}}
    async with gateway_before(str(rig.client.base_url), tmp_path, policy="first", **REDACT, **log) as http:
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": "whom?", "stream": True})
        assert answer.status_code == 200 and EMAIL in answer.text
        [kept] = {part.split('"')[0] for part in answer.text.split('"id":"') if part.startswith("resp_")}
        assert (await http.get(f"/v1/responses/{kept}")).status_code == 404
        await ended(rig)
        counts = (await http.get("/status")).json()
        assert (counts["withheld"], counts["sessions"]["open"]) == ({"answer": 1}, 0)
    assert EMAIL[9:] not in (tmp_path / "requests.jsonl").read_text()


async def test_what_a_hook_writes_into_the_prompt_counts(rig: server.Rig, tmp_path: Path) -> None:
    async with gateway_before(str(rig.client.base_url), tmp_path, submit=SUBMIT, **REDACT) as http:
        assert fate(await ask(http)) == ("false", "private_data")
        assert fate(await ask(http, {"x-swarm-policy": "first"})) == ("false", "private_data")
        assert (await http.get("/status")).json()["withheld"] == {"prompt": 2}
        assert rig.controller.pool.information().completed_episodes == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", CHAT])
async def test_every_dialect_is_read(rig: server.Rig, tmp_path: Path, path: str) -> None:
    fields: dict[str, Any] = {
        "/v1/completions": {"prompt": EMAIL},
        "/v1/responses": {"input": "hi", "instructions": EMAIL},
        "/v1/messages": {"max_tokens": 9, "system": EMAIL, "messages": asked("hi")["messages"]},
        CHAT: {**asked("hi"), "tools": [{"type": "function", "function": {"name": "f", "description": EMAIL}}]},
    }[path]
    async with gateway_before(str(rig.client.base_url), tmp_path, **REDACT) as http:
        await http.post(path, json={"model": "tiny", **fields})
        assert (await http.get("/status")).json()["withheld"] == {"prompt": 1}
        assert rig.controller.pool.information().completed_episodes == 0


async def test_of_several_prompts_each_is_read_for_itself(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = told([1], [1, 2])
    async with gateway_before(str(rig.client.base_url), tmp_path, **REDACT) as http:
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", EMAIL, "b"]})
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 3)
        assert (await http.get("/status")).json()["withheld"] == {"prompt": 1}
        assert sorted(rig.controller.pool.information().tasks.values()) == [2, 2]


@pytest.mark.parametrize("redact", ["group", "before_sampling"])
@pytest.mark.parametrize("policy", ["best", "first"])
async def test_a_prompt_of_token_ids_cannot_be_read_and_is_not_kept(
    rig: server.Rig, tmp_path: Path, redact: str, policy: str
) -> None:
    rig.vllm.default = told([1], [1, 2])
    if policy == "first":
        rig.vllm.default = streamed(completion_chunk([1], "stop", [3, 4]), usage_chunk(1, 2))
    async with gateway_before(str(rig.client.base_url), tmp_path, policy=policy, data={"redact": redact}) as http:
        answer = await http.post(
            "/v1/completions", json={"model": "tiny", "prompt": [3, 4], "stream": policy == "first"}
        )
        assert fate(answer) == ("false", "private_data")
        assert (await http.get("/status")).json()["withheld"] == {"prompt": 1}
        assert rig.controller.pool.information().completed_episodes == 0


async def test_without_the_setting_all_is_trained(rig: server.Rig, tmp_path: Path) -> None:
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        assert fate(await ask(http, **asked(f"write to {EMAIL}"))) == ("true", "")
        assert (await http.get("/status")).json()["withheld"] == {}


def test_consent_is_given_by_the_route_and_taken_by_what_a_text_holds() -> None:
    assert not Consent().keeps("hi")
    assert Consent(granted=True).keeps([EMAIL])
    assert Consent(granted=True, rules=Rules()).keeps("hi") and not Consent(granted=True, rules=Rules()).keeps([EMAIL])
