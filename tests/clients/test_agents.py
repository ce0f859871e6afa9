"""Claude Code, Codex, opencode and the AI SDK, unmodified, through processes of gateway and swarm server: what their
user sees, that only the tools of the chosen answer run, and that every turn is in the pool to be trained."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments
from tests.clients.agents import (
    CLAUDE_MODELS,
    CODEX_MODEL,
    claude,
    claude_command,
    codex,
    codex_command,
    mini_command,
    opencode,
    opencode_command,
    qwen,
    qwen_command,
)
from tests.clients.running import APPS, interrupt, needs, run, until_there
from tests.clients.stack import Stack, stack
from tests.clients.table import covers

pytestmark = pytest.mark.clients

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg=="
PDF = b"""%PDF-1.4
1 0 obj
<< /Type /Catalog /Pages 2 0 R >>
endobj
2 0 obj
<< /Type /Pages /Kids [3 0 R] /Count 1 >>
endobj
3 0 obj
<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 100] >>
endobj
trailer << /Size 4 /Root 1 0 R >>
"""
#: Whoever runs it for the answer that was not chosen leaves ``other``.
SHELL = {"command": "echo chosen >> ran.txt; cat ran.txt", "description": "Run it"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack"), model_aliases=[*CLAUDE_MODELS, CODEX_MODEL]) as running:
        yield running


def call(tool: str, **arguments: Any) -> str:
    """An order to the scripted model."""
    return f"CALL {tool} {json.dumps(arguments)}"


@covers("Claude Code", "streamed", "tools", "second turn", "resume")
def test_claude_code(served: Stack, tmp_path: Path) -> None:
    needs(environments.CLAUDE_CODE)
    # the answer; the call and what comes of it; the answer
    with served.trains(4):
        first = claude(served, tmp_path, "SAY hello to you", "--include-partial-messages")
        tool = claude(served, tmp_path, call("Bash", **SHELL), "-c")[-1]
        again = claude(served, tmp_path, "SAY still here", "-c")[-1]
    deltas = [
        line["event"]["delta"]["text"]
        for line in first
        if line["type"] == "stream_event" and line["event"].get("delta", {}).get("type") == "text_delta"
    ]
    assert len(deltas) > 1 and "".join(deltas) == first[-1]["result"] == "hello to you"
    assert tool["result"] == "The tools say: chosen."
    assert (tmp_path / "ran.txt").read_text() == "chosen\n"
    assert again["result"] == "still here"
    assert again["session_id"] == first[-1]["session_id"]
    # the whole conversation was asked again
    assert again["usage"]["input_tokens"] > first[-1]["usage"]["input_tokens"]


@covers("Claude Code", "parallel tools")
def test_claude_code_runs_tools_at_once(served: Stack, tmp_path: Path) -> None:
    needs(environments.CLAUDE_CODE)
    both = "\n".join(call("Bash", command=f"echo {name} chosen | tee -a {name}.txt") for name in ("one", "two"))
    with served.trains(2):
        result = claude(served, tmp_path, both)[-1]
    assert result["result"] == "The tools say: one chosen, two chosen."
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("one", "two")] == ["one chosen\n", "two chosen\n"]


def test_claude_code_goes_on_with_what_was_thought(served: Stack, tmp_path: Path) -> None:
    needs(environments.CLAUDE_CODE)
    with served.trains(3):
        tool = claude(served, tmp_path, "THINK of Rome\n" + call("Bash", **SHELL))
        again = claude(served, tmp_path, "SAY still here", "-c")[-1]
    blocks = [block for line in tool if line["type"] == "assistant" for block in line["message"]["content"]]
    assert [block["thinking"] for block in blocks if block["type"] == "thinking"] == ["of Rome"]
    assert (tmp_path / "ran.txt").read_text() == "chosen\n"
    assert again["result"] == "still here"


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param("claude", marks=covers("Claude Code", "interruption")),
        pytest.param("codex", marks=covers("Codex CLI", "interruption")),
        pytest.param("qwen", marks=covers("Qwen Code", "interruption")),
        pytest.param("mini", marks=covers("mini-swe-agent", "interruption")),
    ],
)
def test_ctrl_c_ends_the_sampling_and_the_session_goes_on(served: Stack, tmp_path: Path, agent: str) -> None:
    order = f"\nWAIT {tmp_path / 'word'}"
    command, env = {
        "claude": lambda: claude_command(served, order),
        "codex": lambda: codex_command(served, tmp_path, order),
        "qwen": lambda: qwen_command(served, tmp_path, order),
        "mini": lambda: mini_command(served, order),
    }[agent]()
    with served.trains(0 if agent in ("qwen", "mini") else 1):
        interrupt(command, tmp_path, env, tmp_path / "word.asked")
        until_there(tmp_path / "word.left")
        if agent == "claude":
            assert claude(served, tmp_path, "SAY still here", "-c")[-1]["result"] == "still here"
        elif agent == "codex":
            assert _said(codex(served, tmp_path, "SAY still here", resume=True)) == "still here"


@pytest.mark.parametrize("kind", ["general-purpose", "Explore"])
def test_claude_code_has_sub_agents(served: Stack, tmp_path: Path, kind: str) -> None:
    needs(environments.CLAUDE_CODE)
    order = call("Agent", description="sub", prompt="SAY hi from below", subagent_type=kind, run_in_background=False)
    # the call, the sub-agent's answer, what comes of it
    with served.trains(3):
        result = claude(served, tmp_path, order)[-1]
    assert result["result"].startswith("The tools say: ") and "hi from below" in result["result"]


@pytest.mark.parametrize(
    # a conversation with an image is answered, but not trained
    ("name", "content", "trained"),
    [("a.pdf", PDF, 3), ("a.png", base64.b64decode(PNG), 1)],
)
@covers("Claude Code", "image")
def test_claude_code_reads_files_and_goes_on(
    served: Stack, tmp_path: Path, name: str, content: bytes, trained: int
) -> None:
    needs(environments.CLAUDE_CODE)
    (tmp_path / name).write_bytes(content)
    with served.trains(trained):
        read = claude(served, tmp_path, call("Read", file_path=str(tmp_path / name)))[-1]
        again = claude(served, tmp_path, "SAY still here", "-c")[-1]
    assert read["result"].startswith("The tools say: ")
    assert again["result"] == "still here"


def test_claude_codes_web_search_is_the_models_own_answer(served: Stack, tmp_path: Path) -> None:
    needs(environments.CLAUDE_CODE)
    # the call, what the model says instead of a search, what comes of it; and the next turn
    with served.trains(4):
        result = claude(served, tmp_path, call("WebSearch", query="weather in Rome"))[-1]
        again = claude(served, tmp_path, "SAY still here", "-c")[-1]
    assert "You said: Perform a web search for the query: weather in Rome" in result["result"]
    assert again["result"] == "still here"


def test_claude_code_counts_its_context(served: Stack, tmp_path: Path) -> None:
    needs(environments.CLAUDE_CODE)
    with served.trains(0):
        result = claude(served, tmp_path, "/context")[-1]
    assert "Estimated usage by category" in result["result"]


@covers("Codex CLI", "streamed", "tools", "second turn", "resume")
def test_codex(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    # the answer; the call and what comes of it; the answer
    with served.trains(4):
        first = codex(served, tmp_path, "SAY hello to you")
        tool = codex(served, tmp_path, call("exec_command", cmd=SHELL["command"]), resume=True)
        again = codex(served, tmp_path, "SAY still here", resume=True)
    assert _said(first) == "hello to you"
    assert (tmp_path / "ran.txt").read_text() == "chosen\n"
    assert [one["item"]["exit_code"] for one in tool if _kind(one) == "command_execution"] == [0]
    assert _said(tool).startswith("The tools say: ")
    assert _said(again) == "still here"
    assert {events[0]["thread_id"] for events in (first, tool, again)} == {first[0]["thread_id"]}
    assert again[-1]["usage"]["input_tokens"] > first[-1]["usage"]["input_tokens"]


@covers("Codex CLI, `openai_base_url` alone", "streamed", "second turn", "resume")
def test_codex_as_it_comes_falls_back_from_websockets_at_once(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    with served.trains(2):
        first = codex(served, tmp_path, "SAY hello to you", as_it_comes=True)
        again = codex(served, tmp_path, "SAY still here", resume=True, as_it_comes=True)
    # with retries there would be errors in between
    assert [_said(first), _said(again)] == ["hello to you", "still here"]
    assert not [event for event in first + again if event["type"] == "error"]


def test_codex_as_it_comes_goes_on_after_a_compaction(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    compacting = ("-c", "model_auto_compact_token_limit=2000")
    # the answer, the summary before the second turn, the answer
    with served.trains(3):
        codex(served, tmp_path, "SAY hello to you", as_it_comes=True)
        again = codex(served, tmp_path, "SAY still here", *compacting, resume=True, as_it_comes=True)
    assert _said(again) == "still here"


@covers("Codex CLI", "parallel tools")
def test_codex_runs_tools_at_once(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    both = "\n".join(call("exec_command", cmd=f"echo {name} chosen >> {name}.txt") for name in ("one", "two"))
    with served.trains(2):
        codex(served, tmp_path, both)
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("one", "two")] == ["one chosen\n", "two chosen\n"]


def test_codex_goes_on_with_what_was_thought(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    with served.trains(3):
        codex(served, tmp_path, "THINK of Rome\n" + call("exec_command", cmd=SHELL["command"]))
        again = codex(served, tmp_path, "SAY still here", resume=True)
    assert (tmp_path / "ran.txt").read_text() == "chosen\n"
    assert _said(again) == "still here"


def test_codex_has_sub_agents(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    # the call, what comes of it; the sub-agent is on its own and may be cut short by the end
    before = set(served.rewards())
    events = codex(served, tmp_path, call("multi_agent_v1__spawn_agent", message="SAY hi from below"))
    assert "agent_id" in _said(events)
    assert len(set(served.rewards()) - before) >= 2


@covers("Codex CLI", "image")
def test_codex_has_images_and_schemas(served: Stack, tmp_path: Path) -> None:
    needs(environments.CODEX)
    (tmp_path / "a.png").write_bytes(base64.b64decode(PNG))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    (tmp_path / "s.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    # what comes before the second image, and the schema; a conversation with an image is not trained
    with served.trains(2):
        given = codex(served, tmp_path, "SAY a picture", "-i", "a.png")
        viewed = codex(served, tmp_path, call("view_image", path="a.png"))
        formed = codex(served, tmp_path, 'SAY {"city": "Rome"}', "--output-schema", "s.json")
    assert _said(given) == "a picture"
    assert _said(viewed).startswith("The tools say: ")
    assert json.loads(_said(formed)) == {"city": "Rome"}


def _kind(event: dict[str, Any]) -> str | None:
    return event["item"]["type"] if event["type"] == "item.completed" else None


def _said(events: list[dict[str, Any]]) -> str:
    return "\n".join(event["item"]["text"] for event in events if _kind(event) == "agent_message")


@covers("Qwen Code", "streamed", "tools", "second turn", "resume")
def test_qwen_code(served: Stack, tmp_path: Path) -> None:
    needs(environments.QWEN_CODE)
    shell = {"command": SHELL["command"], "is_background": False}
    with served.trains(4):
        first = qwen(served, tmp_path, "SAY hello to you")
        tool = qwen(served, tmp_path, call("run_shell_command", **shell), "--continue")
        again = qwen(served, tmp_path, "SAY still here", "--continue")
    assert first == "hello to you"
    assert tool.startswith("The tools say: ") and "chosen" in tool
    assert (tmp_path / "ran.txt").read_text() == "chosen\n"
    assert again == "still here"


@covers("Qwen Code", "parallel tools")
def test_qwen_code_runs_tools_at_once(served: Stack, tmp_path: Path) -> None:
    needs(environments.QWEN_CODE)
    orders = [f"echo {name} chosen >> {name}.txt" for name in ("one", "two")]
    with served.trains(2):
        qwen(served, tmp_path, "\n".join(call("run_shell_command", command=one, is_background=False) for one in orders))
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("one", "two")] == ["one chosen\n", "two chosen\n"]


@covers("mini-swe-agent", "plain", "tools", "parallel tools", "second turn")
def test_mini_swe_agent(served: Stack, tmp_path: Path) -> None:
    needs(environments.MINI_SWE)
    orders = "\n".join(call("bash", command=f"echo {name} chosen >> {name}.txt") for name in ("one", "two"))
    command, env = mini_command(served, f"\n{orders}", "-c", "agent.step_limit=2")
    # the calls, and what comes of them
    with served.trains(2):
        run(command, tmp_path, env)
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("one", "two")] == ["one chosen\n", "two chosen\n"]


_OPENCODE_CELLS = ("streamed", "tools", "parallel tools", "second turn", "resume", "image", "interruption")
_OPENCODE = {"chat": "@ai-sdk/openai-compatible", "Responses": "@ai-sdk/openai", "Messages": "@ai-sdk/anthropic"}


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(package, marks=covers(f"opencode, {name}", *_OPENCODE_CELLS), id=name)
        for name, package in _OPENCODE.items()
    ],
)
def test_opencode(served: Stack, tmp_path: Path, package: str) -> None:
    needs(environments.OPENCODE)
    orders = "\n".join(
        call("bash", command=f"echo {name} chosen >> {name}.txt", description="x") for name in ("a", "b")
    )
    (tmp_path / "a.png").write_bytes(base64.b64decode(PNG))
    # the calls and what comes of them; the answer; titles are answered once and not trained, an image is not trained
    with served.trains(3), served.passes("opencode-title", 2):
        tool = opencode(served, tmp_path, package, orders)
        again = opencode(served, tmp_path, package, "SAY still here", "-c")
        image = opencode(served, tmp_path, package, "SAY a picture", "-f", "a.png")
    assert tool.startswith("The tools say: ")
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("a", "b")] == ["a chosen\n", "b chosen\n"]
    assert again == "still here"
    assert image == "a picture"
    command, env = opencode_command(served, tmp_path, package)
    with served.trains(0):
        interrupt([*command, f"\nWAIT {tmp_path / 'word'}\n"], tmp_path, env, tmp_path / "word.asked")
        until_there(tmp_path / "word.left")


_USUAL = ("plain", "streamed", "tools", "parallel tools", "second turn", "image", "interruption")
_PROVIDERS = {
    "responses": "AI SDK, Responses",
    "chat": "AI SDK, chat",
    "anthropic": "AI SDK, Anthropic",
    "compatible": "AI SDK, openai-compatible",
}


@pytest.mark.parametrize(
    "provider", [pytest.param(name, marks=covers(row, *_USUAL)) for name, row in _PROVIDERS.items()]
)
def test_ai_sdk(served: Stack, tmp_path: Path, provider: str) -> None:
    needs(environments.AI_SDK)
    app = [str(APPS / "ai_sdk_app.mjs"), served.base_url, str(environments.AI_SDK.folder), provider]
    # plain, streamed; twice two turns with tools and one after them; an object (an image is not trained)
    with served.trains(9):
        result = json.loads(run([environments.AI_SDK.command("node"), *app], tmp_path))
    assert result["plain"] == result["streamed"] == "You said: Hello"
    assert result["deltas"] > 1
    assert result["tools"] == ["The tools say: Rome is sunny, Oslo is sunny."] * 2
    assert result["again"] == ["You said: And now?"] * 2
    assert result["ran"] == 4
    # of a response it shows summaries alone, and reads no reasoning in chats with OpenAI
    assert result["thought"] == (None if provider in ("responses", "chat") else "of both")
    assert result["object"] == {"city": "Rome"}
    assert result["image"] == "You said: What is it?[image_url]"
    with served.trains(0):
        interrupt(
            [environments.AI_SDK.command("node"), *app, str(tmp_path / "word")], tmp_path, {}, tmp_path / "word.asked"
        )
        until_there(tmp_path / "word.left")
