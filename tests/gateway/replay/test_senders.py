"""Prompts sent over HTTP to a real server, and to a command."""

import asyncio
import sys

import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.replay.senders import CommandSender, HttpSender, Outcome
from swarm.errors import ConfigError
from swarm.types import Task
from tests.processes import children, nothing_left_behind
from tests.standins.vllm import listening

ASKED = [{"role": "user", "content": "why?"}]
PROMPT = Task(task_id="t", main_query="why; rm -rf 'x' $HOME?", init_messages=ASKED)
COMPLETION = {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 7}}

pytestmark = pytest.mark.anyio


async def over_http(response: Response | None, seen: list[Request], limit: float = 30.0) -> Outcome:
    """The outcome of one prompt at a server that answers with ``response``; None: it never answers."""
    over = asyncio.Event()

    async def answer(request: Request) -> Response:
        seen.append(request)
        if response is None:
            await over.wait()
        return response or PlainTextResponse("")

    server = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    async with listening(server) as url, HttpSender(f"{url}/v1/", "key", {"model": "m"}, limit) as sender:
        outcome = await sender.send(PROMPT)
        over.set()
    return outcome


async def test_the_headers_of_a_response_are_read() -> None:
    seen: list[Request] = []
    told = {
        "x-swarm-reward-mean": "0.5",
        "x-swarm-policy-version": "3",
        "x-swarm-drop-reason": "batch_waits",
    }
    response = JSONResponse(COMPLETION, headers=told)
    outcome = await over_http(response, seen)
    assert (outcome.failure, outcome.reward, outcome.policy_version) == ("", 0.5, 3)
    assert outcome.untrained == "batch_waits"
    assert seen[0].headers["authorization"] == "Bearer key"
    odd = await over_http(JSONResponse(COMPLETION, headers={**told, "x-swarm-policy-version": "nan"}), seen)
    assert (odd.failure, odd.reward, odd.policy_version) == ("", 0.5, None)


@pytest.mark.parametrize(
    ("response", "failure", "detail", "retry_after"),
    [
        (
            JSONResponse({"error": {"code": "unavailable", "message": "syncing"}}, 503, headers={"retry-after": "3"}),
            "HTTP 503 unavailable",
            "syncing",
            3.0,
        ),
        (PlainTextResponse("<html>\nbad gateway", 502), "HTTP 502", "<html>", 0.0),
        (PlainTextResponse("slow", 429, headers={"retry-after": "86400"}), "HTTP 429", "slow", 10.0),
        (JSONResponse({"choices": []}), "no choices", '{"choices":[]}', 0.0),
        (PlainTextResponse("hello"), "no choices", "hello", 0.0),
        (JSONResponse({"choices": [None]}), "malformed answer", '{"choices":[null]}', 0.0),
        (JSONResponse({"choices": [{"message": "a"}]}), "malformed answer", '{"choices":[{"message":"a"}]}', 0.0),
    ],
)
async def test_each_kind_of_failure_has_a_name(
    response: Response, failure: str, detail: str, retry_after: float
) -> None:
    outcome = await over_http(response, [])
    assert (outcome.failure, outcome.detail, outcome.retry_after) == (failure, detail, retry_after)


async def test_a_network_error_is_a_failure(nobody: str) -> None:
    assert (await over_http(None, [], limit=0.1)).failure == "timeout"
    async with HttpSender(nobody, "", {}) as sender:
        assert (await sender.send(PROMPT)).failure == "connection"
        with pytest.raises(ConfigError, match=f"{nobody}/models does not answer"):
            await sender.first_model()


async def models_from(responses: list[Response], limit: float = 60.0) -> str:
    """The first model of a server that answers with one of ``responses`` after the other."""
    left = iter(responses)
    server = Starlette(routes=[Route("/v1/models", lambda request: next(left))])
    async with listening(server) as url, HttpSender(f"{url}/v1", "", {}, limit) as sender:
        return await sender.first_model()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_server_that_is_not_ready_is_asked_for_its_models_again(status: int) -> None:
    busy = PlainTextResponse("no job yet", status, headers={"retry-after": "0.01"})
    assert await models_from([busy, busy, JSONResponse({"data": [{"id": "tiny"}]})]) == "tiny"


async def test_a_server_that_stays_away_is_told_with_its_own_words() -> None:
    away = JSONResponse({"error": {"message": "no training job"}}, 503, headers={"retry-after": "60"})
    with pytest.raises(ConfigError, match="HTTP 503: no training job"):
        await models_from([away], limit=0.2)


async def test_a_wrong_key_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="HTTP 401; check --base-url and --api-key"):
        await models_from([PlainTextResponse("", 401)])


def command(code: str, timeout: float = 60.0, **env: str) -> CommandSender:
    return CommandSender(f'{sys.executable} -c "{code}" {{question}}', env, timeout)


async def test_the_prompt_is_one_argument_and_no_shell_sees_it() -> None:
    text = PROMPT.main_query.encode().hex()
    code = f"import sys; sys.exit(0 if sys.argv[1] == bytes.fromhex('{text}').decode() else 9)"
    assert (await command(code).send(PROMPT)).failure == ""


async def test_the_address_is_in_the_environment() -> None:
    code = "import os, sys; sys.exit(os.environ['OPENAI_BASE_URL'])"
    outcome = await command(code, OPENAI_BASE_URL="http://gateway/v1").send(PROMPT)
    assert (outcome.failure, outcome.detail) == ("exit code 1", "http://gateway/v1")


async def test_a_command_that_hangs_is_killed_with_all_it_started() -> None:
    code = "import subprocess, time; subprocess.run(['sleep', '60'])"
    with nothing_left_behind():
        assert (await command(code, timeout=0.5).send(PROMPT)).failure == "timeout"


async def test_cancelling_kills_the_command() -> None:
    task = asyncio.create_task(command("import time; time.sleep(60)").send(PROMPT))
    async with asyncio.timeout(30):
        # another process cannot set an event of ours
        while not (started := children(PROMPT.main_query)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # nor is it a zombie; children of other tests may have ended meanwhile
    assert not started.keys() & set(psutil.Process().children())


async def test_a_command_that_does_not_exist_is_a_failure() -> None:
    outcome = await CommandSender("no-such-program {question}", {}, 1.0).send(PROMPT)
    assert outcome.failure == "command not started"


async def test_a_prompt_that_no_command_line_can_hold_fails_alone() -> None:
    for text in ("a\0b", "half \ud83d"):
        outcome = await CommandSender("true {question}", {}, 10.0).send(Task(task_id="t", main_query=text))
        assert outcome.failure == "command not started" and "true" in outcome.detail


@pytest.mark.parametrize("template", ["python app.py", "python 'app.py {question}"])
async def test_a_template_that_cannot_work_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="--command"):
        CommandSender(template, {}, 1.0)
