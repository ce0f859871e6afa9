"""What is known of one run: ``Evaluations``, by the policy version that answered; ``Comparisons``, the pairs and
ratings and the verdicts on challengers that they give; ``TrainingWatch``, its alarms, and whether training waits for a
person.

Invariant: all of it is a function of the rows of the run, in their order, so a restarted server says the same. An eval
episode that made a model call counts once, for the newest weights that it sampled with, unless the engine has gone back
from these; one that ran while the server was restarted counts for the calls that it made since. A pair counts once for
its group, from when it is appended to the journal. The alarms are what :func:`swarm.evidence.watch.watched` says of the
steps and evaluations; what an alarm does, it does once, in the turn of the event loop in which its step is recorded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swarm.concurrency import Latest
from swarm.evidence.alarms import Alarm, WatchRules
from swarm.evidence.pairs import Pair, Terms
from swarm.evidence.ratings import SideRating
from swarm.evidence.verdict import PairedEvidence
from swarm.job import TrainJob
from swarm.measures import MetricSums
from swarm.packs import added, required
from swarm.server.journal.recovery import MAX_COMPARISONS, MAX_OF_ALL
from swarm.server.journal.rows import EvaluationRow, ForgottenEvidenceRow, PairRow, RatingRow, ResumptionRow
from swarm.status import ComparisonStatus
from swarm.types import EvalResult, StepResult, WorkflowOutput

logger = logging.getLogger(__name__)

#: Groups whose pairs are known to have come: a repetition follows within minutes.
MAX_GROUPS = 100_000
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


class Comparisons:
    """The comparisons of one run; another run has others, for its weights are others.

    Args:
        on_evidence: told of the comparison of each new pair and rating.
        is_left: whether the engine has gone back from the weights of a version.

    Attributes:
        followed: the comparisons by digest of their terms, the one that got the last pair at the end.
    """

    def __init__(
        self,
        append: Callable[..., Any],
        run_id: str = "",
        on_evidence: Callable[[PairedEvidence], None] = lambda _: None,
        is_left: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._append = append
        self._run_id = run_id
        self._on_evidence, self._is_left = on_evidence, is_left
        #: the comparison of each
        self._groups = Latest[str, str](MAX_GROUPS)
        self.followed: OrderedDict[str, PairedEvidence] = OrderedDict()
        #: those with each incumbent of a route, in the same order
        self._with: dict[tuple[str, str], OrderedDict[str, PairedEvidence]] = {}

    def of(self, route: str, incumbent: str) -> list[PairedEvidence]:
        """Those with one incumbent of a route, the one that got the last pair at the end."""
        return list(self._with.get((route, incumbent), {}).values())

    def forget_above(self, version: int) -> None:
        """The engine went back to ``version``: those above will be other weights when they come again."""
        above = {name for name, followed in self.followed.items() if _version(followed.terms) > version}
        for digest in above:
            self._forget(digest)
        # a draw of a suite comes again under the same name
        for group in [group for group, digest in self._groups.items() if digest in above]:
            del self._groups[group]
        if above:
            self._append(ForgottenEvidenceRow(self._run_id, version))

    def restore(self, rows: Iterable[PairRow], ratings: Iterable[RatingRow] = ()) -> None:
        """Go on after a restart with the rows of the run, in the order in which they were appended."""
        # a server before may have had other fields, and so another digest
        digests: dict[str, str] = {}

        def digest_of(row: PairRow | RatingRow, terms: Terms) -> str:
            return digests.get(row.terms) or digests.setdefault(row.terms, terms.digest)

        for row in rows:
            pair = Pair.model_validate_json(row.pair)
            self._take(pair, digest_of(row, pair.terms))
        for row in ratings:
            rating = SideRating.model_validate_json(row.rating)
            if (followed := self.followed.get(digest_of(row, rating.terms))) is not None:
                followed.rate(rating)

    def add(self, pair: Pair) -> None:
        """Count ``pair`` and append it, unless there is one of its group already, or it is late: of weights that the
        engine has gone back from."""
        digest = pair.terms.digest
        if not self._is_left(_version(pair.terms)) and self._take(pair, digest):
            self._append(PairRow(self._run_id, pair.group_id, digest, pair.model_dump_json()))
            self._on_evidence(self.followed[digest])

    def rate(self, rating: SideRating) -> None:
        """Count ``rating`` and append it, where its comparison has a pair: without one there is no verdict."""
        digest = rating.terms.digest
        if (followed := self.followed.get(digest)) is not None:
            followed.rate(rating)
            # a caller may name two requests alike: answers of two comparisons, or of two sides, are two
            answer = f"{digest} {rating.side} {rating.answer}"
            self._append(RatingRow(self._run_id, answer, digest, rating.model_dump_json()))
            self._on_evidence(followed)

    def statuses(self, counts: Callable[[PairedEvidence], bool] = lambda _: True) -> list[ComparisonStatus]:
        """For each incumbent of each route, what is proven of its newest challenger: by what ``counts``, if there is
        some."""
        newest: dict[tuple[str, str], tuple[tuple[int, bool], PairedEvidence]] = {}
        for followed in self.followed.values():
            terms = followed.terms
            rank, other = (_version(terms), counts(followed)), newest.get(_key(terms))
            # of several the latest pair decides
            if other is None or other[0] <= rank:
                newest[_key(terms)] = rank, followed
        return [_status(newest[name][1]) for name in sorted(newest)]

    def _take(self, pair: Pair, digest: str) -> bool:
        if pair.group_id in self._groups:
            return False
        self._groups[pair.group_id] = digest
        mine = self._with.setdefault(_key(pair.terms), OrderedDict())
        if digest not in self.followed:
            self.followed[digest] = mine[digest] = PairedEvidence(pair.terms)
        self.followed[digest].add(pair)
        for names in (self.followed, mine):
            names.move_to_end(digest)
        if len(mine) > MAX_COMPARISONS:
            self._forget(next(iter(mine)))
        if len(self.followed) > MAX_OF_ALL:
            self._forget(next(iter(self.followed)))
        return True

    def _forget(self, digest: str) -> None:
        key = _key(self.followed.pop(digest).terms)
        del self._with[key][digest]
        if not self._with[key]:
            del self._with[key]


def _key(terms: Terms) -> tuple[str, str]:
    return terms.route, terms.incumbent


def _version(terms: Terms) -> int:
    return -1 if terms.challenger is None else terms.challenger


def _status(followed: PairedEvidence) -> ComparisonStatus:
    terms = followed.terms
    return ComparisonStatus(
        route=terms.route,
        incumbent=terms.incumbent,
        challenger=terms.challenger,
        stage=terms.stage,
        verdict=followed.verdict(),
    )


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
