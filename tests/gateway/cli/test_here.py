"""What commands find of an ``up`` that runs: with the stand-in engine, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from gateway.cli.here import gateway_run, runs_of
from gateway.cli.root import app
from gateway.cli.sections import read_plan
from gateway.launch import run_folder
from gateway.launch.plan import UpPlan
from gateway.launch.up import run_up
from swarm.errors import ConfigError
from tests.processes import nothing_left_behind
from tests.standins.engine import FOLDER_VARIABLE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
REQUESTS = 50
COMMAND = UpPlan.__dataclass_fields__["command"].default[:-1]
UP = """\
job: {model: tiny, batch_size: 4, num_repeat: 2}
swarm: {port: 0, token: of-the-owner}
gateway:
  port: 0
  train_fraction: 1.0
  hooks: hooks
"""
PROMPTS = "".join(f'{{"question": "q{number}"}}\n' for number in range(8))
REWARD = """\
def on_compute_relative_reward(task, candidates, context):
    return [float(len(one.text)) for one in candidates]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hook = "hooks/on_compute_relative_reward.py"
    for name, text in {
        "tiny/config.json": "{}",
        hook: REWARD,
        "my.yaml": UP,
        "other/x": "",
        "prompts.jsonl": PROMPTS,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    for name in ("SWARM_TOKEN", "SWARM_GATEWAY_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_links_and_what_cannot_be_read_are_passed_over_on_the_way_to_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/default", "gone/a", "node_modules/package", ".git/objects"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("/")
    looked: list[str] = []
    scandir = os.scandir

    def disk(path: Path) -> Any:
        if path == tmp_path / "gone":
            raise FileNotFoundError(2, "removed meanwhile, or on a disk that is away")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", disk)
    monkeypatch.setattr(run_folder, "living_run", lambda folder: looked.append(str(folder.relative_to(tmp_path))))
    monkeypatch.chdir(tmp_path)
    assert runs_of() == []
    assert sorted(looked) == [".", "gone", "runs", "runs/default"]


def while_up(project: Path, act: Callable[[str], None]) -> None:
    """Run ``up my.yaml``; once it is ready, ``act`` with the gateway's address; then stop it."""
    gateway = ""

    def on_event(kind: str, values: dict[str, Any]) -> None:
        nonlocal gateway
        if kind == "listening" and values["name"] == "gateway":
            gateway = values["url"]
        if kind == "ready":
            try:
                act(gateway)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    plan = replace(read_plan(project / "my.yaml"), command=(*COMMAND, "tests.gateway.scripted_up", "paced"))
    with nothing_left_behind():
        run_up(plan, on_event)


def told(folder: Path, *arguments: str, code: int = 0) -> str:
    """What a command prints in ``folder``."""
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_commands_find_the_servers_of_this_folder_with_their_token(project: Path) -> None:
    def act(gateway: str) -> None:
        found = run_folder.living_run(project / "runs/default")
        assert found is not None
        [server] = found.servers
        assert (found.gateway, found.file, found.pid) == (gateway, project / "my.yaml", os.getpid())
        assert (project / "runs/default/up.json").stat().st_mode & 0o077 == 0
        assert json.loads(told(project, "swarm", "status", "--json"))["run_dir"] == str(project / "runs/default")
        for where in ([], ["my.yaml"]):
            [swarm] = json.loads(told(project, "monitor", "--json", *where))["swarm_servers"]
            assert (swarm["url"], swarm["trouble"]) == (server.url, None)
        assert json.loads(told(project, "groups", "list", "--json"))["groups"] == []
        assert json.loads(told(project, "config", "runs", "--json"))[0]["number"] == 1
        report = json.loads(told(project, "replay", "--data", "prompts.jsonl", "--steps", "1", "--json"))
        assert (report["target"], report["failures"]) == (f"{gateway}/v1", {})
        assert report["steps"][0]["groups"] == 4, "the server's own count"
        assert "nothing that `up` started runs in" in told(project / "other", "swarm", "status", code=2)
        assert "this route needs a token" in told(
            project / "other", "swarm", "status", "--swarm-url", server.url, code=2
        )

    while_up(project, act)
    assert not (project / "runs/default/up.json").exists()


def test_a_reload_reads_the_users_file_and_a_wrong_one_changes_nothing(project: Path) -> None:
    def act(gateway: str) -> None:
        def change(old: str, new: str) -> httpx.Response:
            (project / "my.yaml").write_text(UP.replace(old, new))
            return httpx.post(f"{gateway}/admin/reload", timeout=60, trust_env=False)

        def fraction() -> float:
            status = httpx.get(f"{gateway}/status", timeout=60, trust_env=False).json()
            return status["routes"]["default"]["train_fraction"]

        answer = change("train_fraction: 1.0", "train_fraction: 0.0")
        assert answer.json() == {"routes": ["default"], "changed": ["train_fraction"], "needs_restart": []}
        assert fraction() == 0.0
        wrong = change("train_fraction: 1.0", "train_fraktion: 0.5")
        assert wrong.status_code == 400
        assert "my.yaml, gateway: unknown key 'train_fraktion'" in wrong.json()["error"]["message"]
        assert fraction() == 0.0
        (project / "hooks/on_compute_relative_reward.py").write_text("def on_compute(:\n")
        broken = change("train_fraction: 1.0", "train_fraction: 0.0")
        assert broken.status_code == 400
        assert "on_compute_relative_reward.py" in broken.json()["error"]["message"]
        assert "line 1" in broken.json()["error"]["message"]
        (project / "hooks/on_compute_relative_reward.py").write_text(REWARD)
        assert change("port: 0\n  train", "port: 1\n  train").json()["needs_restart"] == ["port"]
        assert fraction() == 1.0
        other = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hello"}]}
        unknown = httpx.post(f"{gateway}/v1/chat/completions", json=other, timeout=60, trust_env=False)
        assert unknown.status_code == 404 and "This gateway serves `tiny`: ask for that, or add" in unknown.text

    while_up(project, act)


def test_a_file_of_a_dead_run_or_of_somebody_else_counts_for_nothing(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    started = run_folder.since_boot(psutil.Process(dead.pid))
    dead.wait()
    server = run_folder.RunServer(job="", url="http://127.0.0.1:9", run_dir=tmp_path)
    alive = run_folder.run_of_this_process(None, [server], "", "t")
    run_folder.write_run(alive)
    assert run_folder.living_run(tmp_path) == alive
    with pytest.MonkeyPatch.context() as clock:
        # set by an hour, which both follow
        create_time, boot = psutil.Process.create_time, psutil.boot_time()

        def later(process: psutil.Process) -> float:
            return create_time(process) + 3600

        clock.setattr(psutil.Process, "create_time", later)
        clock.setattr(psutil, "boot_time", lambda: boot + 3600)
        assert run_folder.living_run(tmp_path) == alive
    (tmp_path / run_folder.RUN_FILE).chmod(0o644)
    assert run_folder.living_run(tmp_path) is None, "others may have written it"
    for changed in ({"pid": dead.pid, "started": started}, {"started": alive.started - 60}):
        run_folder.write_run(alive.model_copy(update=changed))
        assert run_folder.living_run(tmp_path) is None


def test_a_copy_of_a_run_folder_leads_to_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, copied = tmp_path / "project", tmp_path / "copied"
    run_dir = project / "runs/default"
    run_dir.mkdir(parents=True)
    server = run_folder.RunServer(job="", url="http://127.0.0.1:9", run_dir=run_dir)
    run_folder.write_run(run := run_folder.run_of_this_process(None, [server], "", "t"))
    shutil.copytree(project, copied)
    (tmp_path / "linked").symlink_to(project)
    for folder, found in (("project", [run]), ("linked", [run]), ("copied", [])):
        monkeypatch.chdir(tmp_path / folder)
        assert runs_of() == found, folder


def test_a_run_of_several_jobs_is_found_though_the_folder_of_one_is_gone(tmp_path: Path) -> None:
    servers = [run_folder.RunServer(job=job, url="http://127.0.0.1:9", run_dir=tmp_path / job) for job in ("a", "b")]
    for server in servers:
        server.run_dir.mkdir()
    run_folder.write_run(run := run_folder.run_of_this_process(None, servers, "", "t"))
    shutil.rmtree(tmp_path / "a")
    assert run_folder.living_run(tmp_path / "b") == run


def test_of_two_gateways_in_a_folder_one_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gateway_run(None) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as another:
        mine = run_folder.run_of_this_process(None, [], "http://127.0.0.1:1", "t")
        started = run_folder.since_boot(psutil.Process(another.pid))
        other = mine.model_copy(update={"pid": another.pid, "started": started})
        for name, run in {"a": mine, "b": other.model_copy(update={"gateway": "http://127.0.0.1:2"})}.items():
            server = run_folder.RunServer(job="", url="http://127.0.0.1:9", run_dir=tmp_path / name)
            server.run_dir.mkdir()
            run_folder.write_run(run.model_copy(update={"servers": [server]}))
        with pytest.raises(ConfigError, match=r"say by --base-url .*: http://127.0.0.1:\d/v1, http://127.0.0.1:\d/v1"):
            gateway_run(None)
        for url in ("http://127.0.0.1:2/v1/", "http://localhost:2/v1"):
            found = gateway_run(url)
            assert found is not None and found.pid == another.pid
        assert gateway_run("http://127.0.0.1:3/v1") is None
        # a file may say `host: localhost`
        run_folder.write_run(run.model_copy(update={"servers": [server], "gateway": "http://localhost:2"}))
        for url in ("http://127.0.0.1:2/v1", "http://localhost:2/v1"):
            assert (found := gateway_run(url)) is not None and found.pid == another.pid
        another.communicate(b"\n")


def test_steps_of_a_gateway_before_several_servers_are_those_of_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    servers = [
        run_folder.RunServer(job=job, url=f"http://127.0.0.1:{port}", run_dir=tmp_path)
        for job, port in (("a", 1), ("b", 2))
    ]
    run_folder.write_run(run_folder.run_of_this_process(None, servers, "http://127.0.0.1:3", "t"))
    names = r"its `up` has several: http://127.0.0.1:1 \(a\), http://127.0.0.1:2 \(b\)$"
    with pytest.raises(ConfigError, match=r"--steps needs --swarm-url .*: " + names):
        CliRunner().invoke(app, ["replay", "--data", "none.jsonl", "--steps", "3"], catch_exceptions=False)
    # a command for files takes no address
    with pytest.raises(ConfigError, match=rf"say by --run-dir which one is meant: {tmp_path}, {tmp_path}$"):
        CliRunner().invoke(app, ["models", "export", "--out", "mine"], catch_exceptions=False)


def test_the_gateways_log_has_no_line_for_each_request(project: Path) -> None:
    def act(gateway: str) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}

        def ask(_: int) -> int:
            return httpx.post(f"{gateway}/v1/chat/completions", json=body, timeout=120, trust_env=False).status_code

        with ThreadPoolExecutor(8) as users:
            assert set(users.map(ask, range(REQUESTS))) == {200}
        log = (project / "runs/default/logs/gateway.log").read_text()
        # a request, an episode and a step differ in numbers and names alone
        kinds = Counter(
            re.sub(r"[0-9a-f]{6,}|\d+", "#", line.partition(" INFO ")[2] or line) for line in log.splitlines()
        )
        assert max(kinds.values()) < REQUESTS / 10, kinds.most_common(3)

    while_up(project, act)


def test_a_token_of_the_environment_is_for_other_servers_than_those_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            brought.append(self.headers["authorization"])
            self.send_error(404)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_TOKEN", "another-servers")
    with HTTPServer(("127.0.0.1", 0), Server) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}"
        server = run_folder.RunServer(job="", url=url, run_dir=tmp_path)
        run_folder.write_run(run_folder.run_of_this_process(None, [server], "", "own"))
        for command in (["swarm", "status"], ["swarm", "status", "--swarm-url", url], ["monitor", "--json"]):
            CliRunner().invoke(app, command)
        (tmp_path / "prompts.jsonl").write_text(PROMPTS)
        CliRunner().invoke(app, ["replay", "--data", "prompts.jsonl", "--model", "m", "--swarm-url", url])
        CliRunner().invoke(app, ["swarm", "status", "--token", "named"])
        # an address of another server with its token
        elsewhere = f"http://x:in-address@localhost:{http.server_port}"
        CliRunner().invoke(app, ["swarm", "status", "--swarm-url", elsewhere])
        CliRunner().invoke(app, ["swarm", "status", "--swarm-url", elsewhere, "--token", "named"])
        CliRunner().invoke(app, ["swarm", "status", "--swarm-url", f"http://localhost:{http.server_port}"])
        http.shutdown()
    assert brought[:5] == ["Bearer own"] * 4 + ["Bearer named"]
    assert brought[5:] == ["Bearer in-address", "Bearer named", "Bearer another-servers"]
