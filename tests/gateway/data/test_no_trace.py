"""Who says no leaves no trace: marked texts are searched for, byte by byte, in all that gateway and server write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.keys.store import KeyFile
from gateway.observability.logs import TextFormatter
from tests.gateway.conftest import CHAT, Http, gateway_before
from tests.standins.upstream import Upstream
from tests.standins.vllm import PROMPT, completion_chunk, plain, role_chunk, status, streamed, token_chunk, told
from tests.standins.vllm import usage_chunk as usage
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

rig = server.rig

#: In prompts, and the text of the token that answers say.
MARK, TOKEN = "Zweitausendfüßler", 9177
ANSWER = f"t{TOKEN}"
DIALECTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": f"hello {MARK}"}], "metadata": {"note": MARK}},
    "/v1/completions": {"prompt": f"hello {MARK}"},
    "/v1/responses": {"input": f"hello {MARK}", "instructions": MARK},
    "/v1/messages": {"max_tokens": 9, "system": MARK, "messages": [{"role": "user", "content": MARK}]},
}
NO = {"x-swarm-train": "false"}


@pytest.fixture
def overrides() -> dict[str, Any]:
    return {"call_attempts": 1}


def answering(sent: dict[str, Any]) -> Any:
    """The marked answer, in whatever form the engine is asked for it."""
    count = sent.get("n") or 1
    if "prompt" not in sent:
        live = streamed(role_chunk(), token_chunk([TOKEN], "stop"), usage(1))
        return (live if sent.get("stream") else plain([TOKEN]))(sent)
    live = streamed(completion_chunk([TOKEN], "stop", PROMPT), usage(1))
    return (live if sent.get("stream") else told(*[[TOKEN]] * count))(sent)


@contextmanager
def logging_all(path: Path) -> Generator[None]:
    """The log of the gateway with what errors quote, and of all others without."""
    loggers = {name: TextFormatter(texts=name == "gateway") for name in ("", "gateway")}
    handlers: list[tuple[logging.Logger, logging.Handler, int]] = []
    for name, formatter in loggers.items():
        logger, handler = logging.getLogger(name), logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(formatter)
        handlers.append((logger, handler, logger.level))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if name else logging.INFO)
    try:
        yield
    finally:
        for logger, handler, level in handlers:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()


@asynccontextmanager
async def keeping_all(rig: server.Rig, folder: Path, **settings: Any) -> AsyncGenerator[Http]:
    """A gateway that writes whatever it may, into the server's run folder."""
    rig.vllm.default = answering
    log: dict[str, Any] = {
        "claim_wait_seconds": 1.0,
        "offline_wait_seconds": 1.0,
        "request_log": {"path": folder / "requests.jsonl"},
        "access_log": True,
    }
    with logging_all(folder / "gateway.log"):
        async with gateway_before(str(rig.client.base_url), folder, **(log | settings)) as http:
            yield http


async def everything(http: Http, headers: dict[str, str]) -> None:
    """All dialects, streamed and not, by both policies, answered, refused, cut, repeated and left."""
    for path, asked in DIALECTS.items():
        for stream in (False, True):
            body = {"model": "tiny", "stream": stream, **asked}
            for policy in ("best", "first"):
                answer = await http.post(path, json=body, headers=headers | {"x-swarm-policy": policy})
                assert answer.status_code == 200 and ANSWER in answer.text, answer.text
            # a retry, which joins
            again = {"idempotency-key": f"{path} {stream}"}
            first, second = [await http.post(path, json=body, headers=headers | again) for _ in range(2)]
            assert first.status_code == second.status_code == 200
        refused = await http.post(path, json={"model": "tiny", "temperature": -1, **asked}, headers=headers)
        assert refused.status_code == 400
        assert (await http.post(path, content=f'{{"broken": "{MARK}'.encode(), headers=headers)).status_code == 400
    assert (await http.post("/v1/embeddings", json={"input": MARK}, headers=headers)).status_code == 404


async def failing(rig: server.Rig, http: Http, headers: dict[str, str]) -> None:
    """Errors that quote the prompt, and callers who leave in the middle."""
    rig.vllm.default = status(400, {"error": {"message": f"cannot say {MARK}", "type": "E", "code": 400}})
    for path, asked in DIALECTS.items():
        for stream in (False, True):
            answer = await http.post(path, json={"model": "tiny", "stream": stream, **asked}, headers=headers)
            assert answer.status_code == 400 and "cannot say" in answer.text
    rig.vllm.default = status(503, {"error": {"message": f"cannot say {MARK} now", "type": "E", "code": 503}})
    answer = await http.post(CHAT, json={"model": "tiny", **DIALECTS[CHAT]}, headers=headers)
    assert answer.status_code in (502, 503)
    rig.vllm.default = rig.vllm.hang(role_chunk(), token_chunk([TOKEN]))
    body = {"model": "tiny", "stream": True, **DIALECTS[CHAT]}
    async with http.stream("POST", CHAT, json=body, headers=headers | {"x-swarm-policy": "first"}) as answer:
        async for line in answer.aiter_lines():
            if ANSWER in line:
                break
    async with asyncio.timeout(20):
        await rig.vllm.cancelled.wait()
    rig.vllm.default = answering


def traces(folder: Path, *more: str) -> set[str]:
    """The names of files that hold a mark, as text or as it stands in JSON, or one of ``more``."""
    forms = [MARK.encode(), MARK.encode("utf-16-le"), MARK.encode("unicode_escape"), b"Zweitausend"]
    forms += [text.encode() for text in more]
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.name for path in files if any(form in path.read_bytes() for form in forms)}


async def records(rig: server.Rig) -> int:
    while True:
        journal = (await rig.client.get("/status")).json()["journal"]
        if not journal["pending"]:
            return journal["records"]


async def test_what_is_kept_of_who_says_yes_is_found_by_the_search(rig: server.Rig, tmp_path: Path) -> None:
    # the batch is soon full, and nothing is trained
    async with keeping_all(rig, tmp_path, claim_wait_seconds=0.1) as http:
        await everything(http, {"x-swarm-train": "true"})
    assert {"requests.jsonl"} <= traces(tmp_path) and await records(rig) > 0


@pytest.mark.parametrize("who", ["header", "key", "route", "key against the header"])
async def test_who_says_no_leaves_no_trace(rig: server.Rig, tmp_path: Path, who: str) -> None:
    settings: dict[str, Any] = {"data": {"consent": "opt_in"}} if who == "route" else {}
    headers = NO if who == "header" else {}
    if who.startswith("key"):
        settings["keys_file"] = tmp_path / "keys.json"
        _, key = KeyFile(tmp_path / "keys.json").create("app", train=False)
        headers = {"authorization": f"Bearer {key}"} | ({"x-swarm-train": "true"} if "against" in who else {})
    before, episodes = await records(rig), rig.controller.pool.information()
    async with keeping_all(rig, tmp_path, **settings) as http:
        await everything(http, headers)
        await failing(rig, http, headers)
        counts = (await http.get("/status", headers=headers)).json()
        assert (counts["sessions"]["open"], counts["sessions"]["bytes"]) == (0, 0)
        kept = await http.post("/v1/responses", json={"model": "tiny", **DIALECTS["/v1/responses"]}, headers=headers)
        unknown = await http.get(f"/v1/responses/{kept.json()['id']}", headers=headers)
        assert (kept.status_code, unknown.status_code) == (200, 404)
    assert traces(tmp_path, ANSWER) == set()
    assert (tmp_path / "requests.jsonl").stat().st_size and (tmp_path / "gateway.log").stat().st_size
    assert await records(rig) == before and rig.controller.pool.information() == episodes


async def test_a_route_that_asks_answers_all_as_well_and_trains_who_says_yes(rig: server.Rig, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (_, silent), (_, willing), (_, never) = (file.create(f"app {train}", train=train) for train in (None, True, False))

    async def ask(key: str, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"model": "tiny", **DIALECTS[CHAT]}
        return await http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"} | (headers or {}))

    def said(answer: httpx.Response) -> tuple[str, str]:
        assert answer.status_code == 200
        return answer.headers["x-swarm-trained"], answer.headers.get("x-swarm-drop-reason", "")

    settings: dict[str, Any] = {"keys_file": file.path, "data": {"consent": "opt_in"}}
    async with keeping_all(rig, tmp_path, **settings) as http:
        assert said(await ask(silent)) == ("false", "no_consent")
        assert [sent["n"] for _, sent in rig.vllm.requests] == [server.JOB.num_repeat]
        assert said(await ask(silent, {"x-swarm-train": "true"})) == ("true", "")
        assert said(await ask(willing)) == ("true", "")
        assert said(await ask(willing, NO)) == ("false", "")
        assert said(await ask(never)) == said(await ask(never, {"x-swarm-train": "true"})) == ("false", "no_consent")
        refused = await ask(silent, {"x-swarm-train": "perhaps"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-swarm-train")


async def test_a_session_that_says_no_is_not_kept_from_then_on(rig: server.Rig, tmp_path: Path) -> None:
    async with keeping_all(rig, tmp_path) as http:

        async def trained(session: str, **headers: str) -> str:
            body = {"model": "tiny", **DIALECTS[CHAT]}
            answer = await http.post(CHAT, json=body, headers={"x-swarm-session": session, **headers})
            return answer.headers["x-swarm-trained"]

        assert await trained("hers", **{"x-swarm-train": "false; session"}) == "false"
        assert await trained("hers") == await trained("hers", **{"x-swarm-train": "true"}) == "false"
        assert traces(tmp_path, ANSWER) == set()
        assert await trained("his") == "true"


@pytest.mark.parametrize("dialect", [CHAT, "/v1/messages"])
async def test_whatever_a_session_asks_that_said_no_is_not_kept(
    rig: server.Rig, upstream: Upstream, tmp_path: Path, dialect: str
) -> None:
    """Refused, counted, forwarded and ended: what no conversation is made of, or no route is found for."""
    named: dict[str, Any] = {"session_id": "hers"} if dialect == CHAT else {"user_id": '{"session_id": "hers"}'}
    asked = {"model": "tiny", **DIALECTS[dialect], "metadata": named}
    no, header = {"x-swarm-train": "false; session"}, {"x-swarm-session": "hers"}
    async with keeping_all(rig, tmp_path, upstream={"base_url": upstream.url}) as http:
        assert (await http.post(dialect, json=asked, headers=no)).status_code == 200
        for body in ({**asked, "stream": MARK}, {**asked, "model": "unheard"}):
            assert (await http.post(dialect, json=body)).status_code in (400, 404)
        assert (await http.post(dialect, content=f'"{MARK}'.encode(), headers=header)).status_code == 400
        await http.post("/v1/messages/count_tokens", json={**asked, **DIALECTS["/v1/messages"], "metadata": named})
        for headers in ({}, header):
            await http.post("/v1/embeddings", json={"input": MARK, **({} if headers else asked)}, headers=headers)
        await http.post("/v1/sessions/hers/end", json={"comment": MARK})
    assert len(upstream.got) >= 2 and traces(tmp_path) == set()
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 8
