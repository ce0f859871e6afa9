"""The clients that the product does not depend on, each in an environment of its own under ``.client-envs/``.

``python -m tests.clients.environments`` installs what is missing; the versions are exact, and what they are is all that
is known to work. LiteLLM, which aider brings, had compromised releases: those are never installed.
"""

from __future__ import annotations

import fcntl
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
class Environment:
    """One client and what it needs, in a folder of its own.

    Attributes:
        requirement: what is installed, with exact versions, separated by spaces.
    """

    name: str
    requirement: str

    @property
    def folder(self) -> Path:
        return HOME / self.name

    @property
    def _mark(self) -> Path:
        """Says what was installed, once it is whole."""
        return HOME / f"{self.name}.installed"

    @property
    def installed(self) -> bool:
        return self._mark.exists() and self._mark.read_text() == self.requirement

    def install(self) -> None:
        """Make the folder anew, unless another process has just done it."""
        HOME.mkdir(exist_ok=True)
        with self._mark.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.installed:
                shutil.rmtree(self.folder, ignore_errors=True)
                self._install()
                self._mark.write_text(self.requirement)

    def _install(self) -> None:
        raise NotImplementedError

    def command(self, name: str) -> str:
        """A command that a package brings."""
        raise NotImplementedError


class PythonEnv(Environment):
    """Packages of PyPI and what they need."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def command(self, name: str) -> str:
        return str(self.python.with_name(name))

    def _install(self) -> None:
        constraints = HOME / "constraints.txt"
        constraints.write_text(_NEVER)
        _run(_uv(), "venv", "--quiet", "--python", sys.executable, str(self.folder))
        pip = (_uv(), "pip", "install", "--quiet", "--python", str(self.python), "-c", str(constraints))
        _run(*pip, *self.requirement.split())


class NodeEnv(Environment):
    """Packages of npm."""

    def command(self, name: str) -> str:
        return str(self.folder / "node_modules" / ".bin" / name)

    def _install(self) -> None:
        self.folder.mkdir(parents=True)
        npm = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(self.folder))
        _run(*npm, *self.requirement.split())


AIDER = PythonEnv("aider", "aider-chat==0.86.2")
DSPY = PythonEnv("dspy", "dspy==3.4.1")
HAYSTACK = PythonEnv("haystack", "haystack-ai==3.3.0")
INSTRUCTOR = PythonEnv("instructor", "instructor==1.17.0")
LANGGRAPH = PythonEnv("langgraph", "langgraph==1.2.22 langchain-openai==1.7.3")
#: litellm asks for mcp where a request has tools
LITELLM = PythonEnv("litellm", "litellm==1.106.2 mcp==2.3.0")
LLAMA_INDEX = PythonEnv("llama-index", "llama-index-llms-openai-like==0.8.1")
MINI_SWE = PythonEnv("mini-swe-agent", "mini-swe-agent==2.4.6 mcp==2.3.0")
PYDANTIC_AI = PythonEnv("pydantic-ai", "pydantic-ai-slim[openai,anthropic]==2.68.0")
SMOLAGENTS = PythonEnv("smolagents", "smolagents[openai]==1.26.0")
AGENTS = PythonEnv("openai-agents", "openai-agents==0.24.0")
LANGCHAIN = PythonEnv("langchain-openai", "langchain-openai==1.7.3")
LLM = PythonEnv("llm", "llm==0.36")
#: For clients that need a later node than the oldest that is maintained.
_NODE = "node@22.23.3"
NODE = NodeEnv("openai-node", f"openai@7.57.0 {_NODE}")
#: a program of its own; node only installs it
CLAUDE_CODE = NodeEnv("claude-code", "@anthropic-ai/claude-code@2.1.330")
CODEX = NodeEnv("codex", "@openai/codex@0.169.0")
OPENCODE = NodeEnv("opencode", "opencode-ai@1.18.33")
QWEN_CODE = NodeEnv("qwen-code", f"@qwen-code/qwen-code@0.24.4 {_NODE}")
AI_SDK = NodeEnv(
    "ai-sdk",
    f"ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7 {_NODE}",
)
#: What AgentJet's client imports; AgentJet itself is a checkout (:mod:`tests.clients.test_agentjet`).
AGENTJET = PythonEnv(
    "agentjet",
    "agentscope==1.0.21 mcp==1.19.0 pydantic==2.11.9 beast-logger==0.1.8 tenacity==9.2.1 loguru==0.7.3 networkx==3.6.1 "
    "hydra-core==1.3.8 datasets==5.2.0 swanlab==0.10.3 greenlet==3.5.6",
)
#: No client: what a finder of private parts calls.
PRESIDIO = PythonEnv("presidio", "presidio-analyzer==2.2.366 spacy==3.8.18 pydantic==2.14.4 orjson==3.13.0")
#: No client: what checks the page's scripts and screens.
PAGE_CHECKS = NodeEnv("page-checks", "typescript@5.9.3 axe-core@4.14.1")
ALL = (
    AIDER,
    AGENTS,
    AI_SDK,
    CLAUDE_CODE,
    CODEX,
    DSPY,
    HAYSTACK,
    INSTRUCTOR,
    LANGCHAIN,
    LANGGRAPH,
    LITELLM,
    LLAMA_INDEX,
    LLM,
    MINI_SWE,
    NODE,
    OPENCODE,
    PRESIDIO,
    PYDANTIC_AI,
    QWEN_CODE,
    SMOLAGENTS,
)


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
    for one in (*ALL, *((AGENTJET,) if os.environ.get("AGENTJET") else ())):
        if not one.installed:
            print(f"installing {one.requirement} into {HOME / one.name}", flush=True)
            one.install()


if __name__ == "__main__":
    main()
