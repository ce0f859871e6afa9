"""A job resolved into verl's configuration by the engine's own code, in a process that starts nothing.

Invariant: what it says is what an engine with the same code would run; this process imports neither hydra nor verl.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.concurrency import kill_group
from swarm.control_protocol import ResolvedJob
from swarm.errors import ConfigError, EngineError
from swarm.job import OURS, Layered, plain_fields
from swarm.server.engine.supervisor import ENGINE_COMMAND, engine_environment

_SECONDS = 60.0
#: how long a process that was killed may take to be gone
_KILL_SECONDS = 2.0


class Resolver:
    """Resolves jobs for the engine of ``command``."""

    def __init__(self, run_dir: Path, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._run_dir = run_dir.resolve()
        self._command = (*command, "--resolve")
        # each takes a core for seconds
        self._lock = asyncio.Lock()

    async def resolve(self, layers: Layered, code: Path | None, *, runs_here: bool = False) -> ResolvedJob:
        """What an engine would run.

        Args:
            layers: the job.
            code: the synced code that it would import first.
            runs_here: refuse what this machine cannot run, too.

        Raises:
            ConfigError: a key or a value is wrong, or verl is not installed.
            EngineError: the process failed, or took longer than a minute, its turn included.
        """
        question = {
            "job": plain_fields(layers.job),
            "fields": layers.fields,
            "overrides": layers.overrides,
            "run_dir": str(self._run_dir),
            "runs_here": runs_here,
        }
        environ = engine_environment("", "", self._run_dir, code)
        try:
            async with asyncio.timeout(_SECONDS), self._lock:
                output, errors, status = await _output(self._command, json.dumps(question).encode(), environ)
        except TimeoutError:
            raise EngineError(f"the configuration was not resolved within {_SECONDS:g} s") from None
        except OSError as exc:
            raise EngineError(f"the configuration cannot be resolved: {exc}") from exc
        answer = _answer(output)
        if answer is None:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {status}"]
            raise EngineError(f"the configuration cannot be resolved: {last[0]}")
        if "error" in answer:
            raise ConfigError(answer["error"], param=answer.get("param"))
        fields = {name: layers.fields.get(name, OURS) for name in type(layers.job).model_fields if name != "overrides"}
        return ResolvedJob(job=layers.job, job_sources=fields, **answer)


async def _output(command: Sequence[str], question: bytes, environ: dict[str, str]) -> tuple[bytes, bytes, int | None]:
    """Stdout, stderr and exit code of ``command``; if it is given up, it and all that it started are killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
        start_new_session=True,
    )
    try:
        return *await process.communicate(question), process.returncode
    except BaseException:
        kill_group(process.pid)
        # it is gone once its pipes are closed, which a process that left the group may hold open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await process.wait()
        raise


def _answer(output: bytes) -> dict[str, Any] | None:
    # the last line is ours: libraries may print before it
    lines = output.splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
