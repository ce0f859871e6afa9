"""The request log: whole exchanges, in files of a bounded size that nobody else may read."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig, LogRetention, RequestLogConfig
from gateway.observability.request import Metrics, RequestRecord
from gateway.observability.request_log import RequestLog
from swarm.errors import ConfigError
from swarm.subjects import Subject
from tests.gateway.conftest import OpenGateway

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "what users say"}]}


def exchange(asked: bytes, answer: bytes = b"{}") -> RequestRecord:
    record = RequestRecord("req_1", Metrics(), method="POST", path=CHAT, keep=10_000)
    record.received({"type": "http.request", "body": asked})
    record.sent({"type": "http.response.start", "status": 200, "headers": []})
    record.sent({"type": "http.response.body", "body": answer})
    record.end(whole=True)
    return record


def write(config: RequestLogConfig, *exchanges: RequestRecord) -> RequestLog:
    log = RequestLog(config)
    log.start()
    for one in exchanges:
        log.request_over(one)
    log.close()
    return log


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_and_its_answer_are_a_line(open_gateway: OpenGateway, tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    async with open_gateway(request_log={"path": path}) as http:
        answer = await http.post(CHAT, json={**BODY, "stream": stream})
        await http.get("/status")
    (line,) = lines(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert line["request"] == {**BODY, "stream": stream}
    assert line["answer"] == (answer.text if stream else answer.json())
    assert line["request_id"] == answer.headers["x-request-id"]
    told = {name: line[name] for name in ("route", "policy", "method", "path", "status", "outcome", "error")}
    assert told == {
        "route": "default",
        "policy": "best",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "outcome": "ok",
        "error": "",
    }


@pytest.mark.anyio
async def test_what_goes_on_behind_an_answer_keeps_no_texts_for_the_log(
    open_gateway: OpenGateway, tmp_path: Path
) -> None:
    """A session that is open keeps the record of its last request until it idles: there may be 10,000."""
    async with open_gateway(request_log={"path": tmp_path / "log"}) as http:
        await http.post(CHAT, json=BODY)
        assert (await http.get("/status")).json()["sessions"]["open"] == 1
        kept = [one for one in gc.get_objects() if type(one) is RequestRecord and one.path == CHAT]
        assert kept and not any(one.request or one.response for one in kept)


@pytest.mark.parametrize(
    ("files", "kept"), [(3, {"log": [4], "log.1": [3], "log.2": [2]}), (1, {"log": [4]})], ids=["three", "one"]
)
def test_files_rotate_and_the_oldest_is_deleted(tmp_path: Path, files: int, kept: dict[str, list[int]]) -> None:
    exchanges = [exchange(json.dumps({"number": number, "said": "x" * 600}).encode()) for number in range(5)]
    write(RequestLogConfig(path=tmp_path / "log", max_bytes=1024, files=files), *exchanges)
    found = {one.name: [line["request"]["number"] for line in lines(one)] for one in tmp_path.iterdir()}
    assert found == kept
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in tmp_path.iterdir())


def test_files_beyond_a_smaller_number_of_them_leave_at_the_start(tmp_path: Path) -> None:
    exchanges = [exchange(json.dumps({"number": number, "said": "x" * 600}).encode()) for number in range(5)]
    write(RequestLogConfig(path=tmp_path / "log", max_bytes=1024, files=5), *exchanges)
    (tmp_path / "log.old").write_text("somebody's own")
    write(RequestLogConfig(path=tmp_path / "log", max_bytes=1024, files=2))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.1", "log.old"]


def test_what_others_could_read_they_cannot_any_more(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch(0o644)
    write(RequestLogConfig(path=path), exchange(b"{}"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(lines(path)) == 1


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    config = RequestLogConfig(path=tmp_path / "log", max_text_bytes=1024)
    record = RequestRecord("req_1", Metrics(), keep=config.max_text_bytes)
    for _ in range(10):
        record.received({"type": "http.request", "body": b"word " * 100})
    record.end(whole=False)
    write(config, record)
    (line,) = lines(config.path)
    assert line["request"].startswith("word word") and 1000 < len(line["request"]) <= 1024
    assert (line["status"], line["outcome"], line["answer"]) == (0, "failed", None)


def test_a_disk_that_fails_costs_lines_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.mkdir()
    with caplog.at_level(logging.ERROR):
        log = write(RequestLogConfig(path=path), exchange(b"{}"), exchange(b"{}"))
    assert log.lost == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"the request log {path} cannot be written: Is a directory"
    ]


def test_what_the_disk_cannot_take_in_time_is_lost_and_counted(tmp_path: Path) -> None:
    log = RequestLog(RequestLogConfig(path=tmp_path / "log"))
    for _ in range(1001):
        log.request_over(exchange(b"{}"))
    assert log.lost == 1
    log.start()
    log.close()
    assert len(lines(tmp_path / "log")) == 1000


@pytest.mark.parametrize("place", ["folder", "file/log"])
def test_a_file_that_cannot_be_is_an_error_of_the_configuration(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    given = {"swarm_url": None, "upstream": {"base_url": "http://127.0.0.1:9/v1"}}
    config = GatewayConfig.model_validate({**given, "request_log": {"path": tmp_path / place}})
    with pytest.raises(ConfigError, match=r"request_log: .*; name a file in"):
        create_app(config)
    assert not os.listdir(tmp_path / "folder")


@pytest.mark.anyio
async def test_lines_that_are_too_old_are_taken_out_of_all_files_and_of_a_subject_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    old = {"time": "2020-01-01T00:00:00.000+00:00", "request": "long ago", "request_id": "old"}
    names = [path, path.with_name("requests.jsonl.1")]
    for name in names:
        name.write_text(json.dumps(old) + "\n" + '{"cut')
    log = RequestLog(RequestLogConfig(path=path, keep_seconds=3600))
    log.start()
    log.request_over(exchange(b'"now"'))
    assert await log.erase(lambda notes: notes.request_id == "req_1") == 1
    log.close()
    assert [name.read_text() for name in names] == [""] * 2


@pytest.mark.anyio
async def test_what_a_clock_that_was_ahead_dates_is_kept_no_longer(tmp_path: Path) -> None:
    path, now = tmp_path / "requests.jsonl", datetime.now(UTC)
    older = [(1, now + timedelta(days=900)), (2, now - timedelta(days=3)), (3, now + timedelta(days=900))]
    for name, written in (
        (path, [(4, now - timedelta(days=2)), (5, now + timedelta(days=900)), (6, now - timedelta(hours=1))]),
        (path.with_name("requests.jsonl.1"), older),
    ):
        found = [{"number": number, "time": time.isoformat(timespec="milliseconds")} for number, time in written]
        name.write_text("".join(json.dumps(line) + "\n" for line in found))
    log = RequestLog(RequestLogConfig(path=path, keep_seconds=86400))
    log.start()
    # it comes after the look for what is too old
    assert await log.erase(lambda notes: False) == 0
    log.close()
    # 5 may have come within the day, and 1 and 3 came before what is too old
    assert [line["number"] for line in lines(path)] == [5, 6]
    assert path.with_name("requests.jsonl.1").read_text() == ""


@pytest.mark.anyio
async def test_a_file_whose_first_line_is_young_is_not_read_each_minute(tmp_path: Path) -> None:
    path, now = tmp_path / "requests.jsonl", datetime.now(UTC)
    times = {"requests.jsonl": 1, "requests.jsonl.1": 2, "requests.jsonl.2": 30}
    for name, hours in times.items():
        written = (now - timedelta(hours=hours)).isoformat(timespec="milliseconds")
        # a line that a kill cut off goes from each file that is read
        (tmp_path / name).write_text(json.dumps({"time": written}) + '\n{"cut')
    log = RequestLog(RequestLogConfig(path=path, keep_seconds=86400))
    log.start()
    # it comes after the look for what is too old, and reads them all
    assert await log.erase(lambda notes: False) == 2
    log.close()
    assert [len((tmp_path / name).read_text().splitlines()) for name in times] == [1, 1, 0]


@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_lines_that_are_kept_for_ever_are_written(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "requests.jsonl"
    write(RequestLogConfig(path=path, keep_seconds=seconds), exchange(b'"now"'))
    assert len(lines(path)) == 1


def test_lines_that_should_go_and_cannot_are_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "requests.jsonl"
    path.with_name("requests.jsonl.1").mkdir()
    write(RequestLogConfig(path=path, keep_seconds=3600), exchange(b'"now"'))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"lines that are to be deleted stay in {path}") and len(lines(path)) == 1


@pytest.mark.anyio
async def test_a_deletion_that_nobody_waits_for_any_more_costs_no_lines(tmp_path: Path) -> None:
    log = RequestLog(RequestLogConfig(path=tmp_path / "log"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await log.erase(lambda notes: True)
    log.start()
    log.request_over(exchange(b"{}"))
    log.close()
    assert len(lines(tmp_path / "log")) == 1


@pytest.mark.anyio
async def test_lines_of_one_route_are_taken_out_earlier(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    old = {"time": "2020-01-01T00:00:00.000+00:00"}
    path.write_text("".join(json.dumps(old | {"route": route}) + "\n" for route in ("support", "billing")))
    log = RequestLog(RequestLogConfig(path=path, keep_routes={"billing": LogRetention(keep_seconds=3600)}))
    log.start()
    # it comes after the look for what is too old
    assert await log.erase(lambda notes: False) == 0
    log.close()
    assert [line["route"] for line in lines(path)] == ["support"]


@pytest.mark.anyio
async def test_of_one_route_the_oldest_lines_beyond_its_bytes_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for name, numbers in ((path, (3, 4)), (path.with_name("requests.jsonl.1"), (1, 2))):
        of_each = [{"route": route, "number": number} for number in numbers for route in ("support", "billing")]
        name.write_text("".join(json.dumps(line) + "\n" for line in of_each))
    size = len(json.dumps({"route": "billing", "number": 1})) + 1
    log = RequestLog(RequestLogConfig(path=path, keep_routes={"billing": LogRetention(keep_bytes=3 * size)}))
    log.start()
    assert await log.erase(lambda notes: False) == 0
    log.close()
    left = [*lines(path.with_name("requests.jsonl.1")), *lines(path)]
    assert [line["number"] for line in left if line["route"] == "billing"] == [2, 3, 4]
    assert [line["number"] for line in left if line["route"] == "support"] == [1, 2, 3, 4]


@pytest.mark.anyio
@pytest.mark.parametrize("kept", [True, False])
async def test_a_line_names_its_session_unless_it_may_not_be_kept(
    open_gateway: OpenGateway, tmp_path: Path, kept: bool
) -> None:
    path = tmp_path / "requests.jsonl"
    headers = {"x-swarm-session": "chat-17", **({} if kept else {"x-swarm-train": "false"})}
    async with open_gateway(request_log={"path": path}) as http:
        await http.post(CHAT, json=BODY, headers=headers)
    (line,) = lines(path)
    assert line["session"] == ("chat-17" if kept else "")


@pytest.mark.anyio
async def test_lines_of_a_session_are_found_by_its_name(tmp_path: Path) -> None:
    log = RequestLog(RequestLogConfig(path=tmp_path / "log"))
    log.start()
    for name in ("hers", "his"):
        record = exchange(b"{}")
        record.session = name
        log.request_over(record)
    assert await log.erase(Subject(session="hers").fits) == 1
    log.close()
    assert [line["session"] for line in lines(tmp_path / "log")] == ["his"]


def test_what_a_killed_deletion_left_is_removed_at_the_start(tmp_path: Path) -> None:
    for name in ("log", "log.1"):
        (tmp_path / f".{name}.partial").write_text("what users said")
    write(RequestLogConfig(path=tmp_path / "log"))
    assert list(tmp_path.iterdir()) == []
