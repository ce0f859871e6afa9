"""The page over HTTP: who is let in, what a scope opens, what foreign sites cannot do, and what is forbidden to
browsers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from gateway.config.gateway import GatewayConfig
from gateway.keys.store import KeyFile
from tests.gateway.conftest import Http, OpenGateway, ask, write_hooks
from tests.gateway.page.conftest import JSON, Site, site_before
from tests.standins.swarm import Swarm, said

pytestmark = pytest.mark.anyio

STATIC = Path(__file__).parents[3] / "gateway" / "page" / "static"
READS = ("/me", "/groups", "/groups/x", "/learning", "/events")


async def test_without_the_setting_there_is_no_page(gateway: Http) -> None:
    assert (await gateway.get("/ui")).status_code == 404


async def test_every_file_is_served_with_a_policy_that_runs_nothing_else(site: Site) -> None:
    for name in ("", *(f"/{file.name}" for file in STATIC.iterdir())):
        answer = await site.http.get(f"/ui{name}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
        again = await site.http.get(f"/ui{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304


def test_the_files_have_nothing_inline_and_nothing_of_others() -> None:
    page = (STATIC / "index.html").read_text()
    assert "<style" not in page and "onclick" not in page and page.count("<script") == 1
    for file in STATIC.glob("*.js"):
        text = file.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert forbidden not in text, (file.name, forbidden)
    assert "https://" not in "".join(file.read_text() for file in STATIC.iterdir())


@pytest.mark.parametrize("path", READS)
async def test_nobody_reads_without_a_login(site: Site, path: str) -> None:
    answer = await site.http.get(f"/ui/api{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "login_needed")
    # the key itself is no cookie
    answer = await site.http.get(f"/ui/api{path}", headers={"x-api-key": site.keys["decide"]})
    assert answer.status_code == 401


async def test_a_login_is_a_cookie_that_scripts_and_foreign_sites_do_not_get(site: Site) -> None:
    answer = await site.http.post("/ui/api/login", json={"key": site.keys["look"]})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/ui" in cookie and "Secure" not in cookie
    assert site.keys["look"] not in cookie


async def test_beyond_this_machine_the_cookie_needs_https(open_gateway: OpenGateway, tmp_path: Path) -> None:
    async with site_before(open_gateway, tmp_path, host="0.0.0.0") as site:
        answer = await site.http.post("/ui/api/login", json={"key": site.keys["look"]})
        assert "Secure" in answer.headers["set-cookie"]


async def test_wrong_keys_of_one_visitor_make_nobody_behind_the_same_proxy_wait(site: Site) -> None:
    async def log_in(key: str) -> int:
        return (await site.http.post("/ui/api/login", json={"key": key})).status_code

    assert {await log_in("sk-wrong") for _ in range(30)} == {401}
    assert await log_in(site.keys["look"]) == 204


async def test_bodies_have_a_limit_of_their_own(site: Site) -> None:
    answer = await site.http.post("/ui/api/login", json={"key": "x" * 300_000})
    assert answer.status_code == 413


async def test_a_proxy_that_changes_the_host_lets_in_whom_his_browser_calls_our_own(site: Site) -> None:
    body, headers = {"key": site.keys["look"]}, {"origin": "https://swarm.example", "sec-fetch-site": "same-origin"}
    assert (await site.http.post("/ui/api/login", json=body, headers=headers)).status_code == 204
    proxied = await site.http.post("/ui/api/login", json=body, headers=headers | {"x-forwarded-proto": "https"})
    assert "Secure" in proxied.headers["set-cookie"]
    del headers["sec-fetch-site"]
    assert (await site.http.post("/ui/api/login", json=body, headers=headers)).status_code == 403


async def test_keys_that_open_nothing_of_the_page_do_not_log_in(site: Site) -> None:
    wrong = await site.http.post("/ui/api/login", json={"key": "sk-wrong"})
    assert wrong.status_code == 401
    plain = await site.http.post("/ui/api/login", json={"key": site.keys["app"]})
    assert (plain.status_code, plain.json()["error"]["code"]) == (403, "page_scope")


@pytest.mark.parametrize(("scope", "status"), [("look", 403), ("judge", 200), ("decide", 200), ("admin", 200)])
async def test_a_scope_opens_what_it_says_and_no_more(site: Site, scope: str, status: int) -> None:
    await site.ask()
    visitor = await site.visit(scope)
    [group] = await visitor.groups()
    assert (await visitor.judge(group["id"], pick=0)).status_code == status
    assert (await visitor.undo(group["id"])).status_code == status


async def test_a_revoked_key_is_out_at_once(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = await site.visit("look")
    KeyFile(tmp_path / "keys.json").revoke("Lena")
    async with asyncio.timeout(20):
        while (answer := await visitor.http.get("/ui/api/me")).status_code == 200:
            pass
    assert answer.json()["error"]["code"] == "api_key_revoked"


async def test_a_login_that_is_over_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.page.login.SECONDS", -1.0)
    visitor = await site.visit("look")
    # the cookie has an age of its own
    cookie = (await site.http.post("/ui/api/login", json={"key": site.keys["look"]})).headers["set-cookie"]
    # all that the page asks at once
    for _ in range(2):
        answer = await visitor.http.get("/ui/api/me", headers={"cookie": cookie.split(";")[0]})
        assert answer.json()["error"]["code"] == "login_expired"


async def test_logging_out_ends_the_login_and_not_the_key(site: Site) -> None:
    visitor = await site.visit("look")
    cookie = {"cookie": f"swarm_page={visitor.http.cookies['swarm_page']}"}
    assert (await visitor.http.post("/ui/api/logout", headers=JSON)).status_code == 204
    assert (await site.http.get("/ui/api/me", headers=cookie)).status_code == 401
    await site.visit("look")


FOREIGN = [
    {"origin": "https://evil.example", **JSON},
    {"origin": "null", **JSON},
    {"sec-fetch-site": "cross-site", **JSON},
    {"sec-fetch-site": "same-site", **JSON},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "text/plain"},
]


@pytest.mark.parametrize("headers", FOREIGN)
async def test_what_a_foreign_site_makes_a_browser_send_is_refused(site: Site, headers: dict[str, str]) -> None:
    await site.ask()
    visitor = await site.visit("decide")
    [group] = await visitor.groups()
    path, body = f"/ui/api/groups/{group['id']}/judgement", json.dumps({"pick": 0})
    assert (await visitor.http.post(path, content=body, headers=headers)).status_code == 403
    assert (await visitor.http.request("DELETE", path, headers=headers)).status_code == 403
    login = await site.http.post("/ui/api/login", content=json.dumps({"key": site.keys["look"]}), headers=headers)
    assert login.status_code == 403 and "set-cookie" not in login.headers
    assert (await visitor.groups())[0]["picks"] == {}


async def test_a_key_for_some_routes_sees_their_groups_alone(
    open_gateway: OpenGateway, swarm: Swarm, tmp_path: Path
) -> None:
    shared = {"swarm_url": swarm.url, "hooks": str(write_hooks(tmp_path / "hooks"))}
    routes = [{"name": name, "models": [name], **shared} for name in "ab"]
    async with site_before(open_gateway, tmp_path, routes=routes) as site:
        _, site.keys["some"] = KeyFile(tmp_path / "keys.json").create("some", routes=["a"], page="judge")
        async with asyncio.timeout(20):
            while (await site.http.get("/v1/models", headers={"x-api-key": site.keys["some"]})).status_code == 401:
                pass
        await site.ask("for a", model="a")
        await site.ask("for b", model="b")
        some, everybody = await site.visit("some"), await site.visit("look")
        other = next(group for group in await everybody.groups() if group["route"] == "b")
        assert [group["route"] for group in await some.groups()] == ["a"]
        assert (await some.http.get(f"/ui/api/groups/{other['id']}")).status_code == 404
        assert (await some.judge(other["id"], pick=0)).status_code == 404
        assert [route["name"] for route in (await some.get("/learning"))["routes"]] == ["a"]


async def test_a_gateway_without_keys_shows_its_page_to_this_machine_alone(open_gateway: OpenGateway) -> None:
    async with open_gateway(ui={}) as http:
        await ask(http)
        assert (await http.get("/ui/api/me")).json()["scope"] == "decide"
        assert len((await http.get("/ui/api/groups")).json()["groups"]) == 1
        foreign = await http.get("/ui/api/groups", headers={"host": "evil.example"})
        assert foreign.status_code == 421


async def test_texts_that_may_not_be_kept_are_not_shown(site: Site, swarm: Swarm) -> None:
    await site.http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "mine"}]},
        headers={"x-api-key": site.keys["app"], "x-swarm-train": "false"},
    )
    assert await (await site.visit("look")).groups() == []


async def test_a_raw_prompt_is_shown_and_found_by_its_words(site: Site) -> None:
    body = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 8}
    answer = await site.http.post("/v1/completions", json=body, headers={"x-api-key": site.keys["app"]})
    assert answer.status_code == 200, answer.text
    visitor = await site.visit("look")
    found = (await visitor.get("/groups?words=upon"))["groups"]
    assert [row["prompt"] for row in found] == ["once upon a time"]


async def test_secrets_are_removed(site: Site, swarm: Swarm) -> None:
    secret = "sk-abcdefghijklmnopqrstuvwxyz"
    swarm.answer = lambda body, number: said(f"use {secret} {'x ' * number}")
    await site.ask(f"my key is {secret}")
    visitor = await site.visit("look")
    [row] = await visitor.groups()
    whole = json.dumps(await visitor.get(f"/groups/{row['id']}"))
    assert secret not in json.dumps(row) + whole and "[removed]" in whole


async def test_what_a_query_leaves_empty_fits_each_group(site: Site) -> None:
    await site.ask()
    visitor = await site.visit("look")
    assert len(await visitor.groups(view="", words="", route="", key="", policy="", limit="")) == 1


@pytest.mark.parametrize("query", ["view=x", "policy=-1", "policy=%C2%B2", "limit=a"])
async def test_a_wrong_query_is_400(site: Site, query: str) -> None:
    visitor = await site.visit("look")
    assert (await visitor.http.get(f"/ui/api/groups?{query}")).status_code == 400


async def test_the_page_is_small(site: Site) -> None:
    total = 0
    async with httpx.AsyncClient(base_url=site.url, headers={"accept-encoding": "gzip"}, verify=False) as http:
        for file in STATIC.iterdir():
            async with http.stream("GET", f"/ui/{file.name}") as answer:
                total += sum([len(part) async for part in answer.aiter_raw()])
    assert total <= 60 * 1024


def test_the_settings_resolve_their_file(tmp_path: Path) -> None:
    from gateway.config.gateway import read_config

    config = read_config({"hooks": "any", "swarm_url": "http://x", "ui": {"judgements": "j.jsonl"}}, folder=tmp_path)
    assert config.ui is not None and config.ui.judgements == tmp_path / "j.jsonl"
    assert GatewayConfig.model_validate({"hooks": "any", "swarm_url": "http://x"}).ui is None
