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

from swarm.errors import ConfigError, EngineError
from swarm.layers import OURS, Layered
from swarm.protocol import ResolvedJob
from swarm.server.engine.supervisor import ENGINE_COMMAND, engine_environment

_SECONDS = 60.0


class Resolver:
    """Resolves jobs.

    Args:
        run_dir: of the server.
        command: the engine's, without a job.
    """

    def __init__(self, run_dir: Path, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._run_dir = run_dir.resolve()
        self._command = (*command, "--resolve")

    async def resolve(self, layers: Layered, code: Path | None) -> ResolvedJob:
        """What an engine would run.

        Args:
            layers: the job.
            code: the synced code that it would import first.

        Raises:
            ConfigError: a key or a value is wrong, or verl is not installed.
            EngineError: the process failed, or took longer than a minute.
        """
        question = {
            "job": layers.job.model_dump(mode="json"),
            "fields": layers.fields,
            "overrides": layers.overrides,
            "run_dir": str(self._run_dir),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=engine_environment("", "", self._run_dir, code),
            )
        except OSError as exc:
            raise EngineError(f"the configuration cannot be resolved: {exc}") from exc
        try:
            async with asyncio.timeout(_SECONDS):
                output, errors = await process.communicate(json.dumps(question).encode())
        except TimeoutError:
            raise EngineError(f"the configuration was not resolved within {_SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        answer = _answer(output)
        if answer is None:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise EngineError(f"the configuration cannot be resolved: {last[0]}")
        if "error" in answer:
            raise ConfigError(answer["error"], param=answer.get("param"))
        fields = {name: layers.fields.get(name, OURS) for name in type(layers.job).model_fields if name != "overrides"}
        return ResolvedJob(job=layers.job, job_sources=fields, **answer)


def _answer(output: bytes) -> dict[str, Any] | None:
    # the last line is ours: libraries may print before it
    lines = output.splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
