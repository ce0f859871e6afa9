"""The coding tutorial as it ships: its projects, its rewards, its readme with a stand-in for the agent, and, with
``-m clients``, the three agents themselves."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

from reward_hooks.contract import Candidate, Feedback, HookContext, Session
from reward_hooks.loader import load_hooks
from swarm.importer import SourceFolder
from swarm.types import Task
from tests.clients import environments
from tests.clients.running import needs
from tests.tutorial.readmes import TUTORIALS, commands, run, running, tutorial_copy

FOLDER = TUTORIALS / "opencode_build_coding_agent"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in (FOLDER / "repairs.jsonl").read_text().splitlines()]
#: Claude Code as far as the tutorial needs it: asks, runs the command that it is told, tells, and names its session.
STANDIN = """
import json, os, subprocess, sys, urllib.request, uuid

session = str(uuid.uuid4())
print(json.dumps({"type": "system", "session_id": session}), flush=True)
bash = {"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": sys.argv[sys.argv.index("-p") + 1]}]
while True:
    body = {"model": "claude", "max_tokens": 500, "messages": messages, "tools": [bash]}
    headers = {"content-type": "application/json", "x-claude-code-session-id": session}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as answer:
        said = json.load(answer)["content"]
    calls = [block for block in said if block["type"] == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        told = subprocess.run(["sh", "-c", call["input"]["command"]], capture_output=True, text=True).stdout
        results.append({"type": "tool_result", "tool_use_id": call["id"], "content": told})
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
"""


@pytest.fixture(scope="module")
def users() -> ModuleType:
    sys.path.append(str(FOLDER))
    return SourceFolder(FOLDER).module("mock_user_request")


def test_the_projects_are_what_the_script_writes() -> None:
    assert SourceFolder(FOLDER).module("make_repairs").rows() == ROWS
    assert len({row["task_id"] for row in ROWS}) == len(ROWS) == 12


def test_a_module_is_judged_by_tests_of_our_own(users: ModuleType, tmp_path: Path) -> None:
    row, module = ROWS[0], tmp_path / f"{ROWS[0]['task_id']}.py"
    assert not users.passes(module, row["tests"])
    (tmp_path / "unittest.py").write_text("")
    for source, good in [(row["module"], False), (row["right"], True), ("import os\nos._exit(0)\n", False)]:
        module.write_text(source)
        assert users.passes(module, row["tests"]) == good


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[row["task_id"] for row in ROWS])
def test_every_project_is_broken_and_can_be_repaired(users: ModuleType, tmp_path: Path, row: dict[str, Any]) -> None:
    module = tmp_path / f"{row['task_id']}.py"
    module.write_text(row["module"])
    assert not users.passes(module, row["tests"])
    module.write_text(row["right"])
    assert users.passes(module, row["tests"])


@pytest.mark.anyio
async def test_answers_are_judged_by_themselves_and_sessions_by_their_outcome() -> None:
    hooks = load_hooks(FOLDER)
    good, broken = [
        {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": arguments}}
        for arguments in ('{"command": "ls"}', '{"command": ')
    ]
    kinds: list[dict[str, Any]] = [
        {"tool_calls": [good], "finish_reason": "tool_calls"},
        {"text": "Done."},
        {"tool_calls": [good, broken], "finish_reason": "tool_calls"},
        {"text": "Let me", "finish_reason": "length"},
        {"text": " "},
    ]
    candidates = [Candidate(index=index, message={}, **kind) for index, kind in enumerate(kinds)]
    context = HookContext(num_repeat=5)
    rewards: Any = hooks.reward(Task(task_id="t", main_query="q"), candidates, context)
    assert [reward.value for reward in rewards] == [1.0, 1.0, 0.0, 0.0, 0.0]
    told = SourceFolder(FOLDER).module("on_session_end").on_session_end
    session = Session(session_id="s", turns=[])
    assert told(session, context) is None
    assert told(session.model_copy(update={"feedback": Feedback(rating=-1.0)}), context) == -1.0


def test_an_agents_session_is_in_what_it_prints() -> None:
    session_of = SourceFolder(FOLDER).module("agents").session_of
    claude = 'warning\n{"type": "system", "session_id": "c"}\n{"session_id": "d"}'
    codex = '{"type": "thread.started", "thread_id": "t"}'
    opencode = '[1]\n{"type": "step_start", "sessionID": "ses_1"}'
    assert [session_of(one) for one in (claude, codex, opencode, "")] == ["c", "t", "ses_1", ""]


def address(folder: Path) -> str:
    """The gateway's, in a copy of the folder."""
    return f"http://127.0.0.1:{yaml.safe_load((folder / 'config.yaml').read_text())['gateway']['port']}"


def sessions(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/status", trust_env=False).json()["sessions"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the agent; with ``-m clients`` it is the real ones' turn."""
    agent = folder / "bin" / "claude"
    agent.parent.mkdir()
    agent.write_text(f"#!{sys.executable} -I\n{STANDIN}")
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(agent.parent), os.environ["PATH"]]))


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    repaired = re.search(r"claude repaired (\d+) of (\d+) projects", said)
    assert repaired is not None and 0 < int(repaired[1]) <= int(repaired[2]), said
    assert "held-out prompts prove more" in said
    credited = sessions(address(folder))
    # two turns of each session: the command, and that it is done
    assert credited["ended"]["endpoint"] >= 32
    # a session like all others of its project so far earns nothing
    assert credited["credited"] >= 16 and credited["credit_dropped"] == 0


@pytest.mark.clients
@pytest.mark.usefixtures("model_and_engine")
def test_the_agents_repair_and_their_sessions_are_credited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {"claude": environments.CLAUDE_CODE, "codex": environments.CODEX, "opencode": environments.OPENCODE}
    for environment in agents.values():
        needs(environment)
    folders = [str(Path(environment.command(name)).parent) for name, environment in agents.items()]
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, os.environ["PATH"]]))
    folder = tutorial_copy("coding_agent", tmp_path)
    url = address(folder)
    up, asked = commands((folder / "readme.md").read_text())
    with running(up, folder):
        few = [one for one in asked if one != "--quick"] + ["--data", "few.jsonl", "--concurrency", "2"]
        for number, name in enumerate(agents, 1):
            # projects of its own: the first session of each is compared with no other
            rows = ROWS[4 * number - 4 : 4 * number]
            (folder / "few.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            said = run([name if one == "claude" else one for one in few], folder)
            assert re.search(rf"{name} repaired \d of 4 projects", said), said
            assert "failed" not in said or "0 failed" in said, said
            now = sessions(url)
            assert now["ended"] == {"endpoint": 4 * number}
            # the command, and that it is done
            assert (now["credited"], now["credit_dropped"]) == (2 * 4 * number, 0)
