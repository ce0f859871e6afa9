"""What eval episodes measured, by the policy version that answered them.

Invariant: an eval episode that made a model call counts once, for the newest weights that it sampled with, unless the
engine has gone back from these. One that ran while the server was restarted counts for the calls that it made since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swarm.measures import MetricSums
from swarm.server.journal.rows import EvaluationRow, ForgottenEvidenceRow
from swarm.types import EvalResult, WorkflowOutput

#: Versions that are remembered.
MAX_VERSIONS = 1000


class Evaluations:
    """The evaluations of one run.

    Args:
        append: takes rows for the journal.
        is_left: whether the engine has gone back from the weights of a version.

    Attributes:
        sums: of each policy version that was evaluated.
    """

    def __init__(self, append: Callable[..., Any], is_left: Callable[[int], bool] = lambda _: False) -> None:
        self._append = append
        self._is_left = is_left
        self._run_id = ""
        self.sums: dict[int, MetricSums] = {}
        self._changed: set[int] = set()

    def begin_run(self, run_id: str) -> None:
        """Forget what was: another run begins."""
        self._run_id = run_id
        self.sums.clear()
        self._changed.clear()

    def forget_above(self, version: int) -> None:
        """The engine went back to ``version``: those above will be other weights when they come again."""
        if any(step > version for step in self.sums):
            self.sums = {step: sums for step, sums in self.sums.items() if step <= version}
            self._append(ForgottenEvidenceRow(self._run_id, version))

    def restore(self, run_id: str, rows: Iterable[EvaluationRow]) -> None:
        """Go on after a restart."""
        self._run_id = run_id
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
