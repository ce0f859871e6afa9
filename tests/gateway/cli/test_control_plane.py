"""``code``, ``config`` and ``swarm engine`` from a checkout to an engine, at the swarm server and through a gateway.

The swarm server and the gateway are real; the engine is a stand-in that imports nothing but the synced code.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.root import app
from gateway.keys.store import KeyFile
from swarm.credentials import TokenFile
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.states import EngineState
from tests.gateway.conftest import gateway_before
from tests.standins import engine
from tests.standins.vllm import listening
from tests.swarm.code_snapshots.making import git, tracked

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROOT = Path(__file__).parents[3]


@dataclass
class Laptop:
    """A checkout, and the servers that its commands go to."""

    folder: Path
    target: tuple[str, ...]
    run_dir: Path
    server: Any

    async def command(self, *arguments: str, code: int = 0) -> Any:
        """What a command prints as JSON, or its error."""
        options = (*arguments, *self.target, "--json")
        done = await asyncio.to_thread(CliRunner().invoke, app, options, catch_exceptions=True)
        if code == 2:
            assert done.exception is not None, done.output
            return str(done.exception)
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout.splitlines()[-1])

    def write(self, text: str) -> None:
        (self.folder / "mine/__init__.py").write_text(text)

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "audit.jsonl").read_text().splitlines()]


@pytest.fixture(params=["swarm", "gateway"])
async def laptop(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Laptop]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("SWARM_TOKEN", "SWARM_GATEWAY_KEY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "checkout"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine/__init__.py").write_text("WEIGHT = 1\n")
    (folder / ".gitignore").write_text("*.key\n")
    tracked(folder)
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "mine/secret.key").write_text("")
    (folder / "job.yaml").write_text(yaml.safe_dump({"model": "tiny", "batch_size": 2, "num_repeat": 2}))
    (tmp_path / "defaults.yaml").write_text("lr: 0.5\nbatch_size: 7\n")
    run_dir = tmp_path / "run"
    token = TokenFile(run_dir).create("boss", ["admin"])
    config = ServerConfig(
        run_dir=run_dir, allow_code_sync=True, job_defaults=tmp_path / "defaults.yaml", stop_grace=5.0
    )
    server = create_app(config, engine_command=engine.command("train:imports"))
    _, text = KeyFile(tmp_path / "keys.json").create("ops", admin=True)
    async with (
        listening(server) as url,
        gateway_before(url, tmp_path, swarm_token=token, keys_file=tmp_path / "keys.json") as http,
    ):
        through = ("--gateway-url", str(http.base_url), "--api-key", text)
        target = ("--swarm-url", url, "--token", token) if request.param == "swarm" else through
        yield Laptop(folder, target, run_dir, server)


async def test_from_a_changed_line_to_the_engine_and_back(laptop: Laptop) -> None:
    folder = str(laptop.folder)
    taken = await laptop.command("config", "sync", f"{folder}/job.yaml", "--set", "temperature=0.5")
    assert taken["engine"].startswith("ENGINE.OFFLINE")
    job = laptop.server.state.controller.job
    assert (job.temperature, job.batch_size, job.lr) == (0.5, 2, 0.5)

    dry = await laptop.command("code", "sync", folder, "--dry-run")
    assert dry["files"] == [".gitignore", "mine/__init__.py"]
    assert dry["left_out"] == {"mine/secret.key": "git ignores it", "job.yaml": "git does not track it"}
    assert (await laptop.command("code", "list"))["snapshots"] == []
    assert "mine" in await laptop.command("code", "sync", folder, "--packages", "yours", code=2)

    first = await laptop.command("code", "sync", folder, "--packages", "mine", "-m", "as it was")
    assert (first["changed"], first["restarted"], first["engine"]) == (True, False, None)
    assert first["snapshot"]["message"] == "as it was" and first["snapshot"]["files"] == 1
    again = await laptop.command("code", "sync", folder, "--packages", "mine")
    assert (again["changed"], again["restarted"], again["engine"]) == (False, False, None)
    assert first.keys() - again.keys() == {"temp_ajet_code_path"}, "a script reads both alike"

    # the engine runs: nothing changes under it, unless it may be restarted
    await laptop.server.state.supervisor.start()
    await laptop.server.state.controller.engine.wait_for_state([EngineState.ROLLING], 30)
    assert not (await laptop.command("code", "sync", folder, "--packages", "mine"))["changed"], (
        "nothing has to stop for the same code"
    )
    laptop.write("import einops_of_mine\nWEIGHT = 2\n")
    assert "force" in await laptop.command("code", "sync", folder, "--packages", "mine", code=2)
    assert (await laptop.command("code", "status", folder, "--packages", "mine"))["same_as_folder"] is False
    second = await laptop.command("code", "sync", folder, "--packages", "mine", "--force-restart")
    assert (second["restarted"], second["not_installed"]) == (True, {"einops_of_mine": ["mine/__init__.py"]})
    assert second["engine"].startswith("ENGINE.ROLLING")
    assert second["snapshot"]["revision"].endswith("+changes")
    status = await laptop.command("code", "status", folder, "--packages", "mine")
    assert status["running"] == status["selected"] == second["snapshot"]["id"]
    assert status["same_as_folder"] is True

    changed = await laptop.command(
        "code", "diff", first["snapshot"]["id"], "--dir", folder, "--packages", "mine", code=1
    )
    assert changed["changed"] == {"mine/__init__.py": "changed"}
    back = await laptop.command("code", "rollback", "--force-restart")
    assert (back["restarted"], back["snapshot"]["id"]) == (True, first["snapshot"]["id"])
    assert (await laptop.command("code", "list"))["running"] == first["snapshot"]["id"]
    none = await laptop.command("code", "rollback", "none", "--force-restart")
    assert (none["snapshot"], (await laptop.command("code", "list"))["selected"]) == (None, None)
    assert "nothing to go back from" in await laptop.command("code", "rollback", "--force-restart", code=2)
    assert (await laptop.command("code", "list"))["selected"] is None

    runs = await laptop.command("config", "runs")
    ids = [first["snapshot"]["id"], second["snapshot"]["id"], first["snapshot"]["id"], None]
    assert [run["code"] for run in runs] == ids
    assert len({run["run_id"] for run in runs}) == 1, "a forced restart goes on with the run"
    differing = await laptop.command("config", "diff", "1", "2", code=1)
    assert differing["changed"] == {"code": ids[:2]}

    log = laptop.audit()
    assert {entry["what"] for entry in log} == {"config sync", "code sync", "code select"}
    assert all(entry["who"] == "boss" and "@" in entry["sender"] for entry in log)
    assert any("ENGINE.ROLLING" in entry["result"] for entry in log if entry["result"] != "done")
    assert [entry["sender"].startswith("gateway key ops for ") for entry in log] == [
        laptop.target[0] == "--gateway-url"
    ] * len(log)
    await laptop.server.state.supervisor.stop()


async def test_what_no_line_shows_is_told_as_changed(laptop: Laptop) -> None:
    made = laptop.folder / "mine"
    (made / "run.sh").write_text("echo\n")
    (made / "ends.py").write_text("A = 1\nB = 2\n")
    (made / "gone.py").write_text("")
    git(laptop.folder, "add", "mine")
    packages = ("--dir", str(laptop.folder), "--packages", "mine")
    sent = await laptop.command("code", "sync", str(laptop.folder), *packages[2:])
    (made / "run.sh").chmod(0o755)
    (made / "ends.py").write_bytes(b"A = 1\r\nB = 2\r\n")
    (made / "gone.py").unlink()
    (made / "inner").mkdir()
    (made / "inner/__init__.py").write_text("")
    git(laptop.folder, "add", "mine/inner")
    diff = ("code", "diff", *packages, *laptop.target)
    told = await asyncio.to_thread(CliRunner().invoke, app, diff)
    assert (told.exit_code, told.stdout.splitlines()) == (
        1,
        [
            "mine/ends.py: the ends of its lines differ",
            "mine/gone.py: removed, empty",
            "mine/inner/__init__.py: added, empty",
            "mine/run.sh: executable now",
        ],
    )
    # a snapshot is handed out as it was sent
    (made / "ends.py").write_text("A = 1\nB = 2\n")
    (made / "gone.py").write_text("")
    git(laptop.folder, "rm", "--cached", "mine/inner/__init__.py")
    both = await laptop.command("code", "sync", str(laptop.folder), *packages[2:])
    assert (await laptop.command("code", "diff", *packages))["changed"] == {}
    between = await laptop.command("code", "diff", sent["snapshot"]["id"], both["snapshot"]["id"], code=1)
    assert between["changed"] == {"mine/run.sh": "changed"}


async def test_a_job_is_restarted_with_a_changed_field(laptop: Laptop) -> None:
    job = f"{laptop.folder}/job.yaml"
    await laptop.command("config", "sync", job)
    await laptop.server.state.supervisor.start()
    await laptop.server.state.controller.engine.wait_for_state([EngineState.ROLLING], 30)
    assert "stop it" in await laptop.command("config", "sync", job, "--set", "lr=0.1", code=2)
    done = await laptop.command("config", "sync", job, "--set", "lr=0.1", "--force-restart")
    assert done["engine"].startswith("ENGINE.ROLLING")
    differing = await laptop.command("config", "diff", "1", code=1)
    assert differing["changed"] == {"job lr": [0.5, 0.1], "verl lr": [0.5, 0.1]}
    for wrong, said in (("lrr=1", "'lr'"), ("batch_size=0", "batch_size")):
        assert said in await laptop.command("config", "sync", job, "--set", wrong, code=2)
    await laptop.server.state.supervisor.stop()


async def test_the_key_of_another_service_in_the_environment_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    server = create_app(ServerConfig(run_dir=tmp_path / "run"), engine_command=engine.command("train"))
    # nothing has keys or tokens: the swarm server refuses one that it does not know
    async with listening(server) as url, gateway_before(url, tmp_path) as http:
        target = ("--gateway-url", str(http.base_url))
        laptop = Laptop(tmp_path, target, tmp_path / "run", server)
        assert (await laptop.command("code", "list"))["snapshots"] == []
