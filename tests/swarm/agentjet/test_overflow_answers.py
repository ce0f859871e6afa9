"""What an agent of AgentJet's gets from its episode's address: words for a prompt that is too long, bounds of its
answers, an episode that is over; and how it is let in from another machine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette

from swarm.client import AsyncSwarmClient
from swarm.credentials import TokenFile
from swarm.errors import ConfigError
from swarm.job import EvalSampling, TrainJob
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from tests.standins.vllm import ScriptedVllm, plain
from tests.standins.vllm import listening as serving
from tests.standins.vllm_rules import VllmRules
from tests.swarm.server.conftest import Claimed, Rig, ready

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.anyio

SIGNATURE = "AgentJet: Exceeded max model context length. token_overflow("
JOB = TrainJob(
    model="tiny",
    batch_size=2,
    num_repeat=2,
    max_prompt_length=100,
    max_response_length=100,
    max_turn_length=40,
    temperature=0.9,
    dialect="agentjet",
    eval_sampling=EvalSampling(temperature=0.0, top_p=0.5, top_k=7),
)
HI: Any = {"role": "user", "content": "hi"}


def words(count: int) -> Any:
    """A message of so many tokens, as the stand-in counts."""
    return {"role": "user", "content": " ".join(["w"] * count)}


class Counting(ScriptedVllm):
    """Counts words, against a context of 200."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = VllmRules(context=200)

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        return len(str(body.get("messages") or body.get("prompt")).split())


@contextlib.asynccontextmanager
async def rolling(job: TrainJob, run_dir: Path, **config: Any) -> AsyncGenerator[Rig]:
    vllm = Counting()
    app: Starlette = create_app(ServerConfig(run_dir=run_dir, **config))
    async with serving(vllm.app) as vllm_url, serving(app) as url:
        address = vllm_url.removeprefix("http://")
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False) as client:
            await client.get("/health")
            controller: Controller = app.state.controller
            controller.sync_job(job)
            controller.boot()
            controller.rollout_ready(ready(address))
            yield Rig(app, vllm, address, client)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with rolling(JOB, tmp_path) as one:
        yield one


def sdk_of(episode: Claimed, base_url: str = "") -> openai.AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(base_url=base_url or episode.base_url, api_key=episode.key, max_retries=0)


# ------------------------------------------------------------------ prompts that are too long


async def test_a_prompt_that_is_too_long_is_an_answer_and_what_was_sampled_is_trained(rig: Rig) -> None:
    episode = await rig.claim()
    assert (await episode.chat(messages=[words(150)])).status_code == 200
    async with sdk_of(episode) as sdk:
        answer = await sdk.chat.completions.create(model="m", messages=[words(170)])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role, choice.message.tool_calls) == ("length", "assistant", None)
    assert choice.message.content is not None and choice.message.content.startswith(SIGNATURE)
    # [{'role': 'user', 'content': 'w ...'}] are four words more
    limits = "prompt_token_length.173>=max_model_len.200-max_response_length_in_one_turn.40)"
    assert choice.message.content.endswith(limits)
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (173, 0)
    assert [call.response_ids for call in episode.calls] == [[1, 2]]
    ended = await episode.end()
    assert (ended["error"], ended["tokens"][episode.uuid]["trained"]) == (None, 2)


async def test_a_streamed_one(rig: Rig) -> None:
    episode = await rig.claim()
    async with sdk_of(episode) as sdk:
        stream = await sdk.chat.completions.create(
            model="m", messages=[words(170)], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.startswith(SIGNATURE)
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "length"]
    assert [chunk.usage.prompt_tokens for chunk in chunks if chunk.usage] == [173]
    assert not episode.calls


async def test_it_has_a_form_in_each_dialect(rig: Rig) -> None:
    import anthropic

    episode = await rig.claim()
    base_url = episode.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=episode.key, max_retries=0) as claude:
        message = await claude.messages.create(model="m", max_tokens=40, messages=[words(170)])
        async with claude.messages.stream(model="m", max_tokens=40, messages=[words(170)]) as stream:
            streamed = await stream.get_final_message()
    for one in (message, streamed):
        assert one.stop_reason == "max_tokens"
        assert [block.text.startswith(SIGNATURE) for block in one.content if block.type == "text"] == [True]
    async with sdk_of(episode) as sdk:
        response = await sdk.responses.create(model="m", input="w " * 170)
        completion = await sdk.completions.create(model="m", prompt="w " * 200, max_tokens=20)
    assert response.output_text.startswith(SIGNATURE) and response.status == "incomplete"
    assert completion.choices[0].text.startswith(SIGNATURE) and completion.choices[0].finish_reason == "length"
    assert not episode.calls


async def test_groups_and_our_own_jobs_keep_the_error(rig: Rig, tmp_path: Path) -> None:
    """A group's answer may be for a user of the gateway."""
    group = await rig.post("/claim_group", client_uuid="me", count=2)
    asked = {"messages": [words(250)]}
    for address in (group, *group["episodes"]):
        headers = {"authorization": f"Bearer {address['openai_api_key']}"}
        answer = await rig.client.post(f"{address['openai_base_url']}/chat/completions", json=asked, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    async with rolling(JOB.model_copy(update={"dialect": "swarm-gateway"}), tmp_path / "ours") as ours:
        for more in ({}, {"stream": True}):
            answer = await (await ours.claim()).chat(**asked, **more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


# ------------------------------------------------------------------ how an episode samples


@pytest.mark.parametrize(
    ("asked", "sent"),
    [({}, 40), ({"max_tokens": 30}, 30), ({"max_tokens": 90}, 40), ({"max_completion_tokens": 2000}, 40)],
)
async def test_one_answer_has_at_most_max_turn_length(rig: Rig, asked: dict[str, int], sent: int) -> None:
    for kind in ("train", "eval"):
        assert (await (await rig.claim(episode_type=kind)).chat(**asked)).status_code == 200
        _, body = rig.vllm.requests[-1]
        assert body.get("max_completion_tokens") or body["max_tokens"] == sent
        assert [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body] == [sent]


async def test_eval_episodes_sample_as_the_job_says_where_their_client_does_not(rig: Rig) -> None:
    evaluation, train = await rig.claim(episode_type="eval"), await rig.claim()
    names = ("temperature", "top_p", "top_k")
    await evaluation.chat()
    assert [rig.vllm.requests[-1][1][name] for name in names] == [0.0, 0.5, 7]
    await evaluation.chat(temperature=0.3, top_p=None)
    assert [rig.vllm.requests[-1][1][name] for name in names] == [0.3, 0.5, 7]
    await train.chat()
    assert [rig.vllm.requests[-1][1][name] for name in names] == [0.9, 1.0, -1]


# ------------------------------------------------------------------ an episode that is over


async def test_a_call_of_an_episode_that_is_over_is_told_how_it_ended(rig: Rig) -> None:
    import openai

    ended, aborted, idle = await rig.claim(), await rig.claim(), await rig.claim(discard_episode_timeout=0.01)
    await ended.chat()
    await ended.end()
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=aborted.uuid)
    await rig.eventually(lambda: rig.controller.pool.running.get(idle.uuid) is None)
    asked = len(rig.vllm.requests)
    for episode, code, said in (
        (ended, "episode_ended", "has ended"),
        (aborted, "episode_aborted", "was aborted by its client"),
        (idle, "episode_timed_out", "was idle for longer than its discard_episode_timeout"),
    ):
        async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key) as sdk:
            with pytest.raises(openai.ConflictError, match=said) as caught:
                await sdk.chat.completions.create(model="m", messages=[HI])
        assert (caught.value.code, caught.value.response.headers["x-should-retry"]) == (code, "false")
        episode.key = "sk-swarm-guessed"
        assert (await episode.chat()).status_code == 401, "a stranger is not told that it was there"
    assert len(rig.vllm.requests) == asked


async def test_it_is_told_after_a_restart_too(tmp_path: Path) -> None:
    async with rolling(JOB, tmp_path) as before:
        episode = await before.claim()
        await episode.chat()
        await episode.end()
    async with rolling(JOB, tmp_path) as after:
        path = httpx.URL(episode.base_url).path
        headers = {"authorization": f"Bearer {episode.key}"}
        answer = await after.client.post(f"{path}/chat/completions", json={"messages": [HI]}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_ended")


# ------------------------------------------------------------------ a token in the address


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncGenerator[tuple[Rig, str, str]]:
    """A server that asks for a token, and two that may claim."""
    tokens = TokenFile(tmp_path)
    mine, theirs = tokens.create("mine", ["claim"]), tokens.create("theirs", ["claim"])
    async with rolling(JOB, tmp_path) as rig:
        yield rig, mine, theirs


def at(url: str | httpx.URL, token: str) -> str:
    return str(httpx.URL(url).copy_with(username="x", password=token)).rstrip("/")


async def test_a_token_may_be_the_password_of_the_address(guarded: tuple[Rig, str, str]) -> None:
    import anthropic
    import openai

    rig, mine, theirs = guarded
    url = str(rig.client.base_url).rstrip("/")
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as http:

        async def post(path: str, token: str, **body: Any) -> httpx.Response:
            return await http.post(f"{at(url, token)}{path}", json={"client_uuid": "me"} | body)

        refused = await http.get(f"{url}/get_engine_status")
        assert refused.status_code == 401
        assert all(
            way in refused.json()["error"]["message"] for way in ("http://x:TOKEN@HOST", "ssh -L PORT:127.0.0.1:PORT")
        )
        assert refused.headers["www-authenticate"] == "Bearer", "a browser must not keep the password for other pages"
        assert (await post("/claim_episode", "guessed")).status_code == 401
        claimed = (await post("/claim_episode", mine)).json()
        assert claimed["success"] and "@" not in claimed["openai_base_url"]
        episode = Claimed(rig, claimed["episode_uuid"], claimed["openai_base_url"], claimed["openai_api_key"], "me")

        # its client puts the address that it was given before the path: HTTP clients then send the token, not the key
        async with sdk_of(episode, at(episode.base_url, mine)) as sdk:
            answer = await sdk.chat.completions.create(model="m", messages=[HI])
        assert answer.choices[0].message.content == "t1 t2"
        base_url = at(episode.base_url.removesuffix("/v1"), mine)
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=episode.key, max_retries=0) as claude:
            await claude.messages.create(model="m", max_tokens=20, messages=[HI])
        assert len(episode.calls) == 2

        # a token opens no episode of another one's client, and a wrong one none
        for token in (theirs, "guessed"):
            async with sdk_of(episode, at(episode.base_url, token)) as sdk:
                with pytest.raises(openai.AuthenticationError):
                    await sdk.chat.completions.create(model="m", messages=[HI])
        assert len(episode.calls) == 2
        ended = await post(
            "/end_episode", mine, episode_uuid=episode.uuid, task_id="a", workflow_output={"reward": 1.0}
        )
        assert ended.json()["success"]
        async with sdk_of(episode, at(episode.base_url, mine)) as sdk:
            with pytest.raises(openai.ConflictError, match="has ended"):
                await sdk.chat.completions.create(model="m", messages=[HI])


async def test_the_address_opens_an_episode_after_a_restart_too(tmp_path: Path) -> None:
    mine = TokenFile(tmp_path).create("mine", ["claim"])
    async with rolling(JOB, tmp_path) as before:
        before.client.headers["authorization"] = f"Bearer {mine}"
        episode = await before.claim()
    async with rolling(JOB, tmp_path) as after:
        # a call is the first that the new server hears of the client
        base_url = after.client.base_url.copy_with(path=httpx.URL(episode.base_url).path)
        async with sdk_of(episode, at(base_url, mine)) as sdk:
            answer = await sdk.chat.completions.create(model="m", messages=[HI])
    assert answer.choices[0].message.content == "t1 t2"


@pytest.mark.parametrize("header", ["Basic", "Basic !", "Basic eDo=", "Basic \xff", "basic bm8gY29sb24="])
async def test_what_is_no_password_opens_nothing(guarded: tuple[Rig, str, str], header: str) -> None:
    rig, *_ = guarded
    answer = await rig.client.get("/status", headers={"authorization": header.encode("latin-1")})
    assert answer.status_code == 401


async def test_our_own_client_takes_such_an_address(
    guarded: tuple[Rig, str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import openai

    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    rig, mine, _ = guarded
    rig.vllm.default = plain([5])
    async with AsyncSwarmClient(at(rig.client.base_url, mine), client_uuid="me") as client:
        assert mine not in client.server_url
        episode_uuid, endpoint = await client.begin_episode()
        assert mine not in endpoint.base_url
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as sdk:
            await sdk.chat.completions.create(model="m", messages=[HI])
        await client.abort_episode(episode_uuid)
    with pytest.raises(ConfigError) as wrong:
        AsyncSwarmClient("ftp://x:s3cret@host")
    assert "s3cret" not in str(wrong.value) and mine not in caplog.text
