"""The judges' client: limits shared by all groups, retries, budget, cache; every failure is a reason."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from reward_hooks import HookRunner, Hooks, load_hooks
from reward_hooks.judges import Endpoint, JudgeClient, load_judge, make_judge, metered
from swarm.errors import ConfigError, HookError
from tests.ports import free_ports
from tests.reward_hooks.judges.conftest import OpenJudge
from tests.reward_hooks.judges.scripted import TASK, ScriptedJudge, answer, answers, completion, context, judging

pytestmark = pytest.mark.anyio


def refusal(status: int, message: str = "no", **headers: str) -> Response:
    return JSONResponse(
        {"error": {"message": message}}, status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


async def failing(judge: Any, *, seconds: float = 30.0) -> HookError:
    with pytest.raises(HookError) as caught:
        await judge.on_compute_relative_reward(TASK, answers(1, 2), context(seconds=seconds))
    return caught.value


async def test_64_groups_share_connections_and_stay_inside_the_limit(
    scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    judge = open_judge("pairwise", endpoint={"max_concurrency": 6, "timeout_seconds": 600})
    calls = [
        judge.on_compute_relative_reward(
            TASK, answers(*(group + k / 8 for k in range(3))), context(f"{group}", seconds=600)
        )
        for group in range(64)
    ]
    scored = await asyncio.gather(*calls)
    assert len(scripted.bodies) == 64 * 3 * 2
    assert 2 <= scripted.most_in_flight <= 6
    # shared: a connection that idled too long on a slow machine may be opened anew
    assert len(scripted.peers) < len(scripted.bodies) / 10
    assert all([one.value for one in rewards] == sorted(one.value for one in rewards) for rewards in scored)
    assert judge.client.spent.calls == 64 * 3 * 2


async def test_transient_errors_are_retried(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    scripted.replies = [refusal(503), refusal(429, retry_after="0.001")]
    judge = open_judge("listwise", orders=1)
    rewards = await judge.on_compute_relative_reward(TASK, answers(1, 2), context())
    assert rewards[1].value > rewards[0].value
    assert (judge.client.spent.calls, judge.client.spent.retries) == (3, 2)


async def test_an_answer_stopped_by_new_weights_is_retried(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    scripted.replies = [JSONResponse(completion('{"verd', finish_reason="abort"))]
    rewards = await open_judge("listwise", orders=1).on_compute_relative_reward(TASK, answers(1, 2), context())
    assert rewards[1].value > rewards[0].value


@pytest.mark.parametrize(
    ("replies", "code", "words", "tries"),
    [
        ([refusal(500, "on fire")] * 3, "judge_unavailable", "answered 500: on fire", 3),
        ([refusal(429, "slow", retry_after="600")], "judge_unavailable", "asks to wait 600 s", 1),
        ([refusal(401, "bad key")], "judge_refused", "answered 401: bad key", 1),
        ([refusal(400, "unknown model")], "judge_refused", "unknown model", 1),
        ([Response("<html>")], "judge_unparsable", "no JSON", 1),
        ([Response("[" * 100_000)], "judge_unparsable", "no JSON", 1),
        ([JSONResponse([1])], "judge_unparsable", "no chat completion", 1),
        ([JSONResponse({"choices": [{"message": None}]})], "judge_unparsable", "empty", 1),
        ([JSONResponse({"error": {"message": "Provider is full"}})], "judge_unparsable", "Provider is full", 1),
        ([JSONResponse({"choices": [{"message": {"refusal": "I won't."}}]})], "judge_unparsable", "I won't.", 1),
        ([JSONResponse(completion("The first is better."))], "judge_unparsable", "no JSON object", 1),
        ([JSONResponse(completion('{"verdicts": [', finish_reason="length"))], "judge_unparsable", "cut off", 1),
    ],
    ids=["500", "wait too long", "401", "400", "html", "deep", "list", "null", "200", "refusal", "prose", "cut off"],
)
async def test_each_failure_is_an_error_with_its_reason(
    scripted: ScriptedJudge, open_judge: OpenJudge, replies: list[Response], code: str, words: str, tries: int
) -> None:
    scripted.replies = list(replies)
    judge = open_judge("listwise", orders=1)
    error = await failing(judge)
    assert error.code == code
    assert words in error.message
    assert len(scripted.bodies) == tries
    assert judge.client.spent.failures == 1


async def test_an_unreachable_judge_is_an_error_after_all_tries() -> None:
    [port] = free_ports(1)
    endpoint = {"base_url": f"http://127.0.0.1:{port}/v1", "attempts": 2, "retry_base_seconds": 0.001}
    judge = make_judge({"kind": "listwise", "orders": 1, "endpoint": endpoint})
    error = await failing(judge)
    await judge.aclose()
    assert error.code == "judge_unavailable"
    assert "cannot be reached" in error.message


async def test_a_judge_that_hangs_is_given_up_with_the_deadline(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    released = asyncio.Event()
    scripted.hold = lambda: _wait(released)
    try:
        by_deadline = await failing(open_judge("listwise", orders=1), seconds=0.2)
        by_try = await failing(open_judge("listwise", orders=1, endpoint={"timeout_seconds": 0.1, "attempts": 1}))
    finally:
        released.set()
    assert by_deadline.code == "judge_timeout"
    assert (by_try.code, "did not answer within 0.1 s" in by_try.message) == ("judge_unavailable", True)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_the_runner_keeps_the_judges_reason(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    scripted.replies = [refusal(401, "bad key")]
    runner = HookRunner(Hooks(open_judge("listwise").on_compute_relative_reward))
    with pytest.raises(HookError, match="answered 401: bad key") as caught:
        await runner.score(TASK, answers(1, 2), context())
    assert caught.value.code == "judge_refused"


async def test_calls_are_capped_over_all_judges_of_a_client(scripted: ScriptedJudge) -> None:
    client = JudgeClient(Endpoint.model_validate({**scripted.endpoint, "max_calls": 3}))
    settings = {"endpoint": scripted.endpoint}
    pointwise = make_judge({"kind": "pointwise", **settings}, client)
    await pointwise.on_compute_relative_reward(TASK, answers(3, 4), context())
    error = await failing(make_judge({"kind": "pairwise", **settings}, client))
    await client.aclose()
    assert (error.code, "all 3 calls of max_calls" in error.message) == ("judge_budget", True)
    assert len(scripted.bodies) <= 3


async def test_hooks_that_are_loaded_again_do_not_spend_a_cap_again(
    scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    for capped in (True, True, False):
        judge = open_judge("listwise", orders=1, endpoint={"max_calls": 1} if capped else {})
        if len(scripted.bodies) == 1 and capped:
            assert (await failing(judge)).code == "judge_budget"
        else:
            await judge.on_compute_relative_reward(TASK, answers(1, 2), context())
    assert len(scripted.bodies) == 2


async def test_money_is_capped_before_it_is_spent(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    # a call states 100 + 20 tokens and costs 140 millionths; it may cost at most some thousands
    prices = {"input_price": 1.0, "output_price": 2.0, "max_cost": 0.02}
    judge = open_judge("pointwise", endpoint={**prices, "max_concurrency": 64}, max_tokens=1000)
    calls = [judge.on_compute_relative_reward(TASK, answers(group / 100), context(f"{group}")) for group in range(64)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, HookError)]
    assert 0 < len(refused) < 64
    assert {one.code for one in refused} == {"judge_budget"}
    spent = judge.client.spent
    assert spent.calls == len(scripted.bodies) == 64 - len(refused)
    assert spent.cost == pytest.approx(spent.calls * 140e-6)
    assert spent.cost <= 0.02


@pytest.mark.parametrize("more", [{"max_completion_tokens": 9000}, {"max_tokens": 9000}, {"n": 9}], ids=str)
async def test_what_the_configuration_adds_to_a_call_counts_for_its_most(
    scripted: ScriptedJudge, open_judge: OpenJudge, more: dict[str, int]
) -> None:
    endpoint = {"output_price": 1.0, "max_cost": 0.008, "extra_body": more}
    judge = open_judge("pointwise", endpoint=endpoint, max_tokens=1000)
    assert (await failing(judge)).code == "judge_budget"
    assert scripted.bodies == []


async def test_a_call_costs_its_usage_or_the_most_it_can_or_nothing(
    scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    def judge() -> Any:
        return open_judge("listwise", orders=1, endpoint={"output_price": 1.0, "attempts": 1}, max_tokens=1000)

    refused, silent, hanging = judge(), judge(), judge()
    scripted.replies = [refusal(401)]
    await failing(refused)
    assert refused.client.spent.cost == 0
    scripted.replies = [JSONResponse({**completion('{"verdicts": [{"answer": 1, "score": 4}]}'), "usage": None})]
    await silent.on_compute_relative_reward(TASK, answers(4), context())
    assert silent.client.spent.cost == pytest.approx(1000e-6)
    released = asyncio.Event()
    scripted.hold = lambda: _wait(released)
    try:
        await failing(hanging, seconds=0.2)
    finally:
        released.set()
    assert hanging.client.spent.cost == pytest.approx(1000e-6)


async def test_equal_questions_are_cached(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    judge = open_judge("pointwise")
    first = await judge.on_compute_relative_reward(TASK, answers(1, 2), context())
    again = await judge.on_compute_relative_reward(TASK, answers(1, 2), context("another"))
    assert first == again
    assert (len(scripted.bodies), judge.client.spent.cache_hits) == (2, 2)
    bounded = open_judge("pointwise", endpoint={"cache_entries": 1})
    for quality in (1, 2, 1):
        await bounded.on_compute_relative_reward(TASK, answers(quality), context())
    assert len(scripted.bodies) == 2 + 3


async def test_fields_that_the_server_refuses_are_not_sent_again(
    scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    scripted.replies = [refusal(400, "logprobs are not supported with this model")] * 2
    judge = open_judge("pointwise")
    await judge.on_compute_relative_reward(TASK, answers(1, 2), context())
    await judge.on_compute_relative_reward(TASK, answers(3), context())
    assert "logprobs" in scripted.bodies[0]
    assert not {"logprobs", "top_logprobs"} & scripted.bodies[-1].keys()
    assert len(scripted.bodies) == 5


async def test_a_judge_that_takes_newer_fields_alone_is_asked_with_these(
    scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    """As OpenAI's reasoning models refuse."""
    instead = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    scripted.replies = [
        refusal(400, f"Unsupported parameter: {instead}"),
        refusal(400, "Unsupported value: 'temperature' does not support 0 with this model."),
    ]
    await open_judge("pointwise", max_tokens=77).on_compute_relative_reward(TASK, answers(3), context())
    assert not {"max_tokens", "temperature"} & scripted.bodies[-1].keys()
    assert (scripted.bodies[-1]["max_completion_tokens"], len(scripted.bodies)) == (77, 3)


async def test_the_key_comes_from_the_environment(
    scripted: ScriptedJudge, open_judge: OpenJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="JUDGE_KEY_OF_TEST"):
        open_judge("listwise", endpoint={"api_key_env": "JUDGE_KEY_OF_TEST"})
    # as a file of secrets has it
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "sk-1\n")
    judge = open_judge("listwise", endpoint={"api_key_env": "JUDGE_KEY_OF_TEST", "extra_body": {"seed": 5}})
    await judge.on_compute_relative_reward(TASK, answers(1), context())
    assert scripted.headers[0]["authorization"] == "Bearer sk-1"
    assert (scripted.bodies[0]["model"], scripted.bodies[0]["seed"]) == ("judge", 5)
    # vLLM refuses a body that is not called JSON
    assert all(one["content-type"] == "application/json" for one in scripted.headers)


async def test_meters_count_what_is_spent_inside(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    judge = open_judge("pointwise")
    with metered() as spent:
        await judge.on_compute_relative_reward(TASK, answers(1, 2), context())
    await judge.on_compute_relative_reward(TASK, answers(3), context())
    assert (spent.calls, spent.input_tokens, spent.output_tokens) == (2, 200, 40)


def test_a_client_outlives_its_event_loop() -> None:
    kept: list[Any] = []

    async def once() -> float:
        async with judging() as scripted:
            if not kept:
                kept.append(make_judge({"kind": "pointwise", "endpoint": {**scripted.endpoint, "cache_entries": 0}}))
                kept.append(scripted.url)
            kept[0].client.endpoint.__dict__["base_url"] = f"{scripted.url}/v1"
            [reward] = await kept[0].on_compute_relative_reward(TASK, answers(9), context())
            await kept[0].aclose()
            return reward.value

    assert [asyncio.run(once()), asyncio.run(once())] == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Unclosed:ResourceWarning")
async def test_an_event_loop_that_its_hook_closed_is_let_go(scripted: ScriptedJudge) -> None:
    judge = make_judge({"kind": "pointwise", "endpoint": {**scripted.endpoint, "cache_entries": 0}})

    def hook() -> weakref.ref[asyncio.AbstractEventLoop]:
        # unlike asyncio.run, it does not end what the loop still holds
        with closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(judge.on_compute_relative_reward(TASK, answers(0, 1), context("c")))
        return weakref.ref(loop)

    loops = [await asyncio.to_thread(hook) for _ in range(3)]
    await judge.on_compute_relative_reward(TASK, answers(0, 1), context())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


async def test_hooks_without_async_may_each_ask_one_judge_in_an_event_loop_of_their_own(
    scripted: ScriptedJudge,
) -> None:
    endpoint = {**scripted.endpoint, "attempts": 1}
    judge = make_judge({"kind": "pointwise", "endpoint": endpoint})
    all_ask = asyncio.Event()

    async def hold() -> None:
        if scripted.in_flight == 8:
            all_ask.set()
        await all_ask.wait()

    scripted.hold = hold

    def hook(group: int) -> list[float]:
        asked = judge.on_compute_relative_reward(TASK, answers(group, group + 1), context(str(group)))
        return [reward.value for reward in asyncio.run(asked)]

    async with asyncio.timeout(30):
        values = await asyncio.gather(*(asyncio.to_thread(hook, group) for group in range(0, 8, 2)))
    assert values == [pytest.approx([group / 9, (group + 1) / 9]) for group in range(0, 8, 2)]
    assert (judge.client.spent.calls, judge.client.spent.retries) == (8, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "oracle"}, "oracle"),
        ({"kind": "listwise", "endpoint": {"base_url": "x"}}, "base_url"),
        ({"kind": "listwise", "endpoint": {"base_url": "http://x:80o1/v1"}}, "base_url: must be an address"),
        ({"kind": "listwise", "endpoint": {"base_url": "http://x/v1?a=1"}}, "base_url: must be .* without a query"),
        ({"kind": "listwise", "endpoint": {"base_url": "http://x"}, "rubrik": "r"}, "rubrik"),
        ({"kind": "listwise", "endpoint": {"base_url": "http://x"}, True: "on"}, "unknown key 'True'"),
        ({"kind": "listwise", "endpoint": {"base_url": "http://x", "max_cost": 1}}, "max_cost needs"),
        ({"kind": "score_model", "endpoint": {"base_url": "http://x"}, "api": "json"}, "needs body and path"),
    ],
)
def test_wrong_settings_are_named(settings: dict[Any, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_judge(settings)


def test_a_judge_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "judge.yaml"
    file.write_text("kind: listwise\nrubric: short is good\nendpoint: {base_url: 'http://127.0.0.1:9/v1', model: m}\n")
    assert load_judge(file).name == "listwise"
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_judge(tmp_path / "none.yaml")
    file.write_text("- 1")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_judge(file)


async def test_a_judge_is_part_of_a_blend(scripted: ScriptedJudge, tmp_path: Path) -> None:
    parts = f"""
parts:
  - {{hook: matches, options: {{pattern: ".*quality.*"}}, gate: 1.0}}
  - {{hook: listwise, options: {{rubric: good is good, endpoint: {{base_url: "{scripted.url}/v1"}}}}}}
"""
    (tmp_path / "hooks.yaml").write_text(parts)
    runner = HookRunner(load_hooks(tmp_path / "hooks.yaml"))
    score = await runner.score(TASK, [*answers(2, 8), answer("nothing", 2)], context())
    assert score.values == pytest.approx([2 / 9, 8 / 9, 0.0])
    assert score.rewards[1].components["listwise.score"] == pytest.approx(8 / 9)
