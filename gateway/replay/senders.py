"""Two ways to send one prompt: the OpenAI wire over HTTP, or an application's own command.

Invariant: every failure becomes an ``Outcome`` with its kind; a cancelled command leaves no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from swarm.errors import ConfigError
from swarm.types import Model

_PLACEHOLDER = "{question}"
_MAX_PAUSE = 10.0


class Prompt(Model):
    """One user request: its chat messages, and what is asked as plain text for a command line."""

    text: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    ``failure`` is empty when it was answered, else its kind; ``detail`` is the first line of what was said. ``reward``
    is the mean of the request's group, ``policy_version`` the weights that answered, where the answer tells.
    ``retry_after`` are the seconds the server asked to wait.
    """

    seconds: float
    failure: str = ""
    detail: str = ""
    reward: float | None = None
    policy_version: int | None = None
    completion_tokens: int | None = None
    retry_after: float = 0.0


class Sender(Protocol):
    """Sends one prompt and never raises for what the other side does."""

    async def send(self, prompt: Prompt) -> Outcome: ...


class HttpSender:
    """``POST {base_url}/chat/completions``, not streaming.

    Args:
        client: pooled connections; its timeout is the deadline of one request.
        base_url: ends with ``/v1``.
        body: further fields of each request (model, temperature, ...).
    """

    def __init__(self, client: httpx.AsyncClient, base_url: str, api_key: str, body: dict[str, Any]) -> None:
        self._client = client
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._body = body

    async def send(self, prompt: Prompt) -> Outcome:
        began = time.monotonic()
        try:
            answer = await self._client.post(
                self._url, json={**self._body, "messages": prompt.messages}, headers=self._headers
            )
        except httpx.TimeoutException as exc:
            return Outcome(time.monotonic() - began, "timeout", str(exc) or type(exc).__name__)
        except httpx.HTTPError as exc:
            return Outcome(time.monotonic() - began, "connection", str(exc) or type(exc).__name__)
        return read_answer(answer, time.monotonic() - began)


def read_answer(answer: httpx.Response, seconds: float) -> Outcome:
    """The outcome that an HTTP answer stands for."""
    try:
        data: Any = answer.json()
    except ValueError:
        data = None
    if answer.status_code >= 400:
        error: Any = data.get("error") if isinstance(data, dict) else None
        code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, answer.text)
        pause = _number(answer.headers.get("retry-after")) or 0.0
        return Outcome(
            seconds,
            f"HTTP {answer.status_code}" + (f" {code}" if code else ""),
            str(message).strip().partition("\n")[0][:300],
            retry_after=min(_MAX_PAUSE, pause),
        )
    if not isinstance(data, dict) or not data.get("choices"):
        return Outcome(seconds, "no choices", answer.text[:300])
    version = _number(answer.headers.get("x-swarm-policy-version"))
    tokens = (data.get("usage") or {}).get("completion_tokens")
    return Outcome(
        seconds,
        reward=_number(answer.headers.get("x-swarm-reward-mean")),
        policy_version=None if version is None else int(version),
        completion_tokens=tokens if isinstance(tokens, int) else None,
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class CommandSender:
    """Runs an application's command per prompt; exit code 0 is an answer.

    Args:
        template: a command line with ``{question}`` where the prompt goes (as one argument, never through a shell).
        env: added to our environment, e.g. ``OPENAI_BASE_URL``.
        timeout: seconds, after which the command and all it started is killed.

    Raises:
        ConfigError: the template has no ``{question}`` or is not a command line.
    """

    def __init__(self, template: str, env: dict[str, str], timeout: float) -> None:
        try:
            self._arguments = shlex.split(template)
        except ValueError as exc:
            raise ConfigError(f"--command is no command line: {exc}") from exc
        if not any(_PLACEHOLDER in argument for argument in self._arguments):
            raise ConfigError(f"--command needs {_PLACEHOLDER} where the prompt goes")
        self._env = {**os.environ, **env}
        self._timeout = timeout

    async def send(self, prompt: Prompt) -> Outcome:
        began = time.monotonic()
        command = [argument.replace(_PLACEHOLDER, prompt.text) for argument in self._arguments]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as exc:
            return Outcome(time.monotonic() - began, "command not started", f"{command[0]}: {exc.strerror}")
        try:
            async with asyncio.timeout(self._timeout):
                _, errors = await process.communicate()
        except TimeoutError:
            return Outcome(time.monotonic() - began, "timeout", f"no end after {self._timeout:.0f} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        seconds = time.monotonic() - began
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [""]
            return Outcome(seconds, f"exit code {process.returncode}", lines[-1][:300])
        return Outcome(seconds)
