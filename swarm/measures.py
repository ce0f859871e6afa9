"""What episodes measure, summed up by name: rewards, successes, calls, tokens, and what workflows log themselves.

Invariant: a mean is over the episodes that have the value; one that nobody has is absent, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarm.types import EvalResult

#: Prefixes of the metrics of a training step's batch, and of evaluations.
TRAIN, EVAL = "swarm/", "eval/"
#: Metrics of a step's batch that people read: means over its episodes and the deviation of their rewards, its groups,
#: and those of them whose rewards differ or that have a credit.
REWARD, SPREAD = f"{TRAIN}reward_mean", f"{TRAIN}reward_std"
SUCCESS, CALLS = f"{TRAIN}success_rate", f"{TRAIN}calls_mean"
RESPONSE_TOKENS = f"{TRAIN}response_tokens_mean"
TASKS, TASKS_WITH_SIGNAL = f"{TRAIN}tasks", f"{TRAIN}tasks_with_signal"
#: Of an evaluation: means over its episodes, and the deviation of their rewards.
EVAL_REWARD, EVAL_SUCCESS, EVAL_SPREAD = f"{EVAL}reward_mean", f"{EVAL}success_rate", f"{EVAL}reward_std"
#: Mean over a batch's episodes of how much of the end of what they sampled they have said before.
REPETITION = f"{TRAIN}repetition"
#: How many metrics of a step were no finite number, which JSON has not.
NOT_FINITE = f"{TRAIN}non_finite_metrics"
#: Names that workflows log, of one batch or evaluation, and characters of each; later ones are left out. Of one reward
#: a gateway logs as many components.
MAX_LOGGED, MAX_NAME = 64, 100
#: Begins the name of what workflows log.
LOGGED = "log/"
#: Logged by an episode: 1 if its answer declines to answer, else 0.
REFUSED = "refused"
#: Logged by an episode whose reward is another's of its group: a control run, which must not learn.
SHUFFLED = "control.shuffled"
#: What is logged beside the components of a reward.
MARKS = (REFUSED, SHUFFLED)
_SQUARE = "reward_square"


def components_of(log_metrics: Mapping[str, float]) -> dict[str, float]:
    """What a hook or an agent logged of one episode, without :data:`MARKS`."""
    return {name: value for name, value in log_metrics.items() if name not in MARKS}


class MetricSums:
    """Counts and sums by name, so that episodes can be added one by one.

    Args:
        sums: ``[count, sum]`` by name, of an earlier :meth:`dump`.
    """

    def __init__(self, sums: Mapping[str, tuple[int, float]] | None = None) -> None:
        self._sums: dict[str, tuple[int, float]] = {name: (n, total) for name, (n, total) in (sums or {}).items()}
        #: until another episode comes: each status has those of all versions
        self._evaluation: EvalResult | None = None

    def add(
        self, reward: float, is_success: bool | None, calls: int, tokens: int, log_metrics: Mapping[str, float]
    ) -> None:
        """Add one episode with ``calls`` of the model, which sampled ``tokens`` for it."""
        self._evaluation = None
        self._add("reward_mean", reward)
        self._add(_SQUARE, reward * reward)
        if is_success is not None:
            self._add("success_rate", float(is_success))
        self._add("calls_mean", calls)
        self._add("response_tokens_mean", tokens)
        for logged_name, value in log_metrics.items():
            name = LOGGED + logged_name[:MAX_NAME]
            if name not in self._sums and sum(other.startswith(LOGGED) for other in self._sums) == MAX_LOGGED:
                continue
            if math.isfinite(value):
                self._add(name, value)

    @property
    def episodes(self) -> int:
        """How many were added."""
        return self._sums.get("reward_mean", (0, 0.0))[0]

    def evaluation(self, step: int) -> EvalResult:
        """The episodes as an evaluation of the policy version of ``step``."""
        if self._evaluation is None or self._evaluation.step != step:
            self._evaluation = EvalResult(step=step, episodes=self.episodes, metrics=self.means(EVAL))
        return self._evaluation

    def means(self, prefix: str) -> dict[str, float]:
        """The mean of each value, its name behind ``prefix``, and the deviation of the rewards; what is beyond any
        float is left out."""
        # JSON has no form for it: a status with one could be read by nobody
        means = {name: total / count for name, (count, total) in self._sums.items() if math.isfinite(total)}
        square = means.pop(_SQUARE, None)
        # an earlier release summed none, perhaps of some of them
        if square is not None and self._sums[_SQUARE][0] == self.episodes:
            means["reward_std"] = math.sqrt(max(0.0, square - means["reward_mean"] ** 2))
        return {prefix + name: mean for name, mean in means.items()}

    def dump(self) -> dict[str, tuple[int, float]]:
        """See ``sums``."""
        return dict(self._sums)

    def _add(self, name: str, value: float) -> None:
        count, total = self._sums.get(name, (0, 0.0))
        self._sums[name] = (count + 1, total + value)
