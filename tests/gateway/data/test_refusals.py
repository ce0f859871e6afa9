"""A no of a key or a session that was said once: it holds over restarts, at each gateway that has the file, and its
file names no session."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.config.gateway import GatewayConfig
from gateway.data.consent import Refusals
from gateway.keys.ring import KeyRing
from gateway.keys.store import KeyFile
from swarm.credentials import digest, read_private
from swarm.errors import ConfigError, ConflictError, NotFoundError, RequestError
from tests.gateway.conftest import BODY, CHAT, ask, gateway_before
from tests.standins.vllm import plain, told
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

rig = server.rig
overrides = server.overrides

NO = {"x-swarm-train": "false; session"}


async def test_a_no_survives_a_restart_and_reaches_the_others_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json.refusals"
    one, other = Refusals(path), Refusals(path)
    assert await one.hear("a", "Anna's chat", NO) and not await one.hear("a", "another", {})
    assert not other.refuses("a", "Anna's chat")
    await other.refresh()
    assert other.refuses("a", "Anna's chat") and not other.refuses("b", "Anna's chat")
    await other.add("b", "")
    assert other.refuses("b") and other.refuses("b", "any") and not other.refuses("c")
    await other.add("", "his")
    late = Refusals(path)
    assert late.refuses("a", "Anna's chat") and late.refuses("b") and late.refuses("whoever", "his")
    assert not late.refuses("", "") and "Anna" not in path.read_text()
    path.write_text(path.read_text().replace('"b"', '"d"'))
    await late.refresh()
    assert late.refuses("d") and not late.refuses("b"), "an operator takes a no back in the file"
    path.unlink()
    await late.refresh()
    assert late.refuses("d"), "a file that is gone takes no no back"


async def test_without_a_file_or_where_it_cannot_be_written_a_sessions_no_holds_here(tmp_path: Path) -> None:
    refusals = Refusals(None)
    assert await refusals.hear("", "hers", NO) and await refusals.hear("", "hers", {})
    refusals = Refusals(tmp_path / "refusals")
    (tmp_path / "refusals").mkdir()
    assert await refusals.hear("a", "hers", NO) and await refusals.hear("a", "hers", {"x-swarm-train": "true"})
    with pytest.raises(ConfigError):
        await refusals.add("a", "")
    assert not refusals.refuses("a")


async def test_the_oldest_sessions_leave_and_no_key_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.data.consent._MOST_SESSIONS", 3)
    refusals = Refusals(tmp_path / "refusals")
    await refusals.add("a", "")
    for number in range(5):
        await refusals.hear("b", f"chat {number}", NO)
    late = Refusals(tmp_path / "refusals")
    assert [late.refuses("b", f"chat {number}") for number in range(5)] == [False, False, True, True, True]
    assert late.refuses("a")


async def test_a_ring_says_no_for_a_key_that_opted_out_and_for_no_other(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (key, _), (web, _) = file.create("shop", train=True), file.create("web")
    config = GatewayConfig.model_validate({"hooks": "h", "keys_file": str(file.path), "api_keys": ["fixed"]})
    keys = KeyRing(config)
    assert not keys.refusals.refuses(key.id)
    assert await keys.opt_out(key.id, "") and not await keys.opt_out(key.id, "") and not await keys.opt_out(key.id, "s")
    fixed = keys.holder(digest(b"fixed")).caller
    assert await keys.opt_out(fixed.key_id, "")
    for ring in (keys, KeyRing(config)):
        assert ring.refusals.refuses(key.id) and ring.refusals.refuses(fixed.key_id)
        assert not ring.refusals.refuses(web.id)
    with pytest.raises(NotFoundError, match="keys list"):
        await keys.opt_out("f00", "")
    with pytest.raises(RequestError, match="name a key"):
        await keys.opt_out("", "")
    file.refusals_path.unlink()
    file.refusals_path.mkdir()
    with pytest.raises(ConflictError, match="nobody has opted out"):
        await keys.opt_out("", "a session")


async def test_a_sessions_no_holds_when_a_reload_names_a_file_of_keys(tmp_path: Path) -> None:
    keys = KeyRing(GatewayConfig.model_validate({"hooks": "h", "api_keys": ["fixed"]}))
    key_id = keys.holder(digest(b"fixed")).caller.key_id
    assert await keys.refusals.hear(key_id, "hers", NO)
    file = KeyFile(tmp_path / "keys.json")
    keys.change(GatewayConfig.model_validate({"hooks": "h", "api_keys": ["fixed"], "keys_file": str(file.path)}))
    assert keys.refusals.refuses(key_id, "hers")
    # and it is written with the next one
    await keys.refusals.hear(key_id, "his", NO)
    assert Refusals(file.refusals_path).refuses(key_id, "hers")


async def test_a_look_at_the_file_takes_back_no_no_that_is_said_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (first, _), (second, _) = file.create("shop"), file.create("web")
    keys = KeyRing(GatewayConfig.model_validate({"hooks": "h", "keys_file": str(file.path)}))
    # now there is something to read
    await keys.opt_out(first.id, "")
    was_read, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        found = read_private(*arguments)
        if not was_read.is_set():
            was_read.set()
            assert go_on.wait(20)
        return found

    monkeypatch.setattr("gateway.data.consent.read_private", slow)
    looking = asyncio.create_task(keys.look())
    assert await asyncio.to_thread(was_read.wait, 20)
    saying_no = asyncio.create_task(keys.opt_out(second.id, ""))
    await asyncio.wait({saying_no}, timeout=0.3)
    go_on.set()
    await asyncio.gather(looking, saying_no)
    assert keys.refusals.refuses(second.id)


async def test_a_session_that_said_no_stays_untrained_after_a_restart(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = lambda sent: told([1], [2])(sent) if "prompt" in sent else plain([1])(sent)
    _, app = KeyFile(tmp_path / "keys.json").create("shop")
    settings: dict[str, Any] = {"keys_file": tmp_path / "keys.json"}

    async def trained(session: str, **headers: str) -> str:
        async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            headers |= {"x-api-key": app, "x-swarm-session": session}
            return (await http.post(CHAT, json=body, headers=headers)).headers["x-swarm-trained"]

    assert await trained("his") == "true"
    assert await trained("hers", **NO) == await trained("hers") == "false"
    assert len(json.loads((tmp_path / "keys.json.refusals").read_text())["sessions"]) == 1


async def test_what_a_key_that_said_no_sends_is_neither_trained_nor_written(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = plain([1])
    file, log = KeyFile(tmp_path / "keys.json"), tmp_path / "requests.jsonl"
    key, app = file.create("shop", train=True)
    await Refusals(file.refusals_path).add(key.id, "")
    settings: dict[str, Any] = {"keys_file": file.path, "request_log": {"path": log}}
    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        assert (await http.post(CHAT, json=BODY, headers={"x-api-key": app})).headers["x-swarm-trained"] == "false"
        told = {"request_id": "any", "comment": "mine"}
        await http.post("/v1/feedback", json=told, headers={"x-api-key": app})
    assert [json.loads(line)["request"] for line in log.read_text().splitlines()] == [None, None]


async def test_a_sessions_no_holds_for_the_sub_agents_of_its_sub_agents(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = plain([1])
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:

        async def trained(session: str, parent: str = "", **headers: str) -> str:
            # each names its own session, and the one that began it
            headers |= {"user-agent": "opencode/1.18.33", "x-session-id": session}
            headers |= {"x-parent-session-id": parent} if parent else {}
            return (await ask(http, headers)).headers["x-swarm-trained"]

        assert await trained("root", **NO) == await trained("child", "root") == "false"
        assert await trained("grandchild", "child") == "false" and await trained("another") == "true"


@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_headers_the_one_that_says_no_counts(rig: server.Rig, tmp_path: Path, order: int) -> None:
    rig.vllm.default = plain([1])
    # the application says one, and a proxy before the gateway adds the other
    said = [("x-swarm-train", "false"), ("x-swarm-train", "true")][::order]
    log = tmp_path / "requests.jsonl"
    async with gateway_before(str(rig.client.base_url), tmp_path, request_log={"path": log}) as http:
        assert (await http.post(CHAT, json=BODY, headers=said)).headers["x-swarm-trained"] == "false"
    assert json.loads(log.read_text())["request"] is None
