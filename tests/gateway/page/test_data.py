"""What is kept of a person, on the page: seen, and deleted, by who has an admin key; keys and sessions that opt out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import httpx
import pytest

from gateway.keys.store import KeyFile
from tests.gateway.conftest import CHAT, OpenGateway, gateway_before
from tests.gateway.page.conftest import JSON, Site, site_before
from tests.standins.vllm import plain, told
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

rig = server.rig
overrides = server.overrides


async def test_a_key_that_is_no_admins_sees_and_deletes_nothing_of_it(site: Site) -> None:
    visitor = await site.visit("decide")
    for method, path in (("GET", "/data"), ("POST", "/data/delete")):
        answer = await visitor.http.request(method, f"/ui/api{path}?key=any", headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_needed")
    assert (await site.http.get("/ui/api/data?key=any")).status_code == 401


async def test_who_reads_groups_is_in_the_audit_log_beside_the_keys(site: Site, tmp_path: Path) -> None:
    await site.ask()
    lena = await site.visit("look")
    for _ in range(2):
        (group,) = await lena.groups()
        await lena.get(f"/groups/{group['id']}")
    lines = [json.loads(line) for line in (tmp_path / "keys.json.audit.jsonl").read_text().splitlines()]
    reads = [(line["who"], line["what"]) for line in lines if line["what"].endswith("read")]
    assert reads == [("Lena", "groups read"), ("Lena", f"group {group['id']} read")]


async def test_an_admin_sees_what_there_is_of_a_user_and_deletes_it(rig: server.Rig, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (_, app), (_, admin) = file.create("shop"), file.create("boss", admin=True)
    rig.vllm.default = lambda sent: told([1], [2])(sent) if "prompt" in sent else plain([1])(sent)
    url = str(rig.client.base_url)
    async with gateway_before(url, tmp_path, keys_file=file.path, ui={"judgements": tmp_path / "j.jsonl"}) as http:
        for user in ("anna", "otto"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"I am {user}"}], "user": user}
            assert (await http.post(CHAT, json=body, headers={"x-api-key": app})).status_code == 200
        async with httpx.AsyncClient(base_url=http.base_url, timeout=60, trust_env=False, verify=False) as boss:
            assert (await boss.post("/ui/api/login", json={"key": admin})).status_code == 204
            assert (await boss.get("/ui/api/me")).json()["admin"]
            groups = (await boss.get("/ui/api/groups")).json()["groups"]
            for group in groups:
                judged = await boss.post(f"/ui/api/groups/{group['id']}/judgement", json={"pick": 0})
                assert judged.status_code == 200, judged.text
            kept = await boss.get("/ui/api/data", params={"user": "anna"})
            assert kept.headers["x-frame-options"] == "DENY"
            assert (sum(kept.json()["episodes"].values()), kept.json()["deleted"]) == (2, False)
            assert (await boss.get("/ui/api/data")).status_code == 400, "nobody is named"
            foreign = {"origin": "https://evil.example", **JSON}
            path = "/ui/api/data/delete?user=anna"
            assert (await boss.post(path, headers=foreign)).status_code == 403
            done = (await boss.post(path, headers=JSON)).json()
            assert done["deleted"] and (done["gateway"]["page_groups"], done["gateway"]["judgements"]) == (1, 1)
            assert [row["prompt"] for row in (await boss.get("/ui/api/groups")).json()["groups"]] == ["I am otto"]
    assert len((tmp_path / "j.jsonl").read_text().splitlines()) == 1


@pytest.fixture
async def real_site(rig: server.Rig, tmp_path: Path) -> AsyncGenerator[Site]:
    """Before a real swarm server, which gives a group that nobody may train."""
    rig.vllm.default = lambda sent: told([1], [2])(sent) if "prompt" in sent else plain([1])(sent)
    opened = partial(gateway_before, str(rig.client.base_url), tmp_path)
    async with site_before(opened, tmp_path) as made:
        yield made


async def test_who_may_decide_opts_a_key_out_and_is_named_in_the_audit_log(real_site: Site, tmp_path: Path) -> None:
    site, file = real_site, KeyFile(tmp_path / "keys.json")
    [shop] = [key for key in file.read() if key.label == "shop"]

    async def opt_out(scope: str, **whom: str) -> tuple[int, object]:
        answer = await (await site.visit(scope)).http.post("/ui/api/data/opt-out", json=whom)
        body = answer.json()
        return answer.status_code, body.get("new", body.get("error", {}).get("code"))

    assert (await site.ask()).headers["x-swarm-trained"] == "true"
    assert await opt_out("judge", key=shop.id) == (403, "page_scope")
    assert await opt_out("decide", key="nobody") == (404, "key_not_found")
    assert (await opt_out("decide"))[0] == 400
    _, site.keys["some"] = file.create("some", routes=["default"], page="decide")
    async with asyncio.timeout(20):
        while (await site.http.post("/ui/api/login", json={"key": site.keys["some"]})).status_code == 401:
            pass
    assert await opt_out("some", key=shop.id) == (403, "key_limited")
    assert (await site.ask()).headers["x-swarm-trained"] == "true"
    assert await opt_out("decide", key=shop.id) == (200, True)
    answer = await site.ask()
    assert (answer.headers["x-swarm-trained"], answer.headers["x-swarm-drop-reason"]) == ("false", "no_consent")
    assert await opt_out("decide", key=shop.id) == (200, False)
    done = [json.loads(line) for line in file.audit_path.read_text().splitlines()]
    assert [(line["who"], line["key"], line["session"]) for line in done] == [("Dana", shop.id, "")] * 2


async def test_a_gateway_without_keys_opts_nobody_out(open_gateway: OpenGateway) -> None:
    async with open_gateway(ui={}) as http:
        answer = await http.post("/ui/api/data/opt-out", json={"session": "hers"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "keyless")
