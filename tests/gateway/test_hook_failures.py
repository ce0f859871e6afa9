"""Hooks that fail: the user's answer is unharmed and in time, the group is dropped, and why is counted."""

from __future__ import annotations

import asyncio

import pytest

from gateway.observability.logs import TextFormatter
from gateway.stats import Sentences
from tests.gateway.conftest import OpenGateway, ask
from tests.standins.swarm import Swarm

pytestmark = pytest.mark.anyio

HEAD = "def on_compute_relative_reward(task, candidates, context):\n    "
LATER = "import asyncio\nasync def on_compute_relative_reward(task, candidates, context):\n    "

#: one of each kind; ``tests/reward_hooks/test_runner.py`` has the others
FAILURES = {
    "hook_timeout": LATER + "await asyncio.Event().wait()",
    "hook_raised": HEAD + "raise SystemExit(3)",
    "hook_result": HEAD + "return [1.0]",
    "hook_refused": "from swarm.errors import HookError\n" + HEAD + "raise HookError('no reference')",
}


@pytest.mark.parametrize(("code", "hook"), FAILURES.items(), ids=FAILURES)
async def test_a_hook_that_fails_costs_the_group_and_not_the_answer(
    swarm: Swarm, open_gateway: OpenGateway, code: str, hook: str
) -> None:
    async with open_gateway(reward=hook, hook_timeout_seconds=0.1 if "timeout" in code else 20) as http:
        async with asyncio.timeout(10):
            response = await ask(http)
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"] == "word"
        assert response.headers["x-swarm-drop-reason"] == "reward_hook_failed"
        assert response.headers["x-swarm-trained"] == "false"
        assert "x-swarm-reward" not in response.headers
        counts = (await http.get("/status")).json()
    assert (counts["groups"]["trained"], counts["groups"]["dropped"]) == (0, {"reward_hook_failed": 1})
    assert counts["hook_failures"] == {code: 1}
    await swarm.until(lambda: not swarm.open_episodes)
    assert not swarm.ends


SECRET = "my grandmother's pin"
#: A hook, and the sentence about it, which quotes nobody.
TOLD = {
    HEAD + "return [1.0, 2.0, 3.0]": "returned 3 rewards for 4 candidates",
    HEAD + "return [0.0, 1.0, float('nan'), 1.0]": "returned nan as reward 2; rewards must be finite",
    HEAD + "return [0.0, 1e39, 1.0, 1.0]": "returned 1e+39 as reward 1; rewards go up to 1e+16",
    HEAD + "raise KeyError(task.main_query)": "raised KeyError (on_compute_relative_reward.py, line 2)",
    "from swarm.errors import HookError\n" + HEAD + "raise HookError(task.main_query)": "gives no result "
    "(on_compute_relative_reward.py, line 3)",
    f'class Odd(list):\n    def __iter__(self):\n        raise LookupError("{SECRET}")\n'
    + HEAD
    + "return Odd()": "returned what is no result: LookupError",
}


@pytest.mark.parametrize(("hook", "sentence"), TOLD.items(), ids=range(len(TOLD)))
async def test_the_first_failure_of_a_kind_is_told_and_the_others_are_counted(
    swarm: Swarm, open_gateway: OpenGateway, caplog: pytest.LogCaptureFixture, hook: str, sentence: str
) -> None:
    async with open_gateway(reward=hook) as http:
        for _ in range(11):
            await ask(http, messages=[{"role": "user", "content": SECRET}])
        counts = (await http.get("/status")).json()
    assert counts["hook_errors"] == {f"on_compute_relative_reward {sentence}": 11}
    [code] = counts["hook_failures"]
    lines = [TextFormatter().format(line) for line in caplog.records if line.levelname == "ERROR"]
    told = [line.partition("gateway.stats: ")[2] for line in lines]
    assert told == [
        f"the hook fails{times}: {code}: on_compute_relative_reward {sentence}" for times in ("", " (10 times)")
    ]
    assert not [line for line in lines if SECRET in line]
    assert not [line for line in caplog.records if SECRET in line.getMessage() and line.levelname != "DEBUG"]


def test_sentences_that_differ_in_numbers_alone_are_of_one_kind_and_lines_are_not() -> None:
    sentences = Sentences()
    for told in (
        "returned 3 rewards for 8",
        "returned 12 rewards for 8",
        "raised A (x, line 3)",
        "raised A (x, line 14)",
    ):
        sentences.add(told)
    assert sentences == {"returned 3 rewards for 8": 2, "raised A (x, line 3)": 1, "raised A (x, line 14)": 1}


async def test_equal_rewards_are_submitted_as_they_are_and_counted(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(reward=HEAD + "return [0.5] * 4") as http:
        response = await ask(http)
        assert response.headers["x-swarm-trained"] == "true"
        assert "x-swarm-drop-reason" not in response.headers
        assert response.json()["choices"][0]["message"]["content"] == "word"
        groups = (await http.get("/status")).json()["groups"]
    assert groups == {"trained": 1, "dropped": {}, "informative": 0, "uninformative": 1}
    [group] = swarm.ends
    assert [end["workflow_output"]["reward"] for end in group["ends"]] == [0.5] * 4


async def test_candidates_carry_the_request_they_were_sampled_from(swarm: Swarm, open_gateway: OpenGateway) -> None:
    submit = (
        "def on_user_submit_new_requests(request, context):\n"
        "    return [{**request.body, 'temperature': index / 10} for index in range(context.num_repeat)]\n"
    )
    hook = HEAD + "return [candidate.request['temperature'] for candidate in candidates]"
    async with open_gateway(reward=hook, submit=submit) as http:
        assert (await ask(http)).headers["x-swarm-reward"] == "0.3"
