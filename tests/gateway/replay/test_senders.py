import asyncio
import sys
from typing import Any

import httpx
import psutil
import pytest

from gateway.replay.senders import CommandSender, HttpSender, Outcome, Prompt
from swarm.errors import ConfigError

PROMPT = Prompt(text="why; rm -rf 'x' $HOME?", messages=[{"role": "user", "content": "why?"}])
COMPLETION = {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 7}}

RETRY = {"retry-after": "3"}

pytestmark = pytest.mark.anyio


async def over_http(handler: Any) -> Outcome:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        return await HttpSender(client, "http://gateway/v1/", "key", {"model": "m"}).send(PROMPT)


async def test_the_headers_of_an_answer_are_read() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(
            200, json=COMPLETION, headers={"x-swarm-reward-mean": "0.5", "x-swarm-policy-version": "3"}
        )

    outcome = await over_http(handler)
    assert (outcome.failure, outcome.reward, outcome.policy_version, outcome.completion_tokens) == ("", 0.5, 3, 7)
    assert seen[0].url == "http://gateway/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("response", "failure", "detail", "retry_after"),
    [
        (
            httpx.Response(
                503, json={"error": {"code": "unavailable", "message": "syncing"}}, headers={"retry-after": "3"}
            ),
            "HTTP 503 unavailable",
            "syncing",
            3.0,
        ),
        (httpx.Response(502, text="<html>\nbad gateway"), "HTTP 502", "<html>", 0.0),
        (httpx.Response(429, text="slow", headers={"retry-after": "86400"}), "HTTP 429", "slow", 10.0),
        (httpx.Response(200, json={"choices": []}), "no choices", '{"choices":[]}', 0.0),
        (httpx.Response(200, text="hello"), "no choices", "hello", 0.0),
    ],
)
async def test_each_kind_of_failure_has_a_name(
    response: httpx.Response, failure: str, detail: str, retry_after: float
) -> None:
    outcome = await over_http(lambda request: response)
    assert (outcome.failure, outcome.detail, outcome.retry_after) == (failure, detail, retry_after)


@pytest.mark.parametrize(
    ("error", "failure"), [(httpx.ReadTimeout("slow"), "timeout"), (httpx.ConnectError("refused"), "connection")]
)
async def test_a_network_error_is_a_failure(error: Exception, failure: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    assert (await over_http(handler)).failure == failure


def command(code: str, timeout: float = 60.0, **env: str) -> CommandSender:
    return CommandSender(f'{sys.executable} -c "{code}" {{question}}', env, timeout)


async def test_the_prompt_is_one_argument_and_no_shell_sees_it() -> None:
    code = f"import sys; sys.exit(0 if sys.argv[1] == bytes.fromhex('{PROMPT.text.encode().hex()}').decode() else 9)"
    assert (await command(code).send(PROMPT)).failure == ""


async def test_the_address_is_in_the_environment() -> None:
    code = "import os, sys; sys.exit(os.environ['OPENAI_BASE_URL'])"
    outcome = await command(code, OPENAI_BASE_URL="http://gateway/v1").send(PROMPT)
    assert (outcome.failure, outcome.detail) == ("exit code 1", "http://gateway/v1")


async def test_a_command_that_hangs_is_killed_with_all_it_started() -> None:
    before = set(psutil.Process().children(recursive=True))
    code = "import subprocess, time; subprocess.run(['sleep', '60'])"
    assert (await command(code, timeout=0.5).send(PROMPT)).failure == "timeout"
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert left == []


async def test_cancelling_kills_the_command() -> None:
    before = set(psutil.Process().children(recursive=True))
    task = asyncio.create_task(command("import time; time.sleep(60)").send(PROMPT))
    async with asyncio.timeout(30):
        # another process cannot set an event of ours
        while set(psutil.Process().children(recursive=True)) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(psutil.Process().children(recursive=True)) == before


async def test_a_command_that_does_not_exist_is_a_failure() -> None:
    outcome = await CommandSender("no-such-program {question}", {}, 1.0).send(PROMPT)
    assert outcome.failure == "command not started"


@pytest.mark.parametrize("template", ["python app.py", "python 'app.py {question}"])
async def test_a_template_that_cannot_work_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="--command"):
        CommandSender(template, {}, 1.0)
