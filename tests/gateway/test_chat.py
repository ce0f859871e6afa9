"""Chat completions through the gateway: groups, selection, headers, failures, control."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gateway.rollout.sampling import Sampler
from gateway.types import Incoming
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.errors import UpstreamError
from swarm.http.client import HttpClient
from swarm.job import TrainJob
from swarm.states import EngineState
from tests.gateway.conftest import BODY, CHAT, Http, OpenGateway, ask
from tests.standins.swarm import MODEL, Swarm, by_number, completion, error, hanging, said
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

SUBMIT = "def on_user_submit_new_requests(request, context):\n    return "


async def groups_of(http: Http) -> dict[str, Any]:
    return (await http.get("/status")).json()["groups"]


async def in_flight(http: Http) -> int:
    """Requests, and work behind them."""
    status = (await http.get("/status")).json()
    return status["in_flight"] + status["background"]


async def test_the_best_of_the_group_comes_back_and_all_rewards_are_submitted(swarm: Swarm, gateway: Http) -> None:
    response = await ask(gateway, chat_template_kwargs={"x": 1}, temperature=0.2)
    body = response.json()
    assert response.status_code == 200
    assert body["choices"][0]["message"]["content"] == "word word word word"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "tiny", "chatcmpl-")
    assert response.headers["x-swarm-policy-version"] == "7"
    assert float(response.headers["x-swarm-reward"]) == pytest.approx(0.4)
    assert float(response.headers["x-swarm-reward-mean"]) == pytest.approx(0.25)
    assert response.headers["x-swarm-trained"] == "true"
    assert response.headers["x-request-id"].startswith("req_")
    assert swarm.bodies == [BODY | {"chat_template_kwargs": {"x": 1}, "temperature": 0.2}]
    [group] = swarm.ends
    assert [end["workflow_output"]["reward"] for end in group["ends"]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert not swarm.open_episodes and not swarm.aborted
    assert await groups_of(gateway) == {"trained": 1, "dropped": {}, "informative": 1, "uninformative": 0}


async def test_what_the_engine_counts_of_all_answers_of_a_group_is_of_none(swarm: Swarm, gateway: Http) -> None:
    """vLLM adds up the tokens of reasoning of one call; where each answer has a call of its own, they are its own."""
    thoughts = {"completion_tokens_details": {"reasoning_tokens": 2}}

    def thinking(body: dict[str, Any], number: int) -> Response:
        whole = completion("so", tokens=3)
        return JSONResponse(whole | {"usage": whole["usage"] | thoughts})

    swarm.answer = thinking
    plain = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert (await ask(gateway)).json()["usage"] == plain
    apart = await ask(gateway, headers={"x-swarm-policy": "best;quorum=3"})
    assert apart.json()["usage"] == plain | thoughts
    both = await ask(gateway, headers={"x-swarm-policy": "best;quorum=3"}, n=2)
    assert both.json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


async def test_a_stream_spells_the_best_answer_and_ends_with_done(swarm: Swarm, gateway: Http) -> None:
    response = await ask(gateway, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"]
    assert (response.headers["x-swarm-policy-version"], response.headers["x-swarm-trained"]) == ("7", "true")
    assert float(response.headers["x-swarm-reward"]) == pytest.approx(0.4)
    *events, done = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == "word word word word"
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    told = {"policy_version": 7, "reward": 0.4, "reward_mean": 0.25, "trained": True, "drop_reason": None}
    assert chunks[-2]["swarm"] == told | {"hook": response.headers["x-swarm-hook"]}
    assert (swarm.bodies, swarm.calls, len(swarm.ends)) == ([BODY], [4], 1)


HOOK_ON_CALLS = """
def on_compute_relative_reward(task, candidates, context):
    return [1.0 - len(candidate.malformed_calls) / 2 for candidate in candidates]
"""


async def test_calls_go_out_as_the_model_wrote_them_and_broken_ones_are_counted(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    def calls(*arguments: str) -> list[dict[str, Any]]:
        functions = [{"name": "look", "arguments": one} for one in arguments]
        return [{"id": f"c{k}", "type": "function", "function": one} for k, one in enumerate(functions)]

    broken, good = calls('{"city": "Ro', "[1]"), calls('{"city": "Ro', '{"city": "Oslo"}')
    swarm.answer = lambda _, number: said(None, tool_calls=good if number == 2 else broken)
    async with open_gateway(reward=HOOK_ON_CALLS) as http:
        chat = await ask(http)
        # parallel calls, one of them broken, are better than two broken ones
        assert chat.json()["choices"][0]["message"]["tool_calls"] == good
        assert float(chat.headers["x-swarm-reward"]) == 0.5
        message = (await http.post("/v1/messages", json=BODY | {"max_tokens": 9})).json()
        assert [block["input"] for block in message["content"]] == [{"INVALID_JSON": '{"city": "Ro'}, {"city": "Oslo"}]
        assert (await http.get("/status")).json()["malformed_calls"] == 2 * (3 * 2 + 1)


@pytest.mark.parametrize("policy", ["best", "first"])
async def test_an_answer_that_a_retry_may_share_is_remembered_without_its_request(
    swarm: Swarm, gateway: Http, policy: str
) -> None:
    """Which may be 16 MiB long, with 128 of them remembered for 20 s."""
    headers = {"x-swarm-policy": policy, "x-stainless-retry-count": "0"}
    answer = await ask(gateway, headers)
    async with asyncio.timeout(30):
        while await in_flight(gateway):
            pass
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Incoming]
    assert (await ask(gateway, headers | {"x-stainless-retry-count": "1"})).json() == answer.json()
    assert len(swarm.claims) == 1


async def test_every_request_is_a_task_of_its_own(swarm: Swarm, gateway: Http) -> None:
    for _ in range(2):
        await ask(gateway, {"x-request-id": "the-same"})
    assert len({group["task_id"] for group in swarm.ends}) == 2


async def test_n_returns_the_best_n_each_with_its_own_usage_and_fields(swarm: Swarm, gateway: Http) -> None:
    def numbered(body: dict[str, Any], number: int) -> Response:
        one = completion("word " * number, tokens=10 + number)
        one["choices"][0] |= {"stop_reason": number, "logprobs": {"content": [{"token": str(number)}]}}
        return JSONResponse(one)

    swarm.answer = numbered
    body = (await ask(gateway, n=2, logprobs=True)).json()
    assert swarm.calls == [4] and "n" not in swarm.bodies[0]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["stop_reason"] for choice in body["choices"]] == [3, 2]
    assert [choice["logprobs"]["content"][0]["token"] for choice in body["choices"]] == ["3", "2"]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 25, "total_tokens": 30}


async def test_n_beyond_the_group_is_refused_by_name(swarm: Swarm, gateway: Http) -> None:
    response = await ask(gateway, n=5)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert not swarm.claims


# ------------------------------------------------------------------ how a group is sampled


async def test_samples_that_share_no_call_run_at_once(swarm: Swarm, gateway: Http) -> None:
    meeting = asyncio.Barrier(4)

    async def together(body: dict[str, Any], number: int) -> Response:
        async with asyncio.timeout(30):
            await meeting.wait()
        return said("x")

    swarm.grouped, swarm.answer = False, together
    assert (await ask(gateway)).headers["x-swarm-trained"] == "true"
    assert swarm.calls == [1] * 4


async def test_bodies_that_a_hook_varies_are_sampled_one_by_one(swarm: Swarm, open_gateway: OpenGateway) -> None:
    submit = SUBMIT + "[{**request.body, 'seed': k // 2} for k in range(context.num_repeat)]"
    async with open_gateway(submit=submit) as http:
        assert (await ask(http, stream=True, n=2)).headers["x-swarm-trained"] == "true"
    assert swarm.calls == [1] * 4
    assert sorted(body["seed"] for body in swarm.bodies) == [0, 0, 1, 1]
    assert all(body.keys() == {*BODY, "seed"} for body in swarm.bodies)


@pytest.mark.parametrize(
    ("sampling", "asked", "calls"),
    [
        ("trainer", {"temperature": 0}, [4]),
        ("app", {"temperature": 0}, [1] * 4),
        ("app", {"temperature": 0.5}, [4]),
        ("app", {}, [4]),
    ],
)
async def test_greedy_calls_share_nothing(
    swarm: Swarm, gateway: Http, sampling: Any, asked: dict[str, Any], calls: list[int]
) -> None:
    swarm.job = TrainJob(model=MODEL, num_repeat=4, batch_size=2, sampling=sampling)
    assert (await ask(gateway, **asked)).headers["x-swarm-trained"] == "true"
    assert swarm.calls == calls


@pytest.mark.parametrize("counts", ["1", "1,1,1", "", "1,x"])
async def test_an_answer_that_does_not_count_its_choices_is_refused(counts: str) -> None:
    one = completion("x")
    one["choices"].append(one["choices"][0] | {"index": 1})
    headers = {"x-swarm-completion-tokens": counts}
    answer = Route("/groups/g/v1/chat/completions", lambda _: JSONResponse(one, headers=headers), methods=["POST"])
    http, later = HttpClient(), asyncio.get_running_loop().time() + 10
    async with listening(Starlette(routes=[answer])) as url:
        episodes = [EpisodeEndpoint(episode_uuid=f"e{k}", base_url="http://x", api_key="k") for k in range(2)]
        group = EpisodeGroup(episodes, "g", f"{url}/groups/g/v1", "key")
        with pytest.raises(UpstreamError, match="choices"):
            await Sampler(http).sample_group(group, (0, 1), b"{}", later)
        headers["x-swarm-completion-tokens"] = "1,2"
        first, second = await Sampler(http).sample_group(group, (0, 1), b"{}", later)
        await http.close()
    assert (first.answer.usage["completion_tokens"], second.answer.usage["total_tokens"]) == (1, 7)


# ------------------------------------------------------------------ what hooks and callers may name


@pytest.mark.parametrize("given", [{"model": ""}, {"model": None}, {}])
async def test_a_request_that_names_no_model_gets_the_one_there_is(
    swarm: Swarm, gateway: Http, given: dict[str, Any]
) -> None:
    response = await gateway.post(CHAT, json={"messages": BODY["messages"], **given})
    assert response.headers["x-swarm-trained"] == "true"
    assert swarm.bodies == [BODY]


async def test_a_submit_hook_cannot_name_another_model(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(submit=SUBMIT + "[{**request.body, 'model': 'other'}] * context.num_repeat") as http:
        assert (await ask(http)).status_code == 200
    assert swarm.bodies == [BODY]


async def test_a_hook_sees_the_headers_without_secrets(swarm: Swarm, open_gateway: OpenGateway) -> None:
    secret = [
        *("Authorization", "Proxy-Authorization", "X-Api-Key", "api-key", "Cookie", "X-Auth-Token", "X-My-Secret"),
        *("x-auth-request-email", "x-session-id", "x-amz-security-token", "x-csrf-token", "x-password"),
        *("openai-credential", "x-idempotency-key", "idempotency-key-secret"),
        # of proxies that log users in: Cloudflare's, Google's, Amazon's
        *("cf-access-jwt-assertion", "x-goog-iap-jwt-assertion", "x-amzn-oidc-data"),
    ]
    needed = ["idempotency-key", "x-swarm-session", "x-stainless-retry-count", "user-agent", "x-app"]
    twice = [("x-name", "one"), ("x-name", "Jörg".encode("latin-1"))]
    headers = [*((name, "hush") for name in secret), *((name, "7") for name in needed), *twice]
    async with open_gateway(submit=SUBMIT + "[{**request.body, 'headers': request.headers}] * 4") as http:
        await http.post(CHAT, json=BODY, headers=headers)
    seen = swarm.bodies[0]["headers"]
    assert "hush" not in seen.values() and {seen[name] for name in needed} == {"7"} and seen["x-name"] == "Jörg"


async def test_the_names_that_agents_give_their_sessions_are_no_secrets(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    names = ["session-id", "x-session-id", "x-parent-session-id", "x-claude-code-session-id"]
    async with open_gateway(submit=SUBMIT + "[{**request.body, 'headers': request.headers}] * 4") as http:
        for agent in ("codex_exec/0.169.0", "opencode/1.18.33", "another"):
            await http.post(CHAT, json=BODY, headers={**dict.fromkeys(names, "s"), "user-agent": agent})
    seen = [[name for name in names if name in body["headers"]] for body in swarm.bodies]
    assert seen == [names, names, ["x-claude-code-session-id"]]


async def test_a_failing_submit_hook_costs_one_sample_and_is_not_trained(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    async with open_gateway(submit=SUBMIT + "3") as http:
        response = await ask(http)
        assert response.json()["choices"][0]["message"]["content"] == "word"
        assert response.headers["x-swarm-drop-reason"] == "submit_hook_failed"
    assert len(swarm.bodies) == 1 and not swarm.ends and not swarm.open_episodes


@pytest.mark.parametrize("policy", ["best", "first"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"submit": SUBMIT + "3"}, "submit_hook_failed"), ({"num_repeat": 2}, "group_size_differs_from_job")],
)
async def test_a_group_that_is_not_to_be_trained_waits_for_no_feedback(
    swarm: Swarm, open_gateway: OpenGateway, settings: dict[str, Any], reason: str, policy: str
) -> None:
    async with open_gateway(feedback_window_seconds=1000, policy=policy, **settings) as http:
        response = await ask(http)
        assert response.headers["x-swarm-trained"] == "false"
        assert response.headers["x-swarm-drop-reason"] == reason
        await swarm.until(lambda: not swarm.open_episodes)
        rating = {"completion_id": response.json()["id"], "score": 1}
        assert (await http.post("/v1/feedback", json=rating)).json()["trains"] is False


@pytest.mark.parametrize("size", [2, 6])
async def test_a_group_of_another_size_than_the_jobs_is_served_but_not_trained(
    swarm: Swarm, open_gateway: OpenGateway, size: int
) -> None:
    async with open_gateway(num_repeat=size) as http:
        response = await ask(http)
        assert response.headers["x-swarm-trained"] == "false"
        assert response.headers["x-swarm-drop-reason"] == "group_size_differs_from_job"
    assert sum(swarm.calls) == size and not swarm.ends and not swarm.open_episodes


async def test_shuffle_permutes_what_is_submitted_and_nothing_else(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(control="shuffle") as http:
        for _ in range(12):
            response = await ask(http)
            assert response.json()["choices"][0]["message"]["content"] == "word word word word"
            assert float(response.headers["x-swarm-reward"]) == pytest.approx(0.4)
    submitted = [tuple(end["workflow_output"]["reward"] for end in group["ends"]) for group in swarm.ends]
    assert {tuple(sorted(rewards)) for rewards in submitted} == {(0.1, 0.2, 0.3, 0.4)}
    assert len(set(submitted)) > 1


# ------------------------------------------------------------------ failures


async def test_one_failed_sample_drops_the_group_and_the_user_gets_the_best_of_the_rest(
    swarm: Swarm, gateway: Http
) -> None:
    swarm.grouped = False
    swarm.answer = lambda body, number: error(500, "boom") if number == 3 else said("word " * (number + 1))
    response = await ask(gateway)
    assert response.json()["choices"][0]["message"]["content"] == "word word word "
    assert response.headers["x-swarm-trained"] == "false"
    assert response.headers["x-swarm-drop-reason"] == "sample_failed"
    await swarm.until(lambda: not swarm.open_episodes)
    assert not swarm.ends
    groups = await groups_of(gateway)
    assert (groups["trained"], groups["dropped"]) == (0, {"sample_failed": 1})


@pytest.mark.parametrize(("grouped", "calls"), [(True, [4, 4]), (False, [1] * 5)])
async def test_a_sample_that_was_not_begun_is_tried_once_more(
    swarm: Swarm, gateway: Http, grouped: bool, calls: list[int]
) -> None:
    early = [error(503, "syncing", retry_after="0")]
    swarm.grouped = grouped
    swarm.answer = lambda body, number: early.pop() if early and number == 0 else said("x")
    response = await ask(gateway)
    assert (response.headers["x-swarm-trained"], swarm.calls, len(swarm.claims)) == ("true", calls, 1)


async def test_a_sample_that_may_have_been_begun_is_not(swarm: Swarm, gateway: Http) -> None:
    swarm.answer = lambda *_: error(500, "boom")
    response = await ask(gateway)
    assert (response.status_code, len(swarm.bodies)) == (502, 1)
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "engine_failed"
    await swarm.until(lambda: not swarm.open_episodes)


async def test_a_model_that_is_gone_meanwhile_is_a_404_and_not_tried_again(swarm: Swarm, gateway: Http) -> None:
    message = {"message": "this swarm serves 'new'", "code": "model_not_found", "param": "model"}
    swarm.answer = lambda *_: JSONResponse({"error": message}, 404)
    response = await ask(gateway)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert response.headers["x-should-retry"] == "false" and len(swarm.claims) == 1


@pytest.mark.parametrize(
    "lost",
    [
        error(409, "the episode was deleted with its engine phase"),
        JSONResponse({"error": {"message": "the engine is gone", "code": "engine_offline"}}, 503),
        HTMLResponse("<html>of a proxy whose server is gone</html>", 502),
    ],
)
async def test_a_group_that_is_lost_gives_way_to_another(swarm: Swarm, gateway: Http, lost: Response) -> None:
    swarm.answer = lambda *_: lost if len(swarm.claimed) == 4 else said("second")
    response = await ask(gateway)
    assert response.json()["choices"][0]["message"]["content"] == "second"
    assert (response.headers["x-swarm-trained"], swarm.calls, len(swarm.claims)) == ("true", [4, 4], 2)
    assert swarm.aborted == {"e0", "e1", "e2", "e3"} and len(swarm.ends) == 1


async def test_groups_lost_again_and_again_are_a_503(swarm: Swarm, gateway: Http) -> None:
    swarm.answer = lambda *_: error(404, "no such episode")
    response = await ask(gateway)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "episode_lost")
    assert len(swarm.claims) == 3
    await swarm.until(lambda: not swarm.open_episodes)


@pytest.mark.parametrize("policy", ["best", "first"])
async def test_a_deadline_may_be_infinite(swarm: Swarm, open_gateway: OpenGateway, policy: str) -> None:
    names = ("sample_timeout_seconds", "hook_timeout_seconds", "submit_timeout_seconds")
    async with open_gateway(policy=policy, **dict.fromkeys(names, math.inf)) as http:
        assert [(await ask(http, stream=stream)).status_code for stream in (False, True)] == [200, 200]
        await swarm.until(lambda: len(swarm.ends) == 2)


async def test_a_sample_deadline_is_a_504(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.answer = hanging
    async with open_gateway(sample_timeout_seconds=0.1) as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "sample_timeout")
    await swarm.until(lambda: not swarm.sampling and not swarm.open_episodes)


async def test_a_disconnect_while_waiting_for_episodes_leaks_none(swarm: Swarm, gateway: Http) -> None:
    # else the user might be answered before the gateway has heard that there is none
    swarm.answer = hanging
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    asking = asyncio.create_task(ask(gateway))
    await swarm.until(lambda: swarm.claims)
    asking.cancel()
    await asyncio.wait({asking})
    await swarm.until(lambda: swarm.withdrawn == {claim["idempotency_key"] for claim in swarm.claims})
    await swarm.set_state(EngineState.ROLLING)
    # another one is answered, whose claim comes behind that one
    swarm.answer = by_number
    assert (await ask(gateway)).status_code == 200
    await swarm.until(lambda: len(swarm.ends) == 1)
    assert not swarm.open_episodes


# ------------------------------------------------------------------ submissions


async def test_a_submission_is_offered_again_until_acknowledged(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.end_status = [503] * 4
    async with open_gateway(acknowledge_seconds=0.05) as http:
        assert (await ask(http)).headers["x-swarm-trained"] == "pending"
        await swarm.until(lambda: swarm.ends, seconds=10)
        assert not swarm.aborted


async def test_shutdown_waits_for_submissions_under_way(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        swarm.end_status = [503] * 3
        await ask(http)
    assert len(swarm.ends) == 1


async def test_a_refused_submission_is_counted(swarm: Swarm, gateway: Http) -> None:
    swarm.end_status = [409]
    response = await ask(gateway)
    assert (response.status_code, response.headers["x-swarm-drop-reason"]) == (200, "submission_refused")
    groups = await groups_of(gateway)
    assert (groups["trained"], groups["dropped"]) == (0, {"submission_refused": 1})
    assert not swarm.open_episodes
