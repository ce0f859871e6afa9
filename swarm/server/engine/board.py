"""What is known about the engine, and waiting for it to change.

Invariant: the state changes only in :meth:`EngineBoard._enter`, along the table of :mod:`swarm.states`, and each change
wakes everyone who waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from swarm.errors import UnavailableError
from swarm.protocol import EngineFailure, EngineStatus
from swarm.server.concurrency import Once, Signal
from swarm.states import EngineState, check_engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """What vLLM serves now: ``host:port`` of each replica, the name it knows the model by, and the weights' version.

    ``gone`` happens when the engine that serves goes OFFLINE; new weights of the same engine keep it. With
    ``stays_awake`` vLLM serves while the trainer computes; with ``always`` episodes run meanwhile.
    """

    addresses: tuple[str, ...]
    engine_model: str
    policy_version: int
    gone: Once
    stays_awake: bool = True
    always: bool = False


class EngineBoard:
    """The engine's state, what it reports about itself, and what it serves."""

    def __init__(self) -> None:
        self._state = EngineState.OFFLINE
        self._detail = "no training job yet"
        self._entered = time.monotonic()
        self._changed = Signal()
        # starts beyond every number that an earlier server process can have reported
        self._changes = time.time_ns() // 1000
        self._weight_syncs = 0
        self._closing = False
        self._serving: Serving | None = None
        self._engine_gone = Once()
        self.engine_pid: int | None = None
        self.boot_stage = ""
        self.last_lines: list[str] = []
        self.failure: EngineFailure | None = None
        self.resolved_config: dict[str, Any] | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def seconds_in_state(self) -> float:
        """How long the engine has been in its state."""
        return time.monotonic() - self._entered

    @property
    def policy_version(self) -> int:
        """The trainer step whose weights vLLM serves; 0 before the first."""
        return self._serving.policy_version if self._serving else 0

    @property
    def serving(self) -> Serving:
        """What vLLM serves.

        Raises:
            UnavailableError: nothing, the engine is not up.
        """
        if self._serving is None:
            raise UnavailableError(f"the engine is {self._state}: {self._detail}", code="engine_offline")
        return self._serving

    @property
    def global_step(self) -> int:
        """The step whose weights vLLM serves; while it serves none, the last step of the run."""
        return self.policy_version

    def engine_status(self) -> EngineStatus:
        return EngineStatus(engine_status=self._state, engine_status_detail=self._detail, global_step=self.global_step)

    def progress(self, stage: str, detail: str) -> None:
        """The engine reports what it is doing."""
        self.boot_stage = stage
        if self._state is EngineState.BOOTING:
            self._detail = f"{stage}: {detail}" if detail else stage
        self._changed.notify()

    async def wait_for_state(self, states: Collection[EngineState], within: float) -> None:
        """Return when the engine is in one of ``states``, goes OFFLINE, or ``within`` seconds have passed."""
        started_offline = self._state is EngineState.OFFLINE

        def decided() -> bool:
            nonlocal started_offline
            if self._state is not EngineState.OFFLINE:
                started_offline = False
            offline = self._state is EngineState.OFFLINE and not started_offline
            return self._closing or self._state in states or offline

        await self._changed.until(decided, within)

    async def wait_for_change(self, after: int, within: float) -> None:
        """Return when the engine's state is another than at the change ``after``, or ``within`` seconds have passed."""
        await self._changed.until(lambda: self._closing or self._changes != after, within)

    def _enter(self, state: EngineState, detail: str) -> None:
        self._state = check_engine(self._state, state)
        self._detail = detail
        self._entered = time.monotonic()
        self._changes += 1
        self._weight_syncs += state is EngineState.WEIGHT_SYNCING
        logger.info("%s: %s", state, detail)
        self._changed.notify()

    def _serve_no_more(self) -> None:
        self._serving = None
        self._engine_gone.happen()
        self._engine_gone = Once()
