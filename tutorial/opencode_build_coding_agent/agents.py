"""Claude Code, Codex and opencode without a terminal: how each is started on a task, at the gateway's address.

Each runs in a home directory of its own, so that nothing of the user's settings is read or changed, and prints a JSON
object a line, one of which names its session. Whatever would leave this machine is off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: what each prints its session as: Claude Code, Codex, opencode
_SESSIONS = ("session_id", "thread_id", "sessionID")
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")
#: tokens that opencode believes the model to read and to write; `config.yaml` has the job's
_CONTEXT, _OUTPUT = 32_000, 2_000
#: the gateway's route takes any name; Claude Code asks for its own
_MODEL = "policy"
_CODEX = f"""\
model = "{_MODEL}"
model_provider = "swarm"
check_for_update_on_startup = false
[model_providers.swarm]
name = "swarm"
base_url = "%s"
env_key = "SWARM_API_KEY"
wire_api = "responses"
[features]
plugins = false
apps = false
[analytics]
enabled = false
"""


@dataclass(frozen=True)
class Start:
    """A command with the variables it needs; ``typed`` is its standard input."""

    command: list[str]
    env: dict[str, str]
    typed: str = ""


def _claude(base_url: str, home: Path, order: str) -> Start:
    command = ["claude", "-p", order, "--output-format", "stream-json", "--verbose"]
    env = {
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Start([*command, "--allowedTools", "Bash", "Edit", "Read", "Write"], env)


def _codex(base_url: str, home: Path, order: str) -> Start:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(_CODEX % base_url)
    options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Start(["codex", "exec", *options, order], {"SWARM_API_KEY": "none"})


def _opencode(base_url: str, home: Path, order: str) -> Start:
    config = home / ".config" / "opencode"
    # without the lock it would install its plugins' package from npm
    (config / "node_modules").mkdir(parents=True)
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    (config / "package-lock.json").write_text(json.dumps(lock))
    known: dict[str, Any] = {"tool_call": True, "limit": {"context": _CONTEXT, "output": _OUTPUT}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": base_url, "apiKey": "none"},
        "models": {_MODEL: known},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"swarm/{_MODEL}",
        "small_model": f"swarm/{_MODEL}",
        "enabled_providers": ["swarm"],
        "provider": {"swarm": provider},
    }
    (config / "opencode.json").write_text(json.dumps(settings))
    off = ("AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "MODELS_FETCH", "SHARE")
    env = {f"OPENCODE_DISABLE_{name}": "1" for name in off} | {"XDG_CONFIG_HOME": str(home / ".config")}
    return Start(["opencode", "run", "--format", "json"], env, order)


AGENTS: dict[str, Callable[[str, Path, str], Start]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}


def start(agent: str, base_url: str, home: Path, order: str) -> Start:
    """How ``agent`` is started on ``order``; its settings are written into ``home``, an empty folder.

    Args:
        agent: one of :data:`AGENTS`.
        base_url: the gateway's, with ``/v1``.
    """
    began = AGENTS[agent](base_url, home, order)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return Start(began.command, {**kept, "HOME": str(home), **began.env}, began.typed)


def session_of(printed: str) -> str:
    """The session that an agent names in what it printed, or an empty string."""
    for line in printed.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            for name in _SESSIONS:
                if event.get(name):
                    return str(event[name])
    return ""
