"""From successive statuses of a swarm server to the events of one engine's life: boot, ready, steps, end.

Invariant: every event is told once, and an engine that died raises with the reason and its last lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.errors import SwarmGatewayError
from swarm.protocol import ServerStatus
from swarm.states import EngineState

#: The kind of event and its values, ready for JSON.
OnEvent = Callable[[str, dict[str, Any]], None]


class UpFailedError(SwarmGatewayError):
    """Something that ``up`` runs has ended by itself; ``last_lines`` are the last it said, ``log`` holds the rest."""

    def __init__(self, message: str, last_lines: list[str], log: Path) -> None:
        super().__init__(message)
        self.last_lines = last_lines
        self.log = log


class EngineWatch:
    """Sees statuses, tells events.

    Args:
        total_steps: the job's last step; an engine that goes offline after it has finished, before it has died.
        boot_timeout: seconds from construction to the first ROLLING.
        run_dir: where the engine's resolved configuration is written and its log lies.
        on_event: told ``config``, ``continued``, ``boot``, ``ready``, ``state``, ``step`` and ``finished`` with their
            values.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        boot_timeout: float,
        run_dir: Path,
        on_event: OnEvent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._boot_timeout = boot_timeout
        self._run_dir = run_dir
        self._on_event = on_event
        self._clock = clock
        self._began = clock()
        self._state: EngineState | None = None
        self._doing: tuple[str, str] | None = None
        self._config_written = False
        self._ready = False
        self._last_step = 0
        # by batch: an engine that goes on without a checkpoint counts its steps from one again
        self._told: set[str] = set()
        self.finished = False

    @property
    def _log(self) -> Path:
        return self._run_dir / "engine.log"

    def see(self, status: ServerStatus) -> None:
        """Tell what is new in ``status``.

        Raises:
            UpFailedError: the engine died, or boots longer than it may.
        """
        self._see_config(status)
        if self._state is None and status.engine.engine_status is EngineState.BOOTING and status.steps:
            # a run that a crash cut off goes on: its steps were told in its earlier life
            self._told.update(step.batch_id for step in status.steps)
            self._last_step = status.steps[-1].step
            self._on_event("continued", {"step": self._last_step})
        self._see_state(status)
        for step in status.steps:
            if step.batch_id not in self._told:
                self._told.add(step.batch_id)
                self._last_step = step.step
                self._on_event("step", step.model_dump(mode="json"))
        if status.engine.engine_status is not EngineState.OFFLINE:
            return
        if self._last_step < self._total_steps:
            reason = status.engine.engine_status_detail or "no reason given"
            raise UpFailedError(f"the engine went offline: {reason}", status.last_lines, self._log)
        self.finished = True
        self._on_event("finished", {"step": self._last_step})

    def _see_config(self, status: ServerStatus) -> None:
        if status.resolved_config and not self._config_written:
            self._config_written = True
            path = self._run_dir / "engine-config.json"
            path.write_text(json.dumps(status.resolved_config, indent=1, default=str))
            self._on_event("config", {"path": str(path)})

    def _see_state(self, status: ServerStatus) -> None:
        state, detail = status.engine.engine_status, status.engine.engine_status_detail
        seconds = round(self._clock() - self._began, 1)
        if state is EngineState.BOOTING:
            if self._doing != (status.boot_stage, detail):
                self._doing = (status.boot_stage, detail)
                self._on_event("boot", {"stage": status.boot_stage, "detail": detail, "seconds": seconds})
            if seconds > self._boot_timeout:
                message = f"the engine is not ready after {seconds:.0f} s, last: {detail or status.boot_stage}"
                raise UpFailedError(message, status.last_lines, self._log)
        elif state is not EngineState.OFFLINE and not self._ready:
            self._ready = True
            self._on_event("ready", {"model": status.model, "seconds": seconds})
        if state is not self._state:
            self._state = state
            self._on_event("state", {"state": str(state), "detail": detail})
