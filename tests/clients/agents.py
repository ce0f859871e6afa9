"""Other people's agents without a terminal: how each is started with nothing changed but the address it asks.

Homes are thrown away, and whatever would leave this machine (telemetry, updates, plugins, lists of models) is off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.environments import CLAUDE_CODE, CODEX, MINI_SWE, OPENCODE, QWEN_CODE
from tests.clients.running import run
from tests.clients.stack import MODEL, Stack

#: Whatever Claude Code asks for by itself: its model is another with each version, and its helpers have their own.
CLAUDE_MODELS = ["claude-*"]

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
#: Codex as it comes, with OpenAI's address replaced; the model is its own.
_CODEX_AS_IT_COMES = """\
openai_base_url = "{url}"
check_for_update_on_startup = false
[features]
plugins = false
apps = false
[analytics]
enabled = false
[otel]
exporter = "none"
"""
CODEX_MODEL = "gpt-6.1-sol"
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


def codex_command(
    served: Stack, home: Path, prompt: str, *options: str, resume: bool = False, as_it_comes: bool = False
) -> Command:
    """``codex exec`` and its environment; its settings are written into ``home``. ``as_it_comes``: only its
    ``openai_base_url`` is set."""
    (home / ".codex").mkdir(exist_ok=True)
    settings = _CODEX_AS_IT_COMES if as_it_comes else _CODEX
    (home / ".codex" / "config.toml").write_text(settings.format(model=MODEL, url=served.base_url))
    (home / ".codex" / "auth.json").write_text(json.dumps({"OPENAI_API_KEY": "any"}))
    command = [CODEX.command("codex"), "exec", *(["resume", "--last"] if resume else []), "--json"]
    command += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt, *options]
    return command, {"SWARM_API_KEY": "any"}


def codex(served: Stack, home: Path, prompt: str, *options: str, **how: bool) -> list[dict[str, Any]]:
    """The events that ``codex exec`` prints; ``how`` as of :func:`codex_command`."""
    command, env = codex_command(served, home, prompt, *options, **how)
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
    """What ``opencode run`` prints; ``package`` as of :func:`opencode_command`."""
    command, own = opencode_command(served, home, package, context)
    # its arguments it puts between quotes
    return run([*command, *options], home, own | (env or {}), prompt).strip()


def opencode_command(served: Stack, home: Path, package: str, context: int = 100_000) -> Command:
    """``opencode run`` and its environment; its settings are written into ``home``. ``package`` is the provider's,
    which tells the dialect."""
    config = home / ".config" / "opencode"
    (config / "node_modules").mkdir(parents=True, exist_ok=True)
    (config / "package-lock.json").write_text(json.dumps(_OPENCODE_LOCK))
    limits = {"context": context, "output": 1_000}
    sees = {"input": ["text", "image"], "output": ["text"]}
    provider = {
        "npm": package,
        "options": {"baseURL": served.base_url, "apiKey": "any"},
        "models": {MODEL: {"tool_call": True, "attachment": True, "modalities": sees, "limit": limits}},
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
    return [OPENCODE.command("opencode"), "run"], own


def qwen_command(served: Stack, home: Path, prompt: str, *options: str) -> Command:
    """``qwen -p`` and its environment; its settings are written into ``home``."""
    (home / ".qwen").mkdir(exist_ok=True)
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        # asks the model beside the conversation what to remember of it
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    }
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    command = [QWEN_CODE.command("qwen"), "-p", prompt, "--yolo", "--auth-type", "openai", *options]
    return command, {"OPENAI_BASE_URL": served.base_url, "OPENAI_API_KEY": "any", "OPENAI_MODEL": MODEL}


def qwen(served: Stack, home: Path, prompt: str, *options: str) -> str:
    """What ``qwen -p`` prints."""
    command, env = qwen_command(served, home, prompt, *options)
    return run(command, home, env).strip()


def mini_command(served: Stack, prompt: str, *options: str) -> Command:
    """``mini`` and its environment; ``prompt`` is its task."""
    command = [MINI_SWE.command("mini"), "-m", f"openai/{MODEL}", "-y", "--exit-immediately", "-t", prompt]
    env = {
        "OPENAI_API_BASE": served.base_url,
        "OPENAI_API_KEY": "any",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
    }
    return [*command, "-c", "mini.yaml", *options], env


def _lines(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
