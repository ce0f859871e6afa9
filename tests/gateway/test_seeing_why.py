"""From a hook's reasons to a file: a gateway, the real swarm server, its journal, and the export of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli.swarm import status_lines
from gateway.observability import tracing
from swarm.server.journal.export import ExportState, export
from swarm.status import ServerStatus
from swarm.types import StepResult
from tests.gateway.conftest import ask, gateway_before, write_hooks
from tests.standins.vllm import plain_choice, several
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig
TRACES = ["0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"]
HEAD = "from reward_hooks import Reward\ndef on_compute_relative_reward(task, candidates, context):\n    "
BY_LENGTH = HEAD + (
    "return [Reward(value=len(one.text), components={'length': len(one.text)}, reason=f'{one.text!r} has its length')"
    " for one in candidates]"
)


async def answered(
    rig: server.Rig, tmp_path: Path, reward: str, asked: dict[str, Any] | None = None, **settings: Any
) -> tuple[str, httpx.Response]:
    """One request that is answered and settled; with the name of its hook."""
    async with gateway_before(str(rig.client.base_url), tmp_path, reward, **settings) as http:
        response = await ask(http, **(asked or {}))
        async with asyncio.timeout(60):
            while rig.controller.pool.information().running_episodes:
                await rig.client.get("/health")
        await rig.controller.episodes.synced()
    return str(tmp_path / "hooks"), response


async def exported(tmp_path: Path, state: ExportState) -> list[dict[str, Any]]:
    """The rows of both files, which say the same."""

    def write() -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        for name in ("x.jsonl", "x.parquet"):
            export(tmp_path / "journal.db", tmp_path / name, state)
        rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
        table = pq.read_table(tmp_path / "x.parquet").to_pylist()
        for name in ("group_id", "hook", "rank", "reason", "drop_reason", "reward"):
            assert [row[name] for row in rows] == [row[name] for row in table]
        assert [row["components"] for row in rows] == [dict(row["components"]) for row in table]
        return rows

    return await asyncio.to_thread(write)


async def test_a_groups_rewards_components_reasons_and_order_are_exported(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.script.append(several(plain_choice([1]), plain_choice([1, 2, 3], index=1)))
    hook, response = await answered(rig, tmp_path, BY_LENGTH)
    rows = await exported(tmp_path, "waiting")
    assert [(row["reward"], row["rank"], row["components"]) for row in rows] == [
        (2.0, 2, {"length": 2.0}),
        (8.0, 1, {"length": 8.0}),
    ]
    assert [row["reason"] for row in rows] == ["'t1' has its length", "'t1 t2 t3' has its length"]
    for row in rows:
        assert row["hook"] == hook
        assert f"chatcmpl-{row['group_id']}" == response.json()["id"]
    assert len({row["group_uuid"] for row in rows}) == 1


FAILURES = {
    "timeout": ("import threading\nSTOP = threading.Event()\n" + HEAD + "STOP.wait(20)", "hook_timeout", "took longer"),
    "wrong count": (HEAD + "return [1.0] * 3", "hook_result", "returned 3 rewards for 2 candidates"),
    "raises": (HEAD + "raise ValueError('broken')", "hook_raised", "ValueError: broken"),
}


@pytest.mark.parametrize(("reward", "code", "words"), FAILURES.values(), ids=FAILURES)
async def test_why_a_hook_gave_no_rewards_is_exported_and_counted(
    rig: server.Rig, tmp_path: Path, reward: str, code: str, words: str
) -> None:
    seconds = 0.2 if code == "hook_timeout" else 20.0
    hook, response = await answered(rig, tmp_path, reward, hook_timeout_seconds=seconds)
    assert response.status_code == 200
    rows = await exported(tmp_path, "dropped")
    assert len(rows) == 2
    for row in rows:
        assert row["drop_reason"].startswith(f"reward_hook_failed: {code}: {hook}: ")
        assert words in row["drop_reason"]
        assert (row["hook"], row["how"], row["reward"], row["rank"]) == (hook, "aborted", None, None)
        assert f"chatcmpl-{row['group_id']}" == response.json()["id"]
    status = ServerStatus.model_validate((await rig.client.get("/status")).json())
    assert status.dropped == {f"reward_hook_failed: {code}": 2}
    assert any(line.split() == ["2", "reward_hook_failed:", code] for line in status_lines(status))


KEEPING = (
    "import json\nfrom pathlib import Path\n"
    "def on_compute_relative_reward(task, candidates, context):\n"
    "    seen = [one.model_dump(mode='json') for one in candidates]\n"
    "    Path(__file__).with_name('seen.json').write_text(json.dumps(seen))\n"
    "    return [float(one.index) for one in candidates]"
)


async def test_a_hook_sees_all_that_is_known_of_an_answer(rig: server.Rig, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    choices = [plain_choice([1, 2]), plain_choice([1, 2, 3], index=1, message=calling, finish_reason="tool_calls")]
    rig.vllm.script.append(several(*choices))
    hook, response = await answered(rig, tmp_path, KEEPING, asked={"logprobs": True, "seed": 7})
    assert response.status_code == 200
    first, second = json.loads((Path(hook) / "seen.json").read_text())
    assert (first["text"], first["tool_calls"], first["finish_reason"]) == ("t1 t2", [], "stop")
    assert (second["text"], second["tool_calls"], second["finish_reason"]) == ("", [call], "tool_calls")
    assert second["message"]["tool_calls"] == [call]
    assert [len(one["logprobs"]["content"]) for one in (first, second)] == [2, 3]
    assert [one["completion_tokens"] for one in (first, second)] == [2, 3]
    assert all(one["prompt_tokens"] > 0 and one["latency_seconds"] > 0 for one in (first, second))
    assert all(one["request"]["seed"] == 7 for one in (first, second))
    assert all(one["policy_version"] == rig.controller.engine.policy_version for one in (first, second))
    assert first["session"] is None, "nobody named a session, and nobody went on"


async def test_a_submit_hook_that_fails_says_why_too(rig: server.Rig, tmp_path: Path) -> None:
    folder = write_hooks(tmp_path / "hooks", BY_LENGTH)
    (folder / "on_user_submit_new_requests.py").write_text(
        "def on_user_submit_new_requests(request, context):\n    return [request.body]\n"
    )
    await answered(rig, tmp_path, BY_LENGTH)
    rows = await exported(tmp_path, "dropped")
    assert rows
    assert all(row["drop_reason"].startswith("submit_hook_failed: hook_result: ") for row in rows)
    assert all("returned 1 requests; return 2" in row["drop_reason"] for row in rows)


@pytest.mark.parametrize("traced", [False, True])
async def test_the_step_that_trained_on_a_request_is_found_by_its_trace(
    rig: server.Rig, tmp_path: Path, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr(tracing, "make_exporter", lambda config: InMemorySpanExporter())
    settings = {"tracing": {}} if traced else {}
    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        asked: list[str] = []
        for trace in TRACES:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            response = await ask(http, headers)
            assert response.headers["x-swarm-trained"] == "true"
            asked.append(response.headers["x-request-id"])
    batch = await rig.controller.next_batch()
    rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=3.0))
    await rig.controller.episodes.synced()

    await asyncio.to_thread(export, tmp_path / "journal.db", tmp_path / "x.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(row["trace_id"], row["request_id"], row["step"]) for row in rows] == [
        (trace, request_id, 1) for trace, request_id in zip(TRACES, asked, strict=True) for _ in range(2)
    ]
