"""Other people's agents without a terminal: how each is started with nothing changed but the address it asks.

Homes are thrown away, and whatever would leave this machine (telemetry, updates, plugins, lists of models) is off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.environments import CLAUDE_CODE, CODEX, OPENCODE
from tests.clients.running import run
from tests.clients.stack import MODEL, Stack

#: What Claude Code asks for by itself: its model, and that of its quick helpers.
CLAUDE_MODELS = ["claude-opus-4-8", "claude-haiku-4-5-20251001"]

_CODEX = """\
model = "{model}"
model_provider = "swarm"
check_for_update_on_startup = false
[model_providers.swarm]
name = "swarm"
base_url = "{url}"
env_key = "SWARM_API_KEY"
wire_api = "responses"
[features]
plugins = false
apps = false
[analytics]
enabled = false
[otel]
exporter = "none"
"""
#: opencode installs this from npm into its folder of settings unless it is locked there.
_OPENCODE_LOCK = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}


Command = tuple[list[str], dict[str, str]]


def claude_command(served: Stack, prompt: str, *options: str) -> Command:
    """``claude -p`` and its environment."""
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }
    command = [CLAUDE_CODE.command("claude"), "-p", prompt, "--output-format", "stream-json", "--verbose", *options]
    return [*command, "--allowedTools", "Bash", "Read", "Agent", "WebSearch"], env


def claude(served: Stack, home: Path, prompt: str, *options: str) -> list[dict[str, Any]]:
    """The messages that ``claude -p`` prints; the last is the result."""
    command, env = claude_command(served, prompt, *options)
    return _lines(run(command, home, env))


def codex_command(served: Stack, home: Path, prompt: str, *options: str, resume: bool = False) -> Command:
    """``codex exec`` and its environment; its settings are written into ``home``."""
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(_CODEX.format(model=MODEL, url=served.base_url))
    command = [CODEX.command("codex"), "exec", *(["resume", "--last"] if resume else []), "--json"]
    command += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt, *options]
    return command, {"SWARM_API_KEY": "any"}


def codex(served: Stack, home: Path, prompt: str, *options: str, resume: bool = False) -> list[dict[str, Any]]:
    """The events that ``codex exec`` prints."""
    command, env = codex_command(served, home, prompt, *options, resume=resume)
    return _lines(run(command, home, env))


def opencode(
    served: Stack,
    home: Path,
    package: str,
    prompt: str,
    *options: str,
    context: int = 100_000,
    env: dict[str, str] | None = None,
) -> str:
    """What ``opencode run`` prints; ``package`` is the provider's, which tells the dialect."""
    config = home / ".config" / "opencode"
    (config / "node_modules").mkdir(parents=True, exist_ok=True)
    (config / "package-lock.json").write_text(json.dumps(_OPENCODE_LOCK))
    limits = {"context": context, "output": 1_000}
    provider = {
        "npm": package,
        "options": {"baseURL": served.base_url, "apiKey": "any"},
        "models": {MODEL: {"tool_call": True, "limit": limits}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"swarm/{MODEL}",
        "small_model": f"swarm/{MODEL}",
        "enabled_providers": ["swarm"],
        "provider": {"swarm": provider},
    }
    (config / "opencode.json").write_text(json.dumps(settings))
    own = {
        "XDG_CONFIG_HOME": str(home / ".config"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    }
    # its arguments it puts between quotes
    return run([OPENCODE.command("opencode"), "run", *options], home, own | (env or {}), prompt).strip()


def _lines(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
