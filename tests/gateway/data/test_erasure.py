"""``data delete`` through a gateway: what it, its request log and the swarm server had of a caller is gone."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from gateway.keys.store import KeyFile
from gateway.observability.request_log import RequestLog
from swarm.errors import UnavailableError
from swarm.server.journal.erasure import Match, tombstones
from swarm.server.journal.rows import StateRow
from swarm.states import EpisodeState
from swarm.subjects import DataReport, Subject, user_digest
from tests.gateway.conftest import CHAT, Http, gateway_before, serving
from tests.standins.upstream import Upstream
from tests.standins.vllm import POISON, plain, role_chunk, streamed, token_chunk, told, usage_chunk
from tests.swarm.server import conftest as server
from tests.swarm.server.dataplane.test_fatal_requests import restarted

pytestmark = pytest.mark.anyio

rig = server.rig
overrides = server.overrides

MARK, HERS, HIS = "Zweitausendfüßler", 9177, 9178


def traces(folder: Path, mark: bytes) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and mark in path.read_bytes()}


async def waiting(rig: server.Rig, count: int) -> None:
    await rig.eventually(lambda: rig.controller.pool.information().completed_episodes == count)


async def test_what_is_kept_of_a_key_is_reported_exported_and_deleted_everywhere(
    rig: server.Rig, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (her, hers), (_, his), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "he", "boss"))

    async def ask(http: Http, key: str, token: int) -> None:
        rig.vllm.default = lambda sent: told(*[[token]] * 2)(sent) if "prompt" in sent else plain([token])(sent)
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"hello {MARK} {token}"}]}
        answer = await http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text

    log = {"path": tmp_path / "requests.jsonl"}
    about, boss = {"key": her.id}, {"authorization": f"Bearer {admin}"}
    async with gateway_before(str(rig.client.base_url), tmp_path, keys_file=file.path, request_log=log) as http:
        await ask(http, hers, HERS)
        await ask(http, his, HIS)
        await waiting(rig, 4)
        refused = await http.get("/admin/data/report", params=about, headers={"authorization": f"Bearer {hers}"})
        assert refused.status_code == 403
        report = (await http.get("/admin/data/report", params=about, headers=boss)).json()
        assert report["episodes"] == {"waiting": 2} and len(report["requests"]) == 1
        rows = (await http.get("/admin/data/export", params=about, headers=boss)).text.splitlines()
        assert [json.loads(row)["output"]["notes"]["key"] for row in rows] == [her.id] * 2
        done = (await http.post("/admin/data/delete", params=about, headers=boss)).json()
        assert done["deleted"] and done["gateway"] == {"request_log_lines": 1, "sessions": 1, "responses": 0}
        await waiting(rig, 2)
        again = (await http.get("/admin/data/report", params=about, headers=boss)).json()
        assert again["episodes"] == {} and [stone["episodes"] for stone in again["earlier"]] == [2]
    assert traces(tmp_path, f"{MARK} {HERS}".encode()) == set()
    assert "requests.jsonl" in traces(tmp_path, f"{MARK} {HIS}".encode())
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [entry["what"] for entry in entries].count("data delete") == 1


@pytest.mark.parametrize("about", [{"key": ""}, {"user": user_digest("Ann")}, {"session": "chat of Ann"}])
async def test_requests_that_nobody_samples_are_deleted_from_the_request_log_too(
    rig: server.Rig, upstream: Upstream, tmp_path: Path, about: dict[str, str]
) -> None:
    """Refused, counted and forwarded ones, and feedback."""
    file = KeyFile(tmp_path / "keys.json")
    (her, hers), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "boss"))
    about = {"key": her.id} if "key" in about else about
    talk = [{"role": "user", "content": MARK}]
    metadata = {"session_id": "chat of Ann", "user_id": "Ann"}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"model": "unheard", "user": "Ann", "metadata": metadata, "messages": talk},
        "/v1/completions": {"prompt": MARK, "suffix": MARK, "user": "Ann", "metadata": metadata},
        "/v1/messages/count_tokens": {"messages": talk, "metadata": metadata},
        "/v1/embeddings": {"input": MARK, "user": "Ann", "metadata": metadata},
    }
    if "key" in about:
        bodies["/v1/feedback"] = {"completion_id": "none", "comment": MARK}
    if "user" not in about:
        bodies["/v1/sessions/chat of Ann/end"] = {"comment": MARK}
    own, boss = {"authorization": f"Bearer {hers}"}, {"authorization": f"Bearer {admin}"}
    settings: dict[str, Any] = {"keys_file": file.path, "request_log": {"path": tmp_path / "requests.jsonl"}}
    async with gateway_before(
        str(rig.client.base_url), tmp_path, upstream={"base_url": upstream.url}, **settings
    ) as http:
        for path, body in bodies.items():
            await http.post(path, json=body, headers=own)
        done = (await http.post("/admin/data/delete", params=about, headers=boss)).json()
        assert done["gateway"]["request_log_lines"] == len(bodies)
    assert traces(tmp_path, MARK.encode()) == set()


async def test_a_gateway_before_an_upstream_alone_deletes_what_it_keeps(upstream: Upstream, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (her, hers), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "boss"))
    own, boss = {"authorization": f"Bearer {hers}"}, {"authorization": f"Bearer {admin}"}
    settings = {
        "swarm_url": None,
        "upstream": {"base_url": upstream.url},
        "keys_file": file.path,
        "request_log": {"path": tmp_path / "requests.jsonl"},
    }
    async with serving(create_app(GatewayConfig.model_validate(settings))) as http:
        asked = await http.post(CHAT, json={"model": "m", "messages": [{"role": "user", "content": MARK}]}, headers=own)
        assert asked.status_code == 200, asked.text
        report = await http.get("/admin/data/report", params={"key": her.id}, headers=boss)
        assert DataReport.model_validate(report.json()) == DataReport()
        assert (await http.post("/admin/data/delete", headers=boss)).status_code == 400, "nobody is named"
        done = (await http.post("/admin/data/delete", params={"key": her.id}, headers=boss)).json()
        assert (done["deleted"], done["gateway"]["request_log_lines"]) == (True, 1)
    assert traces(tmp_path, MARK.encode()) == set()


async def test_a_deletion_at_a_disk_that_hangs_ends_with_what_to_do(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.admin.ERASE_SECONDS", 0.05)
    monkeypatch.setattr(RequestLog, "start", lambda log: None)
    monkeypatch.setattr(RequestLog, "close", lambda log: None)
    settings = {
        "swarm_url": None,
        "upstream": {"base_url": upstream.url},
        "request_log": {"path": tmp_path / "requests.jsonl"},
    }
    async with serving(create_app(GatewayConfig.model_validate(settings))) as http:
        refused = await http.post("/admin/data/delete", params={"session": "s"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk")
    assert refused.json()["error"]["message"].endswith("within 0.05 s: delete it again")


@pytest.mark.parametrize("about", [{"user": user_digest("Ann")}, {"request_id": "hers"}])
async def test_a_conversation_leaves_the_memory_whatever_names_its_turns(
    rig: server.Rig, tmp_path: Path, about: dict[str, str]
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (_, hers), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "boss"))
    rig.vllm.default = lambda sent: told([HERS], [HERS])(sent) if "prompt" in sent else plain([HERS])(sent)
    own, boss = {"authorization": f"Bearer {hers}"}, {"authorization": f"Bearer {admin}"}
    async with gateway_before(str(rig.client.base_url), tmp_path, keys_file=file.path) as http:
        for name, user in (("hers", "Ann"), ("his", "Bob")):
            body = {"model": "tiny", "user": user, "messages": [{"role": "user", "content": f"{MARK} {user}"}]}
            named = {"x-swarm-session": f"chat of {user}", "x-request-id": name}
            assert (await http.post(CHAT, json=body, headers=own | named)).status_code == 200
        done = (await http.post("/admin/data/delete", params=about, headers=boss)).json()
        assert done["gateway"]["sessions"] == 1
        left = (await http.get("/status", headers=boss)).json()["sessions"]
        assert left["open"] == 1


async def dies_of(rig: server.Rig, asking: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The answer to a request that kills each engine, which then starts again."""
    task = asyncio.create_task(asking)
    while not task.done():
        dead = asyncio.create_task(rig.vllm.dead.wait())
        await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if rig.vllm.dead.is_set():
            await rig.eventually(lambda: task.done() or not rig.app.state.data_plane.replicas.rows()[0].healthy)
            await restarted(rig)
    return await task


async def test_the_record_of_a_request_that_killed_the_engine_holds_nothing_of_anybody_and_stays(
    rig: server.Rig, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (her, hers), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "boss"))
    boss = {"authorization": f"Bearer {admin}"}

    async def ask(http: Http) -> httpx.Response:
        body = {"model": "tiny", "user": "Ann", "messages": [{"role": "user", "content": f"{POISON} {MARK}"}]}
        headers = {"authorization": f"Bearer {hers}", "x-swarm-session": "chat of Ann"}
        return await dies_of(rig, http.post(CHAT, json=body, headers=headers))

    async with gateway_before(str(rig.client.base_url), tmp_path, keys_file=file.path) as http:
        assert (await ask(http)).status_code == 500
        assert len(list((tmp_path / "refused").iterdir())) == 1
        for mark in (MARK, "Ann", user_digest("Ann"), her.id):
            assert traces(tmp_path / "refused", mark.encode()) == set(), mark
        done = (await http.post("/admin/data/delete", params={"key": her.id}, headers=boss)).json()
        assert done["deleted"] and traces(tmp_path, MARK.encode()) == set()
        again = await ask(http)
        assert again.status_code == 500 and len(list((tmp_path / "refused").iterdir())) == 1, "the engine is spared"


async def test_a_request_under_way_leaves_nothing_after_a_deletion(rig: server.Rig, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (her, hers), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "boss"))
    sampling, go_on = asyncio.Event(), asyncio.Event()

    async def held() -> None:
        sampling.set()
        await go_on.wait()

    rig.vllm.default = streamed(role_chunk(), held, token_chunk([HERS], "stop"), usage_chunk(1))
    log = {"path": tmp_path / "requests.jsonl"}
    own, boss = {"authorization": f"Bearer {hers}"}, {"authorization": f"Bearer {admin}"}
    async with (
        gateway_before(str(rig.client.base_url), tmp_path, keys_file=file.path, request_log=log) as http,
        asyncio.timeout(60),
    ):
        body = {"model": "tiny", "stream": True, "input": MARK}
        asking = asyncio.create_task(
            http.post("/v1/responses", json=body, headers=own | {"x-swarm-policy": "first", "x-request-id": "late"})
        )
        await sampling.wait()
        done = await http.post("/admin/data/delete", params={"key": her.id}, headers=boss)
        assert done.status_code == 200, done.text
        go_on.set()
        answer = await asking
        assert f"t{HERS}" in answer.text
        [kept] = {part.split('"')[0] for part in answer.text.split('"id":"') if part.startswith("resp_")}
        assert (await http.get(f"/v1/responses/{kept}", headers=own)).status_code == 404
    assert "late" not in (tmp_path / "requests.jsonl").read_text() and traces(tmp_path, MARK.encode()) == set()


async def test_nothing_is_deleted_at_the_gateway_unless_the_swarm_server_tells_the_requests(
    rig: server.Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    (her, hers), (_, admin) = (file.create(name, admin=name == "boss") for name in ("she", "boss"))
    _, limited = file.create("limited", admin=True, routes=["default"])

    async def busy(_: Subject) -> DataReport:
        raise UnavailableError("the journal is busy")

    log = {"path": tmp_path / "requests.jsonl"}
    async with gateway_before(str(rig.client.base_url), tmp_path, keys_file=file.path, request_log=log) as http:
        rig.vllm.default = lambda sent: told([1], [2])(sent) if "prompt" in sent else plain([1])(sent)
        body = {"model": "tiny", "messages": [{"role": "user", "content": MARK}]}
        assert (await http.post(CHAT, json=body, headers={"authorization": f"Bearer {hers}"})).status_code == 200
        monkeypatch.setattr(rig.controller.run.journal, "report", busy)
        for key, status, word in ((admin, 503, "the journal is busy"), (limited, 403, "limited to some routes")):
            refused = await http.post(
                "/admin/data/delete", params={"key": her.id}, headers={"authorization": f"Bearer {key}"}
            )
            assert refused.status_code == status and word in refused.text, refused.text
    assert "requests.jsonl" in traces(tmp_path, MARK.encode()) and tombstones(tmp_path) == []


async def test_who_reads_groups_is_in_the_audit_log_once_a_minute(rig: server.Rig, tmp_path: Path) -> None:
    for group in ("", "", "abc"):
        assert (await rig.client.get("/judged_groups", params={"group": group})).status_code == 200
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    reads = [(entry["what"], entry["details"]["group"]) for entry in entries]
    assert reads == [("groups read", ""), ("groups read", "abc")]


async def test_what_was_begun_before_a_deletion_and_ends_after_it_is_not_kept(rig: server.Rig, tmp_path: Path) -> None:
    episode = await rig.claim()
    later = {"notes": {"key": "hers", "reason": MARK}, "reward": 1.0}
    rig.vllm.default = plain([HERS])
    assert (await episode.chat()).status_code == 200
    deleted = await rig.client.post("/data/delete", params={"key": "hers"})
    assert deleted.status_code == 200, deleted.text
    body = {"client_uuid": "me", "episode_uuid": episode.uuid, "task_id": "t", "workflow_output": later}
    ended = await rig.client.post("/end_episode", json=body)
    assert "its data was deleted" in ended.text
    again = await rig.client.post("/end_episode", json=body)
    assert (again.status_code, again.text) == (200, ended.text), "the reply may have been lost"
    assert traces(tmp_path, MARK.encode()) == set() and rig.controller.pool.information().completed_episodes == 0


async def test_a_clock_that_was_set_back_hides_nothing(
    rig: server.Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, running = await rig.claim(), await rig.claim()
    rig.vllm.default = plain([HERS])
    output = {"notes": {"key": "hers", "reason": MARK}, "reward": 1.0}
    for episode in (over, running):
        assert (await episode.chat()).status_code == 200
    body = {"client_uuid": "me", "task_id": "t", "workflow_output": output}
    await rig.post("/end_episode", **body, episode_uuid=over.uuid)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    about = {"key": "hers"}
    assert (await rig.client.get("/data/report", params=about)).json()["episodes"] == {"waiting": 1}
    assert MARK in json.loads((await rig.client.get("/data/export", params=about)).text)["output"]["notes"]["reason"]
    assert (await rig.client.post("/data/delete", params=about)).json()["episodes"] == {"waiting": 1}
    ended = await rig.client.post("/end_episode", json=body | {"episode_uuid": running.uuid})
    assert "its data was deleted" in ended.text
    assert traces(tmp_path, MARK.encode()) == set() and rig.controller.pool.information().completed_episodes == 0


async def test_a_batch_that_is_taken_while_it_is_looked_for_is_in_the_tombstone(
    rig: server.Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await rig.claim()
    rig.vllm.default = plain([HERS])
    assert (await episode.chat()).status_code == 200
    output = {"notes": {"key": "hers"}, "reward": 1.0}
    body = {"client_uuid": "me", "episode_uuid": episode.uuid, "task_id": "t", "workflow_output": output}
    await rig.client.post("/end_episode", json=body)
    journal = rig.controller.run.journal
    look = journal.matches

    async def matches(subject: Subject, until: float) -> list[Match]:
        found = await look(subject, until)
        if until < math.inf:
            journal.append(StateRow([match.uuid for match in found], EpisodeState.BATCHED, "taken meanwhile"))
        return found

    monkeypatch.setattr(journal, "matches", matches)
    assert (await rig.client.post("/data/delete", params={"key": "hers"})).json()["episodes"] == {"waiting": 1}
    (stone,) = tombstones(tmp_path)
    assert (stone.episodes, stone.batches) == (1, ["taken meanwhile"])


async def test_what_ends_while_the_journal_is_read_for_a_deletion_is_trained_no_more(
    rig: server.Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = rig.controller.run.journal
    rig.vllm.default = plain([HERS])
    look = journal.matches

    async def end(episode: server.Claimed) -> None:
        output = {"notes": {"key": "hers"}, "reward": 1.0}
        await rig.post("/end_episode", client_uuid="me", episode_uuid=episode.uuid, task_id="t", workflow_output=output)

    async def matches(subject: Subject, until: float) -> list[Match]:
        monkeypatch.setattr(journal, "matches", look)
        # claimed after the deletion began, and before the latest that is over
        slow, quick = await rig.claim(), await rig.claim()
        for episode in (slow, quick):
            assert (await episode.chat()).status_code == 200
        await end(quick)
        found = await look(subject, until)
        await end(slow)
        return found

    monkeypatch.setattr(journal, "matches", matches)
    assert (await rig.client.post("/data/delete", params={"key": "hers"})).json()["episodes"] == {"waiting": 2}
    assert rig.controller.pool.information().tasks == {}, "a batch of it would have no rows, and no server start"


async def test_an_export_that_was_sent_is_named_in_a_report(rig: server.Rig) -> None:
    episode = await rig.claim()
    rig.vllm.default = plain([HERS])
    assert (await episode.chat()).status_code == 200
    body = {"client_uuid": "me", "episode_uuid": episode.uuid, "task_id": "t"}
    await rig.post("/end_episode", **body, workflow_output={"notes": {"key": "hers"}, "reward": 1.0})
    assert (await rig.client.get("/data/export", params={"key": "hers"})).status_code == 200
    (sent,) = (await rig.client.get("/data/report", params={"key": "hers"})).json()["exports"]
    assert "data export" in sent


async def test_a_subject_has_to_be_named(rig: server.Rig) -> None:
    assert (await rig.client.get("/data/report")).status_code == 400
    assert (await rig.client.post("/data/delete")).status_code == 400
