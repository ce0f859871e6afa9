"""The tutorial as it ships: its app against a stand-in server, its hooks, its data, its configuration."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gateway.reports.report import read_report
from reward_hooks.contract import Candidate, HookContext, UserRequest
from reward_hooks.loader import load_hooks
from swarm.data import read_tasks
from swarm.importer import SourceFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorial" / "opencode_build_concise_agent"
QUESTION = "Why are default values shared between objects?"


class Server(ThreadingHTTPServer):
    """Answers every chat completion with one sentence and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.asked = threading.Semaphore(0)
        self.released = threading.Event()
        self.released.set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """As a swarm server that rolls."""
        self.answer(200, {"engine": {"engine_status": "ENGINE.ROLLING"}})

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.asked.release()
        self.server.released.wait(60)
        message = {"role": "assistant", "content": "They are made once."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.answer(self.server.status, body)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        # whoever asked may be gone by now
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("x-should-retry", "false")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.released.set()
        one.shutdown()
        thread.join()


def test_the_app_asks_one_question_or_chats(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = SourceFolder(FOLDER).module("app")
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(sys, "argv", ["app.py", QUESTION])
    app.main()
    assert capsys.readouterr().out == "They are made once.\n"
    assert server.bodies[0]["messages"][-1]["content"] == f"{QUESTION} Answer in one short sentence."
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\nSince when?\n\n"))
    monkeypatch.setattr(sys, "argv", ["app.py"])
    app.main()
    assert capsys.readouterr().out.count("They are made once.") == 2
    assert [message["role"] for message in server.bodies[2]["messages"]] == ["system", "user", "assistant", "user"]
    server.status = 503
    monkeypatch.setattr(sys, "argv", ["app.py", QUESTION])
    with pytest.raises(SystemExit, match="app: "):
        app.main()


@contextlib.contextmanager
def users(server: Server, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    url = server.base_url.removesuffix("/v1")
    command = [sys.executable, str(FOLDER / "mock_user_request.py"), "--base-url", server.base_url, "--swarm-url", url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_as_many_users_as_asked_for_and_ctrl_c_waits_for_none(server: Server) -> None:
    server.released.clear()
    many = (os.cpu_count() or 1) + 8
    with users(server, "--concurrency", str(many)) as process:
        assert all(server.asked.acquire(timeout=60) for _ in range(many))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted" in out


@pytest.mark.anyio
async def test_the_hooks_judge_the_question_without_the_apps_instruction() -> None:
    hooks = load_hooks(FOLDER)
    context = HookContext(num_repeat=3)
    body = {"model": "m", "messages": [{"role": "user", "content": f"{QUESTION} Answer in one short sentence."}]}
    assert hooks.submit is not None
    submission: Any = hooks.submit(UserRequest(request_id="req_1", body=body), context)
    assert (submission.task.task_id, submission.task.main_query) == ("req_1", QUESTION)
    assert submission.requests == [body] * 3
    answers = [
        "Default values are created once and shared by all calls.",
        "Sure! Here is a short sentence:",
        "word " * 60,
    ]
    candidates = [Candidate(index=n, message={}, text=text) for n, text in enumerate(answers)]
    rewards: Any = hooks.reward(submission.task, candidates, context)
    values = [reward.value for reward in rewards]
    assert values[0] > 0.9
    assert max(values[1:]) < 0.5


def test_the_hook_and_the_app_agree_on_the_instruction() -> None:
    assert (
        SourceFolder(FOLDER).module("app").STYLE
        == SourceFolder(FOLDER).module("on_user_submit_new_requests").INSTRUCTION
    )


def test_every_question_names_its_source_and_licence() -> None:
    tasks = list(read_tasks(FOLDER / "questions.jsonl"))
    assert len(tasks) > 150
    assert all(task.main_query.endswith("?") and "PSF-2.0" in task.metadata["source"] for task in tasks)
    assert "PSF License" in (FOLDER / "DATA.md").read_text()


@pytest.fixture
def demo() -> ModuleType:
    return SourceFolder(FOLDER).module("demo")


def test_the_demo_says_of_how_many_answers_the_hook_chose_the_best(demo: ModuleType) -> None:
    answers = Counter({"judged": 6, "judged_untrained": 3, "single": 2, "unjudged": 1})
    assert demo.share_chosen(answers, "best") == (
        "when_batch_waits is best: of 12 answers the hook chose 9 (75%) as the best of their group, 6 in groups to "
        "train, 3 in groups beside training; 3 were not chosen by it."
    )
    assert "of 0 answers the hook chose 0 (0%)" in demo.share_chosen(Counter(), "single")


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    assert "held-out prompts prove more" in said


def check_quick(folder: Path, said: str) -> None:
    """What the demo leaves."""
    *_, chosen, learns = said.rstrip().splitlines()
    assert learns.startswith(("learning: reward ", "not proven: reward ", "no: reward "))
    assert chosen.startswith("when_batch_waits is best: of ") and "the hook chose" in chosen
    assert (folder / "demo-out" / "report.png").is_file()
    trained = read_report(folder / "demo-out" / "trained")
    # the engine may finish one more step before it is stopped
    assert [point.step for point in trained.steps][:2] == [1, 2]
    assert trained.failures == {}
    assert all(0 < point.reward_mean < 1 for point in trained.steps)
