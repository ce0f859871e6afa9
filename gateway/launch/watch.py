"""Turns successive statuses of a swarm server into events of its engine: boot, ready, steps, deaths, end.

Invariant: every event is reported once. An engine that dies after it was ready is restarted, after a pause that
doubles; an engine that was never ready, or dies too often in a row, raises with the reason and its last lines. Where
users are answered without it, the first is restarted too, and the second is left dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.launch.plan import ServerPlan
from swarm.checkpoints import saved_step
from swarm.errors import SwarmGatewayError
from swarm.progress import batch_progress
from swarm.states import EngineState
from swarm.status import MAX_RESTARTS, ServerStatus

#: Steps after which it is said again whether the run learns.
_TREND_STEPS = 10

#: The kind of event and its values, ready for JSON.
OnEvent = Callable[[str, dict[str, Any]], None]


class UpFailedError(SwarmGatewayError):
    """A process of ``up`` ended by itself; ``log`` is its output, ``last_lines`` the end of it, and ``exit_code`` that
    of the command: 2 where another start would end alike."""

    def __init__(self, message: str, last_lines: list[str], log: Path, exit_code: int = 1) -> None:
        super().__init__(message)
        self.last_lines = last_lines
        self.log = log
        self.exit_code = exit_code

    @property
    def with_last_line(self) -> str:
        """The message and the last line of the output, which often says why."""
        return ": ".join((self.message, *self.last_lines[-1:]))


class EngineWatch:
    """Turns statuses into events.

    Args:
        plan: of the engine's server. An engine that goes offline after the job's last step has finished; before it, has
            died. The first ROLLING comes within ``boot_timeout`` of :meth:`begin`; the server's own limit ends a slow
            restart, which then counts as a death.
        on_event: called with ``boot``, ``ready``, ``state``, ``batch``, ``step``, ``learning``,
            ``warning``, ``stage``, ``restarting``, ``trainer_restarting``, ``recovered``, ``engine_stopped``,
            ``engine_given_up`` and ``finished``, and their values.
        restart_pause: seconds before the first restart, see :meth:`EngineFailure.pause`.
        clock: monotonic seconds.

    Attributes:
        last_step: that this engine has done, or from which it goes on; 0: none.
        was_ready: whether the engine has ever rolled.
        finished: whether it did all steps, and is offline.
    """

    def __init__(
        self,
        plan: ServerPlan,
        on_event: OnEvent,
        restart_pause: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._job = plan, plan.job
        self._log = plan.run_dir / "engine.log"
        self._on_event = on_event
        self._restart_pause = restart_pause
        self._clock = clock
        self._given_up = False
        self._began = clock()
        self._state: EngineState | None = None
        self._ready = self.was_ready = False
        self._restart_at: float | None = None
        self._deaths = 0
        self.last_step = 0
        #: by route and incumbent: the share of the challenger, and whether a person is waited for
        self._stages: dict[tuple[str, str], tuple[float, bool]] = {}
        #: by what it is about, what was seen last
        self._seen: dict[str, Any] = {"learning": ("not proven", 0, False), "journal": False}
        self._wrong: set[str] = set()
        # by batch: an engine that restarts without a checkpoint counts its steps from one again
        self._reported: set[str] = set()
        self.finished = False

    @property
    def restart_due(self) -> bool:
        """Whether the engine is dead and must be started now."""
        return self._restart_at is not None and self._clock() >= self._restart_at

    def begin(self) -> None:
        """The engine starts now."""
        self._began = self._clock()

    def see(self, status: ServerStatus) -> None:
        """Report what is new in ``status``.

        Raises:
            UpFailedError: the engine never became ready, not in time, or died for good, and users need it.
        """
        entered = status.engine.engine_status is not self._state
        if self._state is None and status.engine.engine_status is not EngineState.OFFLINE and status.steps:
            # a run continues after a crash: its earlier steps were reported then
            self._reported.update(step.batch_id for step in status.steps)
            self.last_step = status.steps[-1].step
            self._goes_back(status)
        self._see_state(status)
        for step in status.steps:
            if step.batch_id not in self._reported:
                self._reported.add(step.batch_id)
                self.last_step = step.step
                self._on_event("step", step.model_dump(mode="json"))
        self._see_what_is_wrong(status)
        self._see_stages(status)
        self._see_learning(status)
        self._see_batch(status)
        self._see_journal(status)
        if status.engine.engine_status is not EngineState.OFFLINE:
            self._restart_at, self._given_up = None, False
            self._see_trainer(status)
        elif self._is_done(status):
            if not self.finished:
                self._on_event("finished", {"step": self.last_step})
            self.finished = True
        elif self.was_ready or self._plan.is_spared:
            self._see_death(status, entered)
        else:
            self.give_up(status)

    def _is_done(self, status: ServerStatus) -> bool:
        """Whether an engine that is offline has done all: its steps, and no answers are wanted after them."""
        died = status.engine_failure is not None and self._job.serve_after_training
        return self.last_step >= self._job.total_training_steps and not died

    def give_up(self, status: ServerStatus, why: str = "") -> None:
        """Raise with the reason of the death, and ``why`` there is no restart; where users do not need it, say so."""
        failure = status.engine_failure
        reason = (failure.reason if failure else status.engine.engine_status_detail) or "no reason given"
        message = f"the engine went offline: {reason}" + (f" ({why})" if why else "")
        if not self._plan.is_spared:
            is_mistake = failure is not None and failure.wrong_config
            raise self._failed(message, status, exit_code=2 if is_mistake else 1)
        self._restart_at = None
        if not self._given_up:
            self._given_up = True
            values = {"message": message, "last_lines": status.last_lines, "log": str(self._log)}
            self._on_event("engine_given_up", values)

    def _failed(self, message: str, status: ServerStatus, exit_code: int = 1) -> UpFailedError:
        of = f"{self._plan.name}: " if self._plan.name else ""
        return UpFailedError(of + message, status.last_lines, self._log, exit_code)

    def _is_news(self, about: str, value: Any) -> bool:
        """Whether ``value`` differs from the last one."""
        before, self._seen[about] = self._seen.get(about), value
        return value != before

    def _see_journal(self, status: ServerStatus) -> None:
        """Warn when the disk begins to refuse the journal, and tell when it no longer does."""
        error = status.journal.error if status.journal is not None else ""
        if self._is_news("journal", bool(error)):
            text = (
                f"the journal {self._plan.run_dir / 'journal.db'} cannot be written ({error}): users are answered, "
                "nothing is trained, and what was acknowledged waits; once the disk takes it, it goes on by itself"
            )
            self._on_event("warning", {"message": text if error else "the journal is written again"})

    def _see_batch(self, status: ServerStatus) -> None:
        """Report how much of the batch there is, each time it changes."""
        if status.pool is None or status.engine.engine_status is not EngineState.ROLLING:
            return
        if self._is_news("batch", batch := batch_progress(status.pool)):
            self._on_event("batch", {"tasks": batch[0], "of": batch[1], "words": batch[2]})

    def _see_what_is_wrong(self, status: ServerStatus) -> None:
        """Warn of each alarm, and of what the engine warns of, when it begins."""
        wrong = {alarm.kind: f"alarm: {alarm.sentence}" for alarm in status.alarms}
        wrong |= {text: text for text in status.warnings}
        for name, text in wrong.items():
            if name not in self._wrong:
                self._on_event("warning", {"message": text})
        self._wrong = set(wrong)

    def _see_stages(self, status: ServerStatus) -> None:
        """Report each move of a challenger, and when training begins to wait for a person."""
        for stage in status.stages:
            asked = stage.pinned or (stage.rules.mode == "manual" and stage.until is None)
            waits = stage.paused or (stage.trial and stage.share < 1 and asked)
            share, waited = self._stages.get((stage.route, stage.incumbent), (stage.share, False))
            self._stages[stage.route, stage.incumbent] = stage.share, waits
            if stage.share != share or (waits and not waited):
                about = {"route": stage.route, "stage": stage.label, "challenger": stage.challenger}
                self._on_event("stage", {**about, "by": stage.by, "why": stage.why, "waits": waits})

    def _see_learning(self, status: ServerStatus) -> None:
        """Say whether the run learns: when the answer changes, every some steps, and after the last one."""
        answer = (status.learning.partition(":")[0], self.last_step // _TREND_STEPS, self._is_done(status))
        if status.learning and self._is_news("learning", answer):
            self._on_event("learning", {"sentence": status.learning})

    def _see_death(self, status: ServerStatus, entered: bool) -> None:
        """Plan a restart, unless the engine was stopped on purpose."""
        failure = status.engine_failure
        if failure is None:
            if entered or self._restart_at is not None:
                self._restart_at, self._deaths = None, 0
                self._on_event("engine_stopped", {"reason": status.engine.engine_status_detail})
            return
        if failure.wrong_config:
            self.give_up(status, "its configuration is wrong, so it is not started again")
        elif failure.repeated:
            self.give_up(status, "again, and it answered nothing in between, so it is not started again")
        elif failure.unexplained > MAX_RESTARTS:
            self.give_up(status, f"it was started again {MAX_RESTARTS} times and did no training step")
        elif not self._given_up and (self._restart_at is None or failure.count != self._deaths):
            self._deaths = failure.count
            pause = failure.pause(self._restart_pause)
            self._restart_at = self._clock() + pause
            values = {"attempt": failure.unexplained, "of": MAX_RESTARTS, "in_seconds": round(pause, 1)}
            self._on_event("restarting", {"reason": failure.reason, **values, "last_lines": status.last_lines})
            self._goes_back(status)

    def _see_trainer(self, status: ServerStatus) -> None:
        """Report the death of a trainer that the server starts again while vLLM serves on."""
        failure = status.engine_failure
        restarts = status.engine.engine_status is EngineState.BOOTING and status.serving is not None
        if restarts and failure is not None and failure.count != self._deaths:
            self._deaths = failure.count
            values = {"attempt": failure.unexplained, "of": MAX_RESTARTS}
            self._on_event("trainer_restarting", {"reason": failure.reason, **values})
            self._goes_back(status)

    def _goes_back(self, status: ServerStatus) -> None:
        """The engine that starts next does the steps after the last checkpoint again; warn if there is none: then it
        trains the base model again."""
        done, saved = max((step.step for step in status.steps), default=0), saved_step(self._job, self._plan.run_dir)
        self.last_step = min(self.last_step, saved)
        if done and not saved:
            every = self._job.checkpoint_every
            due = f"the first one is due at step {every}" if done < every else "none could be written"
            why = due if every else "job.save_freq says so"
            lost = f"training starts from the job's model again, {done} steps are lost"
            self._on_event("warning", {"message": f"there is no checkpoint ({why}): {lost}"})

    def _see_state(self, status: ServerStatus) -> None:
        state, detail = status.engine.engine_status, status.engine.engine_status_detail
        if self._state is not None and state in (EngineState.BOOTING, EngineState.OFFLINE) and state is not self._state:
            self._began, self._ready = self._clock(), False
        seconds = round(self._clock() - self._began, 1)
        if state is EngineState.BOOTING:
            if self._is_news("boot", (status.boot_stage, detail)):
                self._on_event("boot", {"stage": status.boot_stage, "detail": detail, "seconds": seconds})
            # the server's own limit comes later, and is a death
            if seconds > self._plan.boot_timeout and not self.was_ready and not self._plan.is_spared:
                last = detail or status.boot_stage
                raise self._failed(f"the engine is not ready after {seconds:.0f} s, last: {last}", status)
        elif state is not EngineState.OFFLINE and not self._ready:
            self._ready = self.was_ready = True
            values = {"model": status.model, "seconds": seconds}
            if self._deaths:
                self._deaths = 0
                new = [step.step for step in status.steps if step.batch_id not in self._reported]
                self._on_event("recovered", {**values, "step": new[0] - 1 if new else status.engine.global_step})
            else:
                self._on_event("ready", values)
        if state is not self._state:
            self._state = state
            # the spinner then says the state alone
            self._seen.pop("batch", None)
            self._on_event("state", {"state": str(state), "detail": detail})
