"""The clients that the product does not depend on, each in an environment of its own under ``.client-envs/``.

``python -m tests.clients.environments`` installs what is missing; the versions are exact, and what they are is all that
is known to work. LiteLLM, which aider brings, had compromised releases: those are never installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent.parent.parent / ".client-envs"
_SECONDS = 1200
_NEVER = "litellm!=1.82.7,!=1.82.8,!=1.107.0\n"


@dataclass(frozen=True)
class PythonEnv:
    """One package of PyPI and what it needs."""

    name: str
    requirement: str

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python"

    def command(self, name: str) -> str:
        """A command that the package brings."""
        return str(self.python.parent / name)

    @property
    def installed(self) -> bool:
        return _mark(self.name).exists() and _mark(self.name).read_text() == self.requirement

    def install(self) -> None:
        """Make the environment anew."""
        constraints = HOME / "constraints.txt"
        constraints.write_text(_NEVER)
        folder = self.python.parent.parent
        shutil.rmtree(folder, ignore_errors=True)
        _run(_uv(), "venv", "--quiet", "--python", sys.executable, str(folder))
        _run(_uv(), "pip", "install", "--quiet", "--python", str(self.python), "-c", str(constraints), self.requirement)
        _mark(self.name).write_text(self.requirement)


@dataclass(frozen=True)
class NodeEnv:
    """Packages of npm, separated by spaces."""

    name: str
    requirement: str

    @property
    def folder(self) -> Path:
        return HOME / self.name

    def command(self, name: str) -> str:
        """A command that a package brings."""
        return str(self.folder / "node_modules" / ".bin" / name)

    @property
    def installed(self) -> bool:
        return _mark(self.name).exists() and _mark(self.name).read_text() == self.requirement

    def install(self) -> None:
        """Make the folder anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        npm = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(self.folder))
        _run(*npm, *self.requirement.split())
        _mark(self.name).write_text(self.requirement)


AIDER = PythonEnv("aider", "aider-chat==0.86.2")
AGENTS = PythonEnv("openai-agents", "openai-agents==0.24.0")
LANGCHAIN = PythonEnv("langchain-openai", "langchain-openai==1.7.3")
LLM = PythonEnv("llm", "llm==0.36")
#: 7.x needs a later node than the oldest that is maintained
NODE = NodeEnv("openai-node", "openai@6.49.0")
CLAUDE_CODE = NodeEnv("claude-code", "@anthropic-ai/claude-code@2.1.197")
CODEX = NodeEnv("codex", "@openai/codex@0.169.0")
OPENCODE = NodeEnv("opencode", "opencode-ai@1.18.33")
AI_SDK = NodeEnv(
    "ai-sdk",
    "ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.138 @ai-sdk/openai-compatible@2.0.87 zod@4.6.7",
)
ALL = (AIDER, AGENTS, LANGCHAIN, LLM, NODE, CLAUDE_CODE, CODEX, OPENCODE, AI_SDK)


def _mark(name: str) -> Path:
    """Says what was installed, once it is whole."""
    return HOME / f"{name}.installed"


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        sys.exit("uv is needed to install the clients: pip install uv")
    return found


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, env=os.environ)
    except (subprocess.SubprocessError, OSError) as exc:
        sys.exit(f"{' '.join(command)}: {exc}")


def main() -> None:
    HOME.mkdir(exist_ok=True)
    for one in ALL:
        if not one.installed:
            print(f"installing {one.requirement} into {HOME / one.name}", flush=True)
            one.install()


if __name__ == "__main__":
    main()
