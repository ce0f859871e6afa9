"""The agents' own hooks end their sessions and say what they were worth, with the files of ``docs/sessions.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import environments
from tests.clients.agents import CLAUDE_MODELS, claude_command, codex_command, opencode
from tests.clients.running import needs, run
from tests.clients.stack import ROOT, Stack, stack

pytestmark = pytest.mark.clients

OUTCOME = """
def on_session_end(session, context):
    return session.feedback.rating if session.feedback else None
"""


def snippet(language: str) -> str:
    """The one block of the page that ends a session."""
    page = (ROOT / "docs" / "sessions.md").read_text()
    [found] = [one for one in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if _ENDS.search(one)]
    return found


_ENDS = re.compile(r"end-session\.sh")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack"), session_hook=OUTCOME, model_aliases=CLAUDE_MODELS) as running:
        yield running


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder whose tests pass once the agent has written a file."""
    (tmp_path / "Makefile").write_text("test:\n\ttest -f done.txt\n")
    (tmp_path / "end-session.sh").write_text(snippet("sh"))
    return tmp_path


def sessions(served: Stack) -> dict[str, Any]:
    return httpx.get(f"{served.url}/status", trust_env=False).json()["sessions"]


def credits(served: Stack, before: dict[str, Any]) -> tuple[int, int, int]:
    """How many sessions were ended by their agents meanwhile, and turns credited and not."""
    served.settled()
    now = sessions(served)
    ended = now["ended"].get("endpoint", 0) - before["ended"].get("endpoint", 0)
    return ended, now["credited"] - before["credited"], now["credit_dropped"] - before["credit_dropped"]


def test_claude_code_ends_its_session(served: Stack, project: Path) -> None:
    needs(environments.CLAUDE_CODE)
    before = sessions(served)
    (project / ".claude").mkdir()
    (project / ".claude" / "settings.json").write_text(snippet("json"))
    command, env = claude_command(served, 'CALL Bash {"command": "touch done.txt", "description": "Do it"}')
    run(command, project, {**env, "SWARM_GATEWAY": served.url})
    assert credits(served, before) == (1, 2, 0)


def test_codex_ends_its_session(served: Stack, project: Path) -> None:
    needs(environments.CODEX)
    before = sessions(served)
    command, env = codex_command(served, project, 'CALL exec_command {"cmd": "touch done.txt"}')
    config = project / ".codex" / "config.toml"
    config.write_text(snippet("toml") + config.read_text())
    run(command, project, {**env, "SWARM_GATEWAY": served.url})
    assert credits(served, before) == (1, 2, 0)


def test_opencode_ends_its_session(served: Stack, project: Path) -> None:
    needs(environments.OPENCODE)
    before = sessions(served)
    (project / ".opencode" / "plugins").mkdir(parents=True)
    (project / ".opencode" / "plugins" / "end-session.js").write_text(snippet("js"))
    order = 'CALL bash {"command": "touch done.txt", "description": "Do it"}'
    opencode(served, project, "@ai-sdk/openai-compatible", order, env={"SWARM_GATEWAY": served.url})
    ended, credited, dropped = credits(served, before)
    # the title is a turn, too
    assert (ended, dropped) == (1, 0) and credited in (2, 3)
