"""Whatever happens to a request: no key of anybody's, and no word of a user's, where it was not asked for."""

from __future__ import annotations

import io
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gateway.observability.logs import JsonFormatter
from tests.gateway.conftest import BODY, CHAT, REWARD, OpenGateway, write_hooks
from tests.gateway.observability.conftest import Exported
from tests.standins.swarm import Swarm, error
from tests.standins.upstream import Upstream

pytestmark = pytest.mark.anyio

PROMPT = "tell nobody that the butler did it"
KEY = "sk-app-0123456789abcdef"
#: what is sent with every request, and what the gateway itself holds
SECRETS = {
    "authorization": f"Bearer {KEY}",
    "cookie": "session=cookie-of-a-user",
    "x-api-key": KEY,
    "x-auth-token": "token-of-a-user",
}
HELD = {"swarm_token": "token-of-the-swarm", "api_keys": [KEY]}
WORDS = (KEY, "cookie-of-a-user", "token-of-a-user", "token-of-the-swarm", "sk-proj-abcdefghijklmnop0123")
FAILING = "def on_compute_relative_reward(task, candidates, context):\n    raise KeyError(task.main_query)\n"


@pytest.fixture
def logged() -> Generator[io.StringIO]:
    """All that is logged, down to what is only of use in debugging, as lines of JSON."""
    out, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    ours = [logging.getLogger(name) for name in ("gateway", "swarm", "reward_hooks", "adapters")]
    levels = [one.level for one in ours]
    for one in ours:
        one.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield out
    root.removeHandler(handler)
    for one, level in zip(ours, levels, strict=True):
        one.setLevel(level)


@pytest.mark.parametrize("case", ["well", "hook", "engine", "refused", "stream", "malformed", "defect"])
async def test_nothing_tells(
    swarm: Swarm,
    open_gateway: OpenGateway,
    logged: io.StringIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exported: Exported,
    case: str,
) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
    content: bytes | None = None
    match case:
        case "engine" | "refused":
            code = 500 if case == "engine" else 400
            swarm.answer = lambda body, _: error(code, f"invalid value {body['messages']}")
        case "stream":
            body |= {"stream": True}
        case "malformed":
            content = f'{{"messages": "{PROMPT}'.encode()
        case "defect":

            def defect(scope: Any) -> None:
                raise RuntimeError(PROMPT)

            monkeypatch.setattr("gateway.api.endpoint.caller_of", defect)
        case _:
            pass
    told = {} if content is None else {"content": content}
    log = tmp_path / "requests.jsonl"
    async with open_gateway(
        reward=FAILING if case == "hook" else REWARD,
        tracing={},
        access_log=True,
        request_log={"path": log},
        policy="first" if case == "stream" else "best",
        **HELD,
    ) as http:
        asked = {"headers": SECRETS, **(told or {"json": body})}
        # a key that the user's own tool sends along, and one that a user pasted
        answer = await http.post(CHAT, **asked)
        if content is None:
            pasted = {**body, "metadata": {"api_key": "short"}, "user": "sk-proj-abcdefghijklmnop0123"}
            await http.post(CHAT, json=pasted, headers=SECRETS)
        metrics = (await http.get("/metrics", headers=SECRETS)).text
        status = (await http.get("/status", headers=SECRETS)).text
    assert answer.status_code == {"engine": 502, "refused": 400, "malformed": 400, "defect": 500}.get(case, 200)
    lines, traced = logged.getvalue(), exported.json()
    assert "gateway.access" in lines and "POST request" in traced and "gateway_requests_total" in metrics
    assert ('"HookError"' in traced) == (case == "hook")
    for place, text in (("log", lines), ("spans", traced), ("metrics", metrics), ("status", status)):
        assert PROMPT not in text, place
    requests = log.read_text()
    # this one is for what users say
    assert PROMPT in requests
    for secret in WORDS:
        for place, text in (("log", lines), ("spans", traced), ("metrics", metrics), ("requests", requests)):
            assert secret not in text, (secret, place)


async def test_the_token_in_an_address_is_told_to_no_application(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, nobody: str, tmp_path: Path
) -> None:
    def of(url: str, name: str) -> str:
        return url.replace("http://", f"http://{name}:token-of-the-swarm@")

    own, headers = {"base_url": of(upstream.url, "x")}, {"x-api-key": KEY}
    async with open_gateway(swarm_url=of(swarm.url, "x"), upstream=own, **HELD) as http:
        assert (await http.post(CHAT, json={**BODY, "model": "tiny"}, headers=headers)).status_code == 200
        status = await http.get("/status", headers=headers)
        route, [told] = status.json()["routes"]["default"], status.json()["swarms"]
        assert (route["swarm_url"], route["upstream"], told["url"]) == (swarm.url, upstream.url, swarm.url)
        texts = [status.text, (await http.get("/metrics", headers=headers)).text]
    async with open_gateway(swarm_url=of(swarm.url, "x"), **HELD) as http:
        untrained = await http.post(CHAT, json=BODY, headers=headers | {"x-swarm-train": "false"})
        texts.append(untrained.text)
    hooks = str(write_hooks(tmp_path / "hooks"))
    shared = {"hooks": hooks, "offline_wait_seconds": 0.0}
    routes = [{"name": name, "swarm_url": of(nobody, name), **shared} for name in ("a", "b")]
    async with open_gateway(routes=routes, **HELD) as http:
        unknown = await http.post(CHAT, json={**BODY, "model": "unheard"}, headers=headers)
        assert unknown.status_code == 503 and nobody in unknown.text
    assert not any("token-of-the-swarm" in text for text in (*texts, unknown.text))
