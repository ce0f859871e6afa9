"""The pairs and ratings of one run, and the verdicts on its challengers that they give.

Invariant: a pair counts once for its group, from when it is appended to the journal; the verdicts are a function of the
rows of the run, in their order, so a restarted server gives the same ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from swarm.concurrency import Latest
from swarm.evidence.pairs import Pair, Terms
from swarm.evidence.ratings import SideRating
from swarm.evidence.verdict import PairedEvidence
from swarm.server.journal.recovery import MAX_COMPARISONS, MAX_OF_ALL
from swarm.server.journal.rows import ForgottenEvidenceRow, PairRow, RatingRow
from swarm.status import ComparisonStatus

#: Groups whose pairs are known to have come: a repetition follows within minutes.
MAX_GROUPS = 100_000


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
