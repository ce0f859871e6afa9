"""What is kept of a person, on the page: seen, and deleted, by who has an admin key."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from gateway.keys.store import KeyFile
from tests.gateway.conftest import CHAT, gateway_before
from tests.gateway.page.conftest import JSON, Site
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
        async with httpx.AsyncClient(base_url=http.base_url, timeout=60, trust_env=False) as boss:
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
