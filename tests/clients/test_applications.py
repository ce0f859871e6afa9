"""LangChain, openai-agents, OpenAI's SDK for Node, the ``llm`` command and aider, all unmodified, through processes of
gateway and swarm server: what their user sees, and what of it is in the pool to be trained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments
from tests.clients.running import APPS, needs, run
from tests.clients.stack import MODEL, Stack
from tests.clients.table import covers

pytestmark = pytest.mark.clients

SUNNY = "The tools say: Rome is sunny, Oslo is sunny."


@covers("LangChain", "plain", "streamed", "tools", "parallel tools")
def test_langchain(served: Stack, tmp_path: Path) -> None:
    needs(environments.LANGCHAIN)
    command = [str(environments.LANGCHAIN.python), str(APPS / "langchain_app.py"), served.base_url]
    # of each of two addresses: plain, streamed, two turns with tools, structured, a batch of two
    with served.trains(14):
        lines = run(command, tmp_path).splitlines()
    results: dict[str, Any] = {}
    for line in lines:
        results |= json.loads(line)
    for result in results.values():
        assert result["plain"] == result["streamed"][0] == "You said: Hello"
        assert result["output_tokens"] == result["streamed"][1] > 0
        assert result["tools"] == SUNNY
        assert result["structured"] == {"city": "Rome", "days": 7}
        assert result["batch"] == ["You said: one", "You said: two"]
    assert set(results) == {"chat", "responses"}


@covers("openai-agents", "plain", "streamed", "tools", "parallel tools", "second turn")
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_openai_agents(served: Stack, tmp_path: Path, api: str) -> None:
    needs(environments.AGENTS)
    env = {"OPENAI_BASE_URL": served.base_url, "OPENAI_API_KEY": "any", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    command = [str(environments.AGENTS.python), str(APPS / "agents_app.py"), api]
    # two turns with tools, the same streamed, structured, a session of two, a hand-over and what comes after
    with served.trains(9):
        result = json.loads(run(command, tmp_path, env))
    assert result["plain"] == result["streamed"] == SUNNY
    assert result["events"] > 10
    assert result["visit"] == {"city": "Rome", "days": 7}
    assert result["session"] == ["You said: one", "You said: two"]
    assert result["last_agent"] == "Talker"


@covers("openai (Node)", "plain", "streamed", "tools", "parallel tools", "second turn")
def test_node(served: Stack, tmp_path: Path) -> None:
    needs(environments.NODE)
    command = [
        environments.NODE.command("node"),
        str(APPS / "node_app.mjs"),
        served.base_url,
        str(environments.NODE.folder),
    ]
    with served.trains(7):
        result = json.loads(run(command, tmp_path))
    assert result["plain"] == result["streamed"] == "You said: Hello, Grüße!"
    assert result["deltas"] > 1
    assert result["tools"] == SUNNY
    assert json.loads(result["parsed"]) == {"city": "Rome"}
    assert result["responses"] == ["You said: Hello", "You said: And now?"]
    assert result["refused"] == [True, "model_not_found"]


@covers("`llm`", "plain", "streamed", "tools", "parallel tools", "second turn", "resume")
def test_llm_command(served: Stack, tmp_path: Path) -> None:
    needs(environments.LLM)
    models = [{"model_id": MODEL, "model_name": MODEL, "api_base": served.base_url, "supports_tools": True}]
    models[0]["supports_schema"] = True
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    env = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"}
    llm = [environments.LLM.command("llm"), "-m", MODEL]
    weather = "def weather(city: str) -> str:\n    return city + ' is sunny'\n"
    with served.trains(6):
        streamed = run([*llm, "Hello"], tmp_path, env)
        plain = run([*llm, "--no-stream", "-s", "Be kind.", "Hello"], tmp_path, env)
        again = run([*llm, "-c", "And now?"], tmp_path, env)
        tools = run([*llm, "--functions", weather, "How is it in Rome and Oslo?"], tmp_path, env)
        schema = run([*llm, "--schema", "city, days int", "Where to?"], tmp_path, env)
    assert streamed == plain == "You said: Hello\n"
    assert again == "You said: And now?\n"
    assert tools.strip() == SUNNY
    assert json.loads(schema) == {"city": "Rome", "days": 7}


def test_aider_edits_a_repository(served: Stack, tmp_path: Path) -> None:
    needs(environments.AIDER)
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "hello.py").write_text('def greet():\n    return "hello"\n')
    git = ["git", "-C", str(repo), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, timeout=60)
    env = {
        "OPENAI_API_BASE": served.base_url,
        "OPENAI_API_KEY": "any",
        "AIDER_ANALYTICS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [environments.AIDER.command("aider"), "--model", f"openai/{MODEL}", "--no-check-update", "--yes-always"]
    command += ["--no-show-model-warnings", "--no-gitignore", "--no-show-release-notes", "--no-pretty"]
    # the edit, and the message of its commit
    with served.trains(2):
        said = run([*command, "--message", "Say farewell in hello.py", "hello.py"], repo, env)
    assert "Applied edit to hello.py" in said
    assert (repo / "hello.py").read_text() == 'def greet():\n    return "farewell"\n'
    log = subprocess.run([*git, "log", "--format=%s"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert len(log.splitlines()) == 2
