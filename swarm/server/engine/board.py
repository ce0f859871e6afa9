"""What is known of the engine: its states, what vLLM serves, what it reports, and how it died.

Invariant: the states change only along the tables of :mod:`swarm.states`, and each change wakes everyone who waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.concurrency import Once, Signal
from swarm.errors import ConflictError, UnavailableError
from swarm.job import ServingMode
from swarm.link.messages import RolloutReady
from swarm.states import EngineEvent, EngineState, EngineStates, VllmState
from swarm.status import EngineFailure
from swarm.tokens import Sampled, WeightSyncs

logger = logging.getLogger(__name__)

#: Kept of an engine's warnings.
_MAX_WARNINGS = 20


@dataclass(frozen=True, slots=True)
class Served:
    """What vLLM serves now: ``host:port`` of each replica, the name it knows the model by, and the weights' version.

    ``gone`` happens when the engine that serves goes OFFLINE; new weights of the same engine keep it. With
    ``stays_awake`` vLLM serves while the trainer computes.
    """

    addresses: tuple[str, ...]
    engine_model: str
    policy_version: int
    gone: Once
    stays_awake: bool = True


class EngineBoard:
    """The engine's states, what it serves, what it reports about itself, and how it died."""

    def __init__(self) -> None:
        self.states = EngineStates()
        self.detail = "no training job yet"
        self._entered = time.monotonic()
        self.changed = Signal()
        # starts beyond every number that an earlier server process can have reported
        self.changes = time.time_ns() // 1000
        self.weight_syncs = 0
        self.closing = False
        self._served: Served | None = None
        self._engine_gone = Once()
        #: those over which vLLM kept its requests
        self.syncs = WeightSyncs()
        self.pid: int | None = None
        #: the code snapshot that the engine's processes say they import
        self.code: str | None = None
        self.boot_stage = ""
        self.last_lines: list[str] = []
        self.failure: EngineFailure | None = None
        self.resolved_config: dict[str, Any] | None = None
        #: what people should know of this engine, the latest last
        self.warnings: deque[str] = deque(maxlen=_MAX_WARNINGS)
        #: how many there were
        self.warned = 0
        #: whether this engine has answered a call
        self._answered = False
        #: deaths that a refused request explains, and that are not yet counted as such
        self._explained = 0

    @property
    def state(self) -> EngineState:
        """The engine in one word."""
        return self.states.word

    @property
    def seconds_in_state(self) -> float:
        """How long the engine has been in its state."""
        return time.monotonic() - self._entered

    @property
    def policy_version(self) -> int:
        """The trainer step whose weights vLLM serves; 0 before the first."""
        return self._served.policy_version if self._served else 0

    @property
    def served(self) -> Served:
        """What vLLM serves.

        Raises:
            UnavailableError: nothing, the engine is not up.
        """
        if self._served is None:
            raise UnavailableError(f"the engine is {self.state}: {self.detail}", code="engine_offline")
        return self._served

    @property
    def serving(self) -> ServingMode | None:
        """When episodes run; ``None`` while no engine serves."""
        if self.states.vllm is VllmState.DOWN:
            return None
        return "always" if self.states.always else "between_steps"

    def check_offline(self, before: str) -> None:
        """Raise :class:`ConflictError` unless the engine is OFFLINE, as it has to be ``before`` the caller goes on."""
        if self.state is not EngineState.OFFLINE:
            raise ConflictError(
                f"the engine is {self.state}: stop it (`swarm-gateway swarm engine stop`, POST /stop_engine) before "
                f"you {before}",
                code="engine_not_offline",
            )

    def warn(self, text: str) -> None:
        """The engine goes on and reports a ``text`` for people."""
        logger.warning("%s", text)
        self.warnings.append(text)
        self.warned += 1
        self.changed.notify()

    def progress(self, stage: str, detail: str) -> None:
        """The engine reports what it is doing."""
        self.boot_stage = stage
        if self.state is EngineState.BOOTING:
            self.detail = f"{stage}: {detail}" if detail else stage
        self.changed.notify()

    async def wait_for_state(self, states: Collection[EngineState], within: float) -> None:
        """Return when the engine is in one of ``states``, goes OFFLINE, or ``within`` seconds have passed."""
        entered = self._entered

        def decided() -> bool:
            stopped = self.state is EngineState.OFFLINE and self._entered != entered
            return self.closing or self.state in states or stopped

        await self.changed.until(decided, within)

    async def wait_for_change(self, after: int, within: float) -> None:
        """Return when the state of engine or trainer is another than at the change ``after``, or ``within`` seconds
        have passed."""
        await self.changed.until(lambda: self.closing or self.changes != after, within)

    def begin(self) -> None:
        """Another engine starts: forget the reports of the one before."""
        self.boot_stage, self.last_lines, self.code = "starting", [], None
        self.warnings.clear()
        self.warned = 0
        self._answered = False

    def serve(self, message: RolloutReady) -> None:
        """vLLM serves as ``message`` says."""
        addresses, gone = tuple(message.addresses), self._engine_gone
        self._served = Served(addresses, message.model, message.policy_version, gone, message.stays_awake)
        self.states = self.states._replace(always=message.serving == "always")

    def serve_version(self, policy_version: int, sampled: Sampled | None) -> None:
        """vLLM, which serves, has other weights; see :class:`~swarm.link.messages.WeightsSynced`."""
        self.syncs.finish(policy_version, sampled)
        self._served = replace(self.served, policy_version=policy_version)

    def end(self, last_lines: Sequence[str]) -> None:
        """Nothing is left of the engine; ``last_lines`` are of its output."""
        self._served = None
        self._engine_gone.happen()
        self._engine_gone = Once()
        self.pid = self.code = None
        self.boot_stage = ""
        self.last_lines = list(last_lines)

    def follow(self, event: EngineEvent, detail: str) -> None:
        """Change the states by ``event``; an empty ``detail`` leaves the one before.

        Raises:
            StateError: it cannot happen now.
        """
        before, states = self.state, self.states
        self.states = states.after(event)
        self.detail = detail or self.detail
        self.changes += self.states != states
        if self.state is not before:
            self._entered = time.monotonic()
            self.weight_syncs += self.state is EngineState.WEIGHT_SYNCING
            logger.info("%s: %s", self.state, self.detail)
        self.changed.notify()

    def close(self) -> None:
        """Nobody waits for this engine any more: the server shuts down."""
        self.closing = True
        self.changed.notify()

    # ------------------------------------------------------------------ deaths

    def died(self, reason: str, *, wrong_config: bool = False, cause: str = "", counts: bool = True) -> None:
        """Count a death of the engine before it goes OFFLINE; a step or a stop on purpose resets the count.

        ``cause`` is as in :class:`~swarm.link.messages.Goodbye`. A death for want of room on the disk does not
        ``count``: the engine may be started again until there is room.
        """
        before, explained = self.failure, self._explained
        self._explained = 0
        count = max(1, (before.count if before is not None else 0) + counts)
        again = before is not None and before.cause == cause and not self._answered
        self.failure = EngineFailure(
            reason=f"{reason} (of a request that is refused from now on)" if explained else reason,
            count=count,
            wrong_config=wrong_config,
            cause=cause,
            explained=min(count, explained + (before.explained if before is not None else 0)),
            # one that dies of requests, and not of every request, is not given up
            repeated=bool(cause) and again and not explained and not (before is not None and before.explained),
        )

    def death_explained(self, deaths: int) -> None:
        """A request is refused from now on, at which the engine died so often; the last of these deaths may be counted
        by now, or not yet."""
        failure = self.failure
        if failure is None or self.state is not EngineState.OFFLINE:
            self._explained += deaths
            return
        explained = min(failure.count, failure.explained + deaths)
        self.failure = failure.model_copy(update={"explained": explained, "repeated": False})
        self.changed.notify()

    def answered(self) -> None:
        """vLLM has answered a call."""
        self._answered = True

    def computes(self) -> None:
        """The trainer has its batch."""
        self.detail = "training on the batch"
        self.changes += 1
        self.changed.notify()

    def stepped(self) -> None:
        """A step was done before the engine died, so that death is the first in a row; else there is none."""
        if self.failure is not None:
            dead = self.state is EngineState.OFFLINE
            explained = min(1, self.failure.explained)
            self.failure = self.failure.model_copy(update={"count": 1, "explained": explained}) if dead else None
        self.changes += 1
        self.changed.notify()
