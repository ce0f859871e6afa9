"""Chat completions through the gateway, plain: groups, selection, headers, failures, control."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from swarm.states import EngineState
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm, completion, error

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"
RAISES = "def on_compute_relative_reward(task, candidates, context):\n    raise RuntimeError('judge is down')\n"


async def counts(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/status")).json()


async def test_the_best_of_the_group_comes_back_and_all_rewards_are_submitted(
    swarm: Swarm, gateway: httpx.AsyncClient
) -> None:
    response = await gateway.post(CHAT, json={**BODY, "chat_template_kwargs": {"x": 1}, "temperature": 0.2})
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
    assert swarm.bodies == [{**BODY, "chat_template_kwargs": {"x": 1}, "temperature": 0.2}]
    [group] = swarm.ends
    assert [end["workflow_output"]["reward"] for end in group["ends"]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert not swarm.open_episodes and not swarm.aborted
    assert (await counts(gateway))["groups"] == {"trained": 1, "dropped": {}, "informative": 1, "uninformative": 0}


async def test_every_request_is_a_task_of_its_own(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    for _ in range(2):
        await gateway.post(CHAT, json=BODY, headers={"x-request-id": "the-same"})
    assert len({group["task_id"] for group in swarm.ends}) == 2


async def test_the_samples_of_a_group_run_at_once(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    meeting = asyncio.Barrier(4)

    swarm.grouped = False

    async def together(body: dict[str, Any], number: int) -> Response:
        async with asyncio.timeout(30):
            await meeting.wait()
        return JSONResponse(completion("x"))

    swarm.answer = together
    assert (await gateway.post(CHAT, json=BODY)).status_code == 200


async def test_n_returns_the_best_n(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    body = (await gateway.post(CHAT, json={**BODY, "n": 2})).json()
    assert [len(choice["message"]["content"].split()) for choice in body["choices"]] == [4, 3]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 6
    assert all("n" not in sent for sent in swarm.bodies)


async def test_n_beyond_the_group_is_refused_by_name(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    response = await gateway.post(CHAT, json={**BODY, "n": 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert not swarm.claims


async def test_ties_go_to_the_first(swarm: Swarm, open_gateway: OpenGateway) -> None:
    equal = "def on_compute_relative_reward(task, candidates, context):\n    return [0.5] * len(candidates)\n"
    async with open_gateway(reward=equal) as http:
        body = (await http.post(CHAT, json=BODY)).json()
    assert body["choices"][0]["message"]["content"] == "word"


async def test_the_submit_hook_shapes_the_requests(swarm: Swarm, open_gateway: OpenGateway) -> None:
    submit = """
def on_user_submit_new_requests(request, context):
    return [{**request.body, "seed": k} for k in range(context.num_repeat)]
"""
    async with open_gateway(submit=submit) as http:
        await http.post(CHAT, json={**BODY, "stream": True, "n": 2})
    assert sorted(body["seed"] for body in swarm.bodies) == [0, 1, 2, 3]
    assert all(body.keys() == {*BODY, "seed"} for body in swarm.bodies)


@pytest.mark.parametrize("given", [{"model": ""}, {"model": None}, {}])
async def test_a_request_that_names_no_model_gets_the_one_there_is(
    swarm: Swarm, gateway: httpx.AsyncClient, given: dict[str, Any]
) -> None:
    response = await gateway.post(CHAT, json={"messages": BODY["messages"], **given})
    assert response.headers["x-swarm-trained"] == "true"
    assert swarm.bodies == [BODY]


async def test_a_submit_hook_cannot_name_another_model(swarm: Swarm, open_gateway: OpenGateway) -> None:
    submit = """
def on_user_submit_new_requests(request, context):
    return [{**request.body, "model": "other"}] * context.num_repeat
"""
    async with open_gateway(submit=submit) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
    assert swarm.bodies == [BODY]


async def test_a_model_that_is_gone_meanwhile_is_a_404_and_not_tried_again(
    swarm: Swarm, gateway: httpx.AsyncClient
) -> None:
    async def another_job(body: dict[str, Any], number: int) -> Response:
        message = {"message": "this swarm serves 'new'", "code": "model_not_found", "param": "model"}
        return JSONResponse({"error": message}, 404)

    swarm.answer = another_job
    response = await gateway.post(CHAT, json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert response.headers["x-should-retry"] == "false" and len(swarm.claims) == 1


async def test_a_hook_sees_the_headers_without_secrets(swarm: Swarm, open_gateway: OpenGateway) -> None:
    submit = """
def on_user_submit_new_requests(request, context):
    return [{**request.body, "headers": request.headers}] * context.num_repeat
"""
    names = ["Authorization", "X-Api-Key", "api-key", "X-Auth-Token", "Cookie", "Proxy-Authorization", "X-My-Secret"]
    async with open_gateway(submit=submit) as http:
        await http.post(CHAT, json=BODY, headers={"X-Team": "blue", **dict.fromkeys(names, "hush")})
    seen = swarm.bodies[0]["headers"]
    assert seen["x-team"] == "blue" and "hush" not in seen.values()


async def test_one_failed_sample_drops_the_group_and_the_user_gets_the_best_of_the_rest(
    swarm: Swarm, gateway: httpx.AsyncClient
) -> None:
    swarm.grouped = False

    async def last_fails(body: dict[str, Any], number: int) -> Response:
        return error(500, "boom") if number == 3 else JSONResponse(completion("word " * (number + 1)))

    swarm.answer = last_fails
    response = await gateway.post(CHAT, json=BODY)
    assert response.json()["choices"][0]["message"]["content"] == "word word word "
    assert response.headers["x-swarm-trained"] == "false"
    assert response.headers["x-swarm-drop-reason"] == "sample_failed"
    await swarm.until(lambda: not swarm.open_episodes)
    assert not swarm.ends
    groups = (await counts(gateway))["groups"]
    assert (groups["trained"], groups["dropped"]) == (0, {"sample_failed": 1})


async def test_a_sample_that_was_not_begun_is_tried_once_more(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    swarm.grouped = False
    tries = 0

    async def first_is_early(body: dict[str, Any], number: int) -> Response:
        nonlocal tries
        tries += 1
        return error(503, "syncing", retry_after="0") if tries == 1 else JSONResponse(completion("x"))

    swarm.answer = first_is_early
    response = await gateway.post(CHAT, json=BODY)
    assert (response.headers["x-swarm-trained"], tries) == ("true", 5)


async def test_a_sample_that_may_have_been_begun_is_not(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def fails(body: dict[str, Any], number: int) -> Response:
        return error(500, "boom")

    swarm.answer = fails
    response = await gateway.post(CHAT, json=BODY)
    assert (response.status_code, len(swarm.bodies)) == (502, 1)
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "engine_failed"
    await swarm.until(lambda: not swarm.open_episodes)


async def test_what_the_engine_says_against_the_request_reaches_the_user(
    swarm: Swarm, gateway: httpx.AsyncClient
) -> None:
    async def too_long(body: dict[str, Any], number: int) -> Response:
        return error(400, "maximum context length is 64 tokens")

    swarm.answer = too_long
    response = await gateway.post(CHAT, json=BODY)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "maximum context length is 64 tokens",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }


async def test_a_sample_deadline_is_a_504(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async def hangs(body: dict[str, Any], number: int) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    swarm.answer = hangs
    async with open_gateway(sample_timeout_seconds=0.2) as http:
        response = await http.post(CHAT, json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "sample_timeout")
    await swarm.until(lambda: swarm.cancelled == 4 and not swarm.open_episodes)


async def test_a_failing_submit_hook_costs_one_sample_and_is_not_trained(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    async with open_gateway(submit="def on_user_submit_new_requests(request, context):\n    return 3\n") as http:
        response = await http.post(CHAT, json=BODY)
        assert response.json()["choices"][0]["message"]["content"] == "word"
        assert response.headers["x-swarm-drop-reason"] == "submit_hook_failed"
    assert len(swarm.bodies) == 1 and not swarm.ends and not swarm.open_episodes


@pytest.mark.parametrize("size", [2, 6])
async def test_a_group_of_another_size_than_the_jobs_is_served_but_not_trained(
    swarm: Swarm, open_gateway: OpenGateway, size: int
) -> None:
    async with open_gateway(num_repeat=size) as http:
        response = await http.post(CHAT, json=BODY)
        assert response.headers["x-swarm-trained"] == "false"
        assert response.headers["x-swarm-drop-reason"] == "group_size_differs_from_job"
    assert sum(swarm.calls) == size and not swarm.ends and not swarm.open_episodes


async def test_shuffle_permutes_what_is_submitted_and_nothing_else(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(control="shuffle") as http:
        for _ in range(12):
            response = await http.post(CHAT, json=BODY)
            assert response.json()["choices"][0]["message"]["content"] == "word word word word"
            assert float(response.headers["x-swarm-reward"]) == pytest.approx(0.4)
    submitted = [tuple(end["workflow_output"]["reward"] for end in group["ends"]) for group in swarm.ends]
    assert {tuple(sorted(rewards)) for rewards in submitted} == {(0.1, 0.2, 0.3, 0.4)}
    assert len(set(submitted)) > 1


async def test_a_submission_is_offered_again_until_acknowledged(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.end_status = [503] * 4
    async with open_gateway(acknowledge_seconds=0.05) as gateway:
        response = await gateway.post(CHAT, json=BODY)
        assert response.headers["x-swarm-trained"] == "pending"
        await swarm.until(lambda: swarm.ends, seconds=10)
        assert not swarm.aborted


async def test_a_refused_submission_is_counted(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    swarm.end_status = [409]
    response = await gateway.post(CHAT, json=BODY)
    assert (response.status_code, response.headers["x-swarm-drop-reason"]) == (200, "submission_refused")
    groups = (await counts(gateway))["groups"]
    assert (groups["trained"], groups["dropped"]) == (0, {"submission_refused": 1})
    assert not swarm.open_episodes


async def test_a_quarantined_group_is_not_called_trained(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    swarm.end_note = "not trained: quarantined"
    response = await gateway.post(CHAT, json=BODY)
    assert (response.headers["x-swarm-trained"], response.headers["x-swarm-drop-reason"]) == ("false", "quarantined")


async def test_a_group_lost_to_a_weight_sync_is_run_again(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def first_group_is_lost(body: dict[str, Any], number: int) -> Response:
        if len(swarm.claimed) == 4:
            return error(409, "the episode was deleted with its engine phase")
        return JSONResponse(completion("second"))

    swarm.answer = first_group_is_lost
    response = await gateway.post(CHAT, json=BODY)
    assert response.json()["choices"][0]["message"]["content"] == "second"
    assert response.headers["x-swarm-trained"] == "true"
    assert swarm.aborted == {"e0", "e1", "e2", "e3"} and len(swarm.ends) == 1


async def test_groups_lost_again_and_again_are_a_503(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def lost(body: dict[str, Any], number: int) -> Response:
        return error(404, "no such episode")

    swarm.answer = lost
    response = await gateway.post(CHAT, json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "episode_lost")
    assert len(swarm.claims) == 3
    await swarm.until(lambda: not swarm.open_episodes)


async def test_shutdown_waits_for_submissions_under_way(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        swarm.end_status = [503] * 3
        await http.post(CHAT, json=BODY)
    assert len(swarm.ends) == 1


async def test_a_syncing_engine_is_waited_for(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(gateway.post(CHAT, json=BODY))
        await swarm.until(lambda: swarm.claims)
        assert not asking.done()
        await swarm.set_state(EngineState.ROLLING)
    assert asking.result().status_code == 200


async def hangs(body: dict[str, Any], number: int) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_disconnect_while_waiting_for_episodes_leaks_none(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    # else the user might be answered before the gateway has heard that there is none
    swarm.answer = hangs
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    asking = asyncio.create_task(gateway.post(CHAT, json=BODY))
    await swarm.until(lambda: swarm.claims)
    asking.cancel()
    await asyncio.wait({asking})
    await swarm.set_state(EngineState.ROLLING)
    await swarm.until(lambda: len(swarm.aborted) == 4)
    assert not swarm.open_episodes


async def test_more_requests_at_once_than_allowed_are_429(swarm: Swarm, open_gateway: OpenGateway) -> None:
    go = asyncio.Event()

    async def waits(body: dict[str, Any], number: int) -> Response:
        await go.wait()
        return JSONResponse(completion("x"))

    swarm.answer = waits
    async with open_gateway(max_in_flight=1, max_queued=0) as http, asyncio.TaskGroup() as group:
        first = group.create_task(http.post(CHAT, json=BODY))
        await swarm.until(lambda: swarm.sampling == 4)
        second = await http.post(CHAT, json=BODY)
        go.set()
        assert (await first).status_code == 200
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert second.headers["x-should-retry"] == "true"
