"""What a run shows of itself: ``Evaluations``, by the policy version that answered; ``TrainingWatch``, its alarms, and
whether training waits for a person because of one.

Invariant: an eval episode that made a model call counts once, for the newest weights that it sampled with, unless the
engine has gone back from these. One that ran while the server was restarted counts for the calls that it made since.

The alarms are what :func:`swarm.evidence.watch.watched` says of the run's steps and evaluations, and what a person let
go on is a row, so that both are the same after a restart. What an alarm does, it does once, in the turn of the event
loop in which its step is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swarm.evidence.alarms import Alarm, WatchRules
from swarm.job import TrainJob
from swarm.measures import MetricSums
from swarm.packs import added, required
from swarm.server.journal.rows import EvaluationRow, ForgottenEvidenceRow, ResumptionRow
from swarm.types import EvalResult, StepResult, WorkflowOutput

logger = logging.getLogger(__name__)

#: Versions that are remembered.
MAX_VERSIONS = 1000


class Evaluations:
    """The evaluations of one run; ``is_left`` says whether the engine has gone back from the weights of a version.

    Attributes:
        sums: of each policy version that was evaluated.
    """

    def __init__(self, append: Callable[..., Any], is_left: Callable[[int], bool], run_id: str = "") -> None:
        self._append = append
        self._is_left = is_left
        self._run_id = run_id
        self.sums: dict[int, MetricSums] = {}
        self._changed: set[int] = set()

    def forget_above(self, version: int) -> None:
        """The engine went back to ``version``: those above will be other weights when they come again."""
        if any(step > version for step in self.sums):
            self.sums = {step: sums for step, sums in self.sums.items() if step <= version}
            self._append(ForgottenEvidenceRow(self._run_id, version))

    def restore(self, rows: Iterable[EvaluationRow]) -> None:
        """Go on after a restart."""
        self.sums = {row.step: MetricSums(row.sums) for row in rows}

    def add(self, output: WorkflowOutput, calls: Sequence[tuple[int, int]]) -> None:
        """An eval episode ended with ``output`` after ``calls``: policy version and sampled tokens of each."""
        if not calls or self._is_left(step := max(version for version, _ in calls)):
            return
        sums = self.sums.setdefault(step, MetricSums())
        tokens = sum(tokens for _, tokens in calls)
        sums.add(output.reward, output.is_success, len(calls), tokens, output.log_metrics)
        self._changed.add(step)
        self._append(EvaluationRow(self._run_id, step, sums.dump()))
        while len(self.sums) > MAX_VERSIONS:
            del self.sums[min(self.sums)]

    def results(self) -> list[EvalResult]:
        """Each evaluation so far, the oldest version first."""
        return [self.sums[step].evaluation(step) for step in sorted(self.sums)]

    def take_changed(self) -> list[EvalResult]:
        """Those that changed since the last call, for the trainer's loggers."""
        changed, self._changed = self._changed, set()
        return [self.sums[step].evaluation(step) for step in sorted(changed) if step in self.sums]


class TrainingWatch:
    """The alarms of one run; ``alarms`` are those after its latest step."""

    def __init__(self, append: Callable[..., Any], rules: WatchRules, run_id: str = "") -> None:
        self._append = append
        self._rules = rules
        # alarms of their own accord warn alone; what a person asked for is not left out in silence
        self._watched = added("watch") if rules == WatchRules() else required("watch", "watch")
        if self._watched is None:
            logger.warning("nobody watches over the training: the pack of alarms is not installed here")
        self._run_id = run_id
        self._step, self._resumed = 0, 0.0
        self.alarms: list[Alarm] = []

    def restore(
        self, resumed: float, steps: Sequence[StepResult], evaluations: Sequence[EvalResult], job: TrainJob
    ) -> None:
        """Go on after a restart; training had been ``resumed`` at that step last, 0: never."""
        self._resumed = resumed
        self.look(steps, evaluations, job)

    def look(self, steps: Sequence[StepResult], evaluations: Sequence[EvalResult], job: TrainJob) -> list[Alarm]:
        """See what ``steps`` come to, the last of which is new; returns the alarms that begin."""
        before = {alarm.kind for alarm in self.alarms}
        let_go_on = {alarm.kind for alarm in self.alarms if not alarm.pauses}
        summed_over = job.max_response_length if job.advantage == "dr_grpo" else 0
        step = steps[-1].step if steps else 0
        if 0 < step <= self._step and step <= self._resumed:
            # the engine went back: what begins from here on is another alarm
            self._resumed = step - 0.5
            self._append(ResumptionRow(self._run_id, self._resumed))
            let_go_on = set()
        self._step = step
        alarms = self._watched(steps, evaluations, self._rules, summed_over=summed_over) if self._watched else []
        # one that goes on is no other alarm where it seems to have begun later, as earlier steps are forgotten
        moved = max((_begun(alarm) for alarm in alarms if _pauses(alarm) and alarm.kind in let_go_on), default=0.0)
        if moved > self._resumed:
            self._resumed = moved
            self._append(ResumptionRow(self._run_id, self._resumed))
        self.alarms = [
            alarm.model_copy(update={"pauses": _pauses(alarm) and _begun(alarm) > self._resumed}) for alarm in alarms
        ]
        new = [alarm for alarm in self.alarms if alarm.kind not in before]
        for alarm in new:
            logger.warning("alarm: %s", alarm.sentence)
        return new

    @property
    def pauses(self) -> bool:
        """Whether training waits for a person."""
        return any(alarm.pauses for alarm in self.alarms)

    def resume(self) -> None:
        """Training goes on whatever the alarms of now say; those that begin later pause it again."""
        if self.pauses:
            self._resumed = max(self._step, *map(_begun, self.alarms))
            self._append(ResumptionRow(self._run_id, self._resumed))
            self.alarms = [alarm.model_copy(update={"pauses": False}) for alarm in self.alarms]


def _pauses(alarm: Alarm) -> bool:
    """Whether it does, until a person lets it go on."""
    return alarm.action in ("pause", "rollback")


def _begun(alarm: Alarm) -> float:
    """After which step it began: a version is evaluated between its step and the next one."""
    return alarm.since + (0.5 if alarm.kind == "held_out" else 0.0)
