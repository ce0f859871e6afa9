"""Two ways to send one prompt: an OpenAI request over HTTP, or an application's own command.

Invariant: every failure becomes an ``Outcome`` with its kind; a cancelled command leaves no process.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self

from adapters.dialects.jsons import error_in, object_in
from gateway.reports.report import SavedAnswer
from swarm.concurrency import kill_group
from swarm.errors import ConfigError
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient, retry_after
from swarm.protocol import POLICY_VERSION
from swarm.types import Task

_PLACEHOLDER = "{question}"
_MAX_PAUSE = 10.0
#: Statuses of a server that may be ready later.
_NOT_NOW = frozenset({429, 502, 503, 504})
#: Longest answer to a list of models: the gateway waits ``offline_wait_seconds`` for its swarm server.
_LIST_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    ``failure`` is its kind, empty for an answer; ``detail`` is the first line of its message. ``reward`` (mean of the
    request's group) and ``policy_version`` (of the weights that answered) are None if the answer lacks them.
    ``untrained``: why the gateway does not train on it, as far as it says so.
    ``retry_after``: seconds to wait before the next request, as the server asks. ``answers``: the choices, with the
    completion tokens of each where there is one alone.
    """

    seconds: float
    failure: str = ""
    detail: str = ""
    reward: float | None = None
    policy_version: int | None = None
    untrained: str = ""
    retry_after: float = 0.0
    answers: tuple[SavedAnswer, ...] = ()


class Sender(Protocol):
    """Sends the prompt of one task; a failure of the other side is an outcome, never an exception."""

    async def send(self, task: Task) -> Outcome: ...


class HttpSender:
    """``POST {base_url}/chat/completions``, not streaming; a context that closes its connections.

    Args:
        base_url: ends with ``/v1``.
        api_key: sent as the bearer token.
        body: further fields of each request (model, temperature, ...).
        timeout: seconds that one request may take.
        headers: further ones of each request.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        body: Mapping[str, Any],
        timeout: float = 300.0,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._base_url = base_url.rstrip("/")
        key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"content-type": "application/json", **key, **headers}
        self.body = dict(body)
        self._timeout = timeout
        self._http = HttpClient()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def first_model(self) -> str:
        """The first model that ``{base_url}/models`` lists; a server that is not ready is asked again when it says so,
        until ``timeout`` is over.

        Raises:
            ConfigError: the address does not answer, refuses, stays unready, or lists no model.
        """
        url, deadline = f"{self._base_url}/models", time.monotonic() + self._timeout
        try:
            while (answer := await self._http.get(url, _LIST_SECONDS, self._headers)).status in _NOT_NOW:
                pause = min(_MAX_PAUSE, retry_after(answer.headers) or 1.0)
                if time.monotonic() + pause > deadline:
                    reason = error_in(answer.content).get("message", "")
                    raise ConfigError(f"{url} is not ready after {self._timeout:g} s: HTTP {answer.status}: {reason}")
                await asyncio.sleep(pause)
            if answer.status != 200:
                raise ConfigError(f"{url} answers with HTTP {answer.status}; check --base-url and --api-key")
            return str(json.loads(answer.content)["data"][0]["id"])
        except ConnectionBrokenError as exc:
            raise ConfigError(f"{url} does not answer ({exc}); check --base-url") from exc
        except (ValueError, LookupError, TypeError) as exc:
            raise ConfigError(f"{url} lists no model; give --model") from exc

    async def send(self, task: Task) -> Outcome:
        began = time.monotonic()
        content = json.dumps({**self.body, "messages": task.messages}).encode()
        try:
            answer = await self._http.post(f"{self._base_url}/chat/completions", content, self._headers, self._timeout)
        except TimeoutError:
            return Outcome(time.monotonic() - began, "timeout", f"no answer within {self._timeout:g} s")
        except ConnectionBrokenError as exc:
            return Outcome(time.monotonic() - began, "connection", str(exc))
        return read_answer(answer, time.monotonic() - began)


def read_answer(answer: Answer, seconds: float) -> Outcome:
    """The outcome that an HTTP response stands for."""
    text = answer.content.decode(errors="replace")
    if answer.status >= 400:
        error = error_in(text)
        code, message = error.get("code"), error.get("message", text)
        return Outcome(
            seconds,
            f"HTTP {answer.status}" + (f" {code}" if code else ""),
            str(message).strip().partition("\n")[0][:300],
            retry_after=min(_MAX_PAUSE, retry_after(answer.headers)),
        )
    completion = object_in(text) or {}
    if not completion.get("choices"):
        return Outcome(seconds, "no choices", text[:300])
    try:
        answers = _answers(completion)
    except (AttributeError, TypeError, ValueError):
        return Outcome(seconds, "malformed answer", text[:300])
    version = _number(answer.headers.get(POLICY_VERSION))
    return Outcome(
        seconds,
        reward=_number(answer.headers.get("x-swarm-reward-mean")),
        policy_version=None if version is None else int(version),
        untrained=answer.headers.get("x-swarm-drop-reason", ""),
        answers=answers,
    )


def _answers(completion: Mapping[str, Any]) -> tuple[SavedAnswer, ...]:
    choices: list[dict[str, Any]] = completion["choices"]
    tokens = (completion.get("usage") or {}).get("completion_tokens") if len(choices) == 1 else None
    return tuple(
        SavedAnswer(
            message=choice.get("message") or {},
            finish_reason=choice.get("finish_reason") or "stop",
            completion_tokens=tokens or 0,
        )
        for choice in choices
    )


def _number(text: str | None) -> float | None:
    try:
        number = math.nan if text is None else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class CommandSender:
    """Runs an application's command per prompt; exit code 0 is an answer.

    Args:
        template: a command line; the prompt replaces ``{question}``, as (part of) one argument, never through a shell.
        env: added to our environment, e.g. ``OPENAI_BASE_URL``.
        timeout: seconds until the command and all its children are killed.

    Raises:
        ConfigError: the template has no ``{question}``, or its quotes are not closed.
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

    async def send(self, task: Task) -> Outcome:
        began = time.monotonic()
        command = [argument.replace(_PLACEHOLDER, task.main_query) for argument in self._arguments]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            # an argument holds neither a null character nor half of one
            why = getattr(exc, "strerror", None) or exc
            return Outcome(time.monotonic() - began, "command not started", f"{command[0]}: {why}")
        try:
            async with asyncio.timeout(self._timeout):
                _, errors = await process.communicate()
        except TimeoutError:
            return Outcome(time.monotonic() - began, "timeout", f"no end after {self._timeout:.0f} s")
        finally:
            if process.returncode is None:
                kill_group(process.pid)
                await process.wait()
        seconds = time.monotonic() - began
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [""]
            return Outcome(seconds, f"exit code {process.returncode}", lines[-1][:300])
        return Outcome(seconds)
