"""``policies`` at the swarm server and through a gateway: who moved what, with which reason, is in the audit log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.root import app
from gateway.keys.store import KeyFile
from swarm.checkpoints import held_steps
from swarm.evidence.alarms import Alarm
from swarm.job import TrainJob
from swarm.protocol import FollowedRoute
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from tests.gateway.conftest import gateway_before
from tests.gateway.resilience.rig import until
from tests.standins import engine
from tests.standins.upstream import Upstream
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio


async def command(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["policies", *arguments])


async def test_a_person_moves_a_stage(tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARM_TOKEN", "SWARM_GATEWAY_KEY"):
        monkeypatch.delenv(name, raising=False)
    config = ServerConfig(run_dir=tmp_path / "run", token="secret")
    server = create_app(config, engine_command=engine.command("train"))
    _, key = KeyFile(tmp_path / "keys.json").create("ann", admin=True)
    settings: dict[str, Any] = {
        "serve": {"incumbent": {"upstream": {"base_url": upstream.url, "model": "gpt"}}},
        "swarm_token": "secret",
        "keys_file": tmp_path / "keys.json",
    }
    async with listening(server) as url:
        swarm = ("--swarm-url", url, "--token", "secret")
        assert "no route has an incumbent here" in (await command("list", *swarm)).stdout
        server.state.controller.sync_job(TrainJob(model="tiny", batch_size=2, num_repeat=2))
        stages = server.state.controller.pool.stages
        async with gateway_before(url, tmp_path, **settings) as http, asyncio.timeout(30):
            through = ("--gateway-url", str(http.base_url), "--api-key", key)
            assert await stages.changed.until(lambda: bool(stages.pointers), 20)
            nobody = await command("promote", *through, "--reason", "read 50", "--share", "1")
            assert "default has no challenger yet" in str(nobody.exception)
            lines = (await command("explain", "default", *through)).stdout.splitlines()
            assert lines[0].startswith("route default: no version yet against gpt at 127.0.0.1:")
            stages.serves(3)
            version = str(stages.find("", "").version)
            up = await command("promote", *through, "--reason", "read 50", "--version", version, "--json")
            assert up.exit_code == 0, (up.output, up.exception)
            assert json.loads(up.stdout)["stage"]["why"] == "read 50"
            # as somebody who heard no answer does
            again = await command("promote", *through, "--reason", "read 50", "--version", version, "--json")
            assert again.exit_code == 0, (again.output, again.exception)
            assert json.loads(again.stdout) == json.loads(up.stdout)
            late = await command("promote", *swarm, "--reason", "me too", "--version", version)
            assert "has moved since" in str(late.exception)
            assert "(pinned)" in (await command("pin", *swarm, "-r", "demo")).stdout
            await command("promote", *swarm, "--reason", "good", "--share", "0.5")
            held = {3: "promoted on default, pinned on default"}
            await until(lambda: held_steps(tmp_path / "run" / "checkpoints") == held, 20, "held")
            down = await command("rollback", *swarm, "--reason", "users\x1b]0;owned\x07 complain")
            assert "shadow (rolled back)" in down.stdout and " complain" in down.stdout
            for told in (down, await command("explain", *swarm)):
                assert "\x1b" not in told.stdout and "]0;owned" in told.stdout
            first = await command("rollback", *through, "--recall", "--reason", "it too")
            assert "is the incumbent of the gateway's file" in str(first.exception)
            stages.follow([FollowedRoute(route="other", incumbent="tiny, version 3", incumbent_version=3)])
            recalled = await command("rollback", *through, "--recall", "-r", "it too", "other")
            assert "other: version 3 against tiny, version 3 | shadow, the incumbent is recalled" in recalled.stdout
            assert "no alarm is raised" in (await command("resume", *through, "--reason", "mended")).stdout
            # as training steps would have it
            admin = {"authorization": f"Bearer {key}"}
            alarm = Alarm(kind="signal", text="nothing was learned", since=2, action="pause", pauses=True)
            server.state.controller.pool.watch.alarms = [alarm]
            assert (await command("list", *through)).stdout.splitlines()[2:] == [f"alarm: {alarm.sentence}"]
            while not (swarms := (await http.get("/status", headers=admin)).json()["swarms"])[0]["alarms"]:
                pass
            assert swarms[0]["alarms"] == [alarm.model_dump()]
            goes_on = (await command("resume", *swarm, "--reason", "mended")).stdout
            assert goes_on == "alarm: signal, since step 2: nothing was learned\n"
    log = [json.loads(line) for line in (tmp_path / "run/audit.jsonl").read_text().splitlines()]
    whats = [(entry["what"].removeprefix("policies "), entry["result"].partition(":")[0]) for entry in log]
    moves = [("promote", "refused"), ("promote", "done"), ("promote", "done"), ("promote", "refused"), ("pin", "done")]
    moves += [("promote", "done"), ("rollback", "done"), ("rollback", "refused"), ("rollback", "done")]
    assert whats == [*moves, ("resume", "done"), ("resume", "done")]
    assert log[-1]["details"] == {"reason": "mended", "alarms": [alarm.sentence]}
    assert log[1]["details"]["reason"] == "read 50" and log[1]["details"]["stage"] == "canary 0.05"
    assert log[1]["details"]["version"] == int(version)
    # whoever repeats it moves it no further, also where no version was said
    assert log[5]["details"]["share"] == 0.5 and log[5]["details"]["version"] > int(version)
    assert log[1]["sender"].startswith("gateway key ann for ")
