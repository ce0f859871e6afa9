"""The SDKs of OpenAI and Anthropic, unmodified: what :mod:`tests.clients`, which has the whole stack, does not show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from starlette.responses import JSONResponse

from tests.gateway.api.conftest import LOOK, calling, saying
from tests.gateway.conftest import Http, OpenGateway
from tests.standins.swarm import Swarm, completion, error, once

pytestmark = pytest.mark.anyio

BEST = "word word word word"
HI: Any = {"role": "user", "content": "hi"}
CHAT: Any = {"model": "tiny", "messages": [HI]}
FUNCTION: Any = {"type": "function", "name": "look", "parameters": LOOK, "strict": True}


@pytest.fixture
async def sdk(gateway: Http) -> AsyncIterator[Any]:
    """OpenAI's SDK, asynchronous."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(gateway: Http) -> AsyncIterator[Any]:
    """Anthropic's SDK, asynchronous."""
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=str(gateway.base_url), api_key="any", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------------- Anthropic Messages


async def test_pings_before_the_message_do_not_disturb(swarm: Swarm, open_gateway: OpenGateway) -> None:
    import anthropic

    pinged = asyncio.Event()
    swarm.answer = once(pinged, saying("late"))
    async with (
        open_gateway(keepalive_seconds=0.05) as http,
        anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="any", max_retries=0) as claude,
        claude.messages.stream(model="tiny", max_tokens=9, messages=[HI]) as stream,
    ):
        # the headers are here, so the first ping is
        pinged.set()
        assert (await stream.get_final_message()).content[0].to_dict()["text"] == "late"


# ---------------------------------------------------------------------- OpenAI Responses


async def test_items_of_kept_responses_can_be_referred_to(open_gateway: OpenGateway, swarm: Swarm) -> None:
    swarm.answer = calling("Rome")
    async with open_gateway(api_keys=["one", "two"]) as http:
        url = f"{http.base_url}/v1"
        one, two = (openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) for key in ("one", "two"))
        async with one, two:
            async with one.responses.stream(model="tiny", input="hi", tools=[FUNCTION]) as stream:
                kept = await stream.get_final_response()
            # as the AI SDK sends it
            ids: list[Any] = [{"type": "item_reference", "id": item.id} for item in kept.output]
            result: Any = {"type": "function_call_output", "call_id": "call-0", "output": "sunny"}
            again: Any = {"model": "tiny", "input": [HI, *ids, result], "tools": [FUNCTION]}
            swarm.answer = saying("It is.")
            # its type may be left out, or null
            forms = [ids, [{"id": each["id"]} for each in ids], [{**each, "type": None} for each in ids]]
            for form in forms:
                await one.responses.create(**again | {"input": [HI, *form, result]})
                assert [turn["role"] for turn in swarm.bodies[-1]["messages"]] == ["user", "assistant", "tool"]
            turn = swarm.bodies[-1]["messages"][1]
            assert (turn["reasoning"], turn["tool_calls"][0]["function"]["name"]) == ("hm", "look")
            for client, unknown in ((two, again), (one, again | {"input": [{**ids[0], "id": "rs_7_0"}]})):
                with pytest.raises(openai.NotFoundError, match=r"Item with id 'rs_.*' not found") as refused:
                    await client.responses.create(**unknown)
                assert refused.value.param == "input"


async def test_responses_are_kept_given_back_and_forgotten(sdk: Any) -> None:
    kept = await sdk.responses.create(model="tiny", input="hi")
    assert (await sdk.responses.retrieve(kept.id)).output_text == BEST
    await sdk.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="tiny", input="hi", previous_response_id=kept.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    # a flag may be text
    for off in (False, "false", 0):
        unkept = await sdk.responses.create(model="tiny", input="hi", store=off)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(unkept.id)


# ---------------------------------------------------------------------- Chat and Completions


async def test_chat(sdk: Any) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(**CHAT)
    assert (raw.headers["x-swarm-policy-version"], raw.request_id) == ("7", raw.headers["x-request-id"])
    stream = await sdk.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == BEST
    assert chunks[-1].usage.prompt_tokens == 5
    assert chunks[-2].model_extra.keys() == {"swarm"} and chunks[-2].model_extra["swarm"]["trained"] is True


async def test_chat_errors_have_their_sdk_class(sdk: Any, swarm: Swarm) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(**CHAT | {"model": "other"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    swarm.answer = lambda *_: error(400, "too long")
    with pytest.raises(openai.BadRequestError, match="too long"):
        await sdk.chat.completions.create(**CHAT)
    swarm.answer = lambda *_: error(500, "boom")
    claims = len(swarm.claims)
    # a fan-out that failed is not to be tried again
    with pytest.raises(openai.APIStatusError):
        await sdk.with_options(max_retries=3).chat.completions.create(**CHAT)
    assert len(swarm.claims) == claims + 1


async def test_completions(sdk: Any, swarm: Swarm) -> None:
    answer = await sdk.completions.create(model="tiny", prompt="Once", echo=True, n=2)
    assert [choice.text for choice in answer.choices] == [f"Once{BEST}", "Onceword word word"]
    assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
    assert swarm.bodies[-1]["prompt"] == "Once" and "messages" not in swarm.bodies[-1]
    stream = await sdk.completions.create(model="tiny", prompt="Once", stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == BEST


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_prompt_of_a_list_is_a_group_of_its_own(sdk: Any, swarm: Swarm, streamed: bool) -> None:
    ask: Any = {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "echo": True}
    texts: dict[int, str] = {}
    if streamed:
        stream = await sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        for choice in [choice for chunk in chunks for choice in chunk.choices]:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        usage = chunks[-1].usage
        assert len({chunk.id for chunk in chunks}) == 1
    else:
        answer = await sdk.completions.create(**ask)
        texts = {choice.index: choice.text for choice in answer.choices}
        usage = answer.usage
    assert sorted(texts) == list(range(6))
    assert [texts[index][0] for index in range(6)] == ["a", "a", "b", "b", "c", "c"]
    assert usage is not None and usage.prompt_tokens == 15
    await swarm.until(lambda: len(swarm.ends) == 3)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_list_of_prompts_is_one_request_of_its_route(open_gateway: OpenGateway, streamed: bool) -> None:
    """Its prompts do not wait for each other's places."""
    async with open_gateway(max_in_flight=1, max_queued=2, queue_seconds=20.0) as http:
        ask = {"model": "tiny", "prompt": ["a", "b", "c"], "stream": streamed}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=ask) for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
        load = (await http.get("/status")).json()["routes"]["default"]["load"]
        assert load == {"running": 0, "waiting": 0, "refused": 0}


@pytest.mark.parametrize("count", ["0", "1"])
async def test_equal_prompts_of_a_list_are_answered_each(open_gateway: OpenGateway, swarm: Swarm, count: str) -> None:
    """Also where an SDK asks again: they repeat no earlier request."""
    ask = {"model": "tiny", "prompt": ["a", "a"]}
    async with open_gateway() as http:
        answer = await http.post("/v1/completions", json=ask, headers={"x-stainless-retry-count": count})
        assert answer.status_code == 200 and len(swarm.claims) == 2
        again = await http.post("/v1/completions", json=ask, headers={"x-stainless-retry-count": "2"})
        assert again.json()["choices"] == answer.json()["choices"] and len(swarm.claims) == 2


async def test_cached_tokens_of_a_list_of_prompts_are_told(sdk: Any, swarm: Swarm) -> None:
    """As of one prompt: programs read them without asking whether they are there."""
    usage = {**completion("x")["usage"], "prompt_tokens_details": {"cached_tokens": 4}}
    swarm.answer = lambda body, number: JSONResponse(completion("x") | {"usage": usage})
    ask: Any = {"model": "tiny", "prompt": ["a", "b"]}
    plain = await sdk.completions.create(**ask)
    assert plain.usage.prompt_tokens_details.cached_tokens == 8
    stream = await sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    *_, last = [chunk async for chunk in stream]
    assert last.usage.prompt_tokens_details.cached_tokens == 8


async def test_one_prompt_that_fails_fails_the_list(sdk: Any, swarm: Swarm) -> None:
    good = saying("x")
    swarm.answer = lambda body, number: error(400, "too long") if body["prompt"] == "b" else good(body, number)
    with pytest.raises(openai.BadRequestError, match="too long"):
        await sdk.completions.create(model="tiny", prompt=["a", "b"])
    await swarm.until(lambda: not swarm.open_episodes)


async def test_an_idempotency_key_names_one_request(sdk: Any, swarm: Swarm) -> None:
    ask: Any = {**CHAT, "extra_headers": {"idempotency-key": "k"}}
    first, again = await asyncio.gather(*(sdk.chat.completions.create(**ask) for _ in range(2)))
    assert (first.id, len(swarm.claims)) == (again.id, 1)
    with pytest.raises(openai.ConflictError, match="idempotency-key"):
        await sdk.chat.completions.create(**ask | {"temperature": 0.5})
    prompts: Any = {"model": "tiny", "prompt": ["a", "b"], "echo": True, "extra_headers": {"idempotency-key": "p"}}
    for answer in (await sdk.completions.create(**prompts), await sdk.completions.create(**prompts)):
        assert [choice.text for choice in answer.choices] == [f"a{BEST}", f"b{BEST}"]
    assert len(swarm.claims) == 3
    with pytest.raises(openai.ConflictError, match="idempotency-key"):
        await sdk.completions.create(**prompts | {"prompt": ["a", "c"]})
    assert len(swarm.open_episodes) == 0


async def test_models_are_listed(open_gateway: OpenGateway) -> None:
    import anthropic

    async with open_gateway(model_aliases=["alias"]) as http:
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="k") as sdk:
            assert [model.id async for model in sdk.models.list()] == ["tiny", "alias"]
            assert (await sdk.models.retrieve("alias")).id == "alias"
        async with anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="k") as claude:
            page = await claude.models.list()
            assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "alias")
            cards = [(model.id, model.type, model.display_name, model.created_at.year) for model in page.data]
            assert cards == [("tiny", "model", "tiny", 1970), ("alias", "model", "alias", 1970)]
            assert (await claude.models.retrieve("alias")).display_name == "alias"
