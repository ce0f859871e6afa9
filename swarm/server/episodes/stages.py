"""The stages of the routes behind this server: a versioned pointer for each incumbent of each route.

Invariant: a pointer changes in one turn of the event loop, with the row of its new version. A person who changes a
pointer names the version that the person saw. The first gateway that follows a route sets the route's rules; later only
a gateway with `admin` changes the rules, once after each start. Recovery from the rows of the run gives the same
pointers (and those that went for want of room): a change that is not on disk never happened.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from swarm.concurrency import Signal
from swarm.errors import ConflictError, NotFoundError, RequestError
from swarm.evidence.stages import SERVER, WATCH, JobTerms, ServingStage
from swarm.evidence.verdict import PairedEvidence
from swarm.protocol import FollowedRoute
from swarm.server.journal.rows import StageRow

logger = logging.getLogger(__name__)

MAX_STAGES = 1000
#: seconds after which nobody follows a stage whose gateways are silent: training waits no longer for its trial
FOLLOWED_SECONDS = 60.0

Key = tuple[str, str]


class Stages:
    """The pointers of one run.

    Attributes:
        pointers: by route and incumbent.
        changes: another, larger number after each change, also than those of earlier servers.
        changed: notified then.
        waits_for_disk: the number in ``changes`` of the last move that gateways follow only once it is on disk. They
            follow a lower share at once: should a death undo it, the challenger answers as before.
        job: pairs of another model, or of groups of another size, move nothing.
    """

    def __init__(
        self,
        append: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._append = append
        self._clock = clock
        self._wall = wall
        self._run_id = ""
        self._served: int | None = None
        self._latest = 0
        self._followed: dict[Key, float] = {}
        self.pointers: dict[Key, ServingStage] = {}
        self.changes = time.time_ns() // 1000
        self.changed = Signal()
        self.waits_for_disk = self.changes
        #: the stages as gateways had them last
        self.copies: dict[Key, ServingStage] = {}
        self.job = JobTerms()

    # ------------------------------------------------------------------ runs and the engine

    def begin_run(self, run_id: str, from_step: int = 0) -> None:
        """Another run begins, and its weights are others, except those of ``from_step`` and before: every comparison
        begins again."""
        self._run_id, self._served, self._latest = run_id, None, 0
        for stage in list(self.pointers.values()):
            self._set(stage.begun_again(self._wall(), "another training run began", from_step))

    def restore(self, run_id: str, rows: Iterable[StageRow], latest: int = 0) -> None:
        """Go on after a restart with the rows of the run, in the order in which they were appended, and the ``latest``
        version that it had."""
        self._run_id, self._latest = run_id, latest
        for row in rows:
            stage = ServingStage.model_validate_json(row.stage)
            self.pointers[stage.key] = stage
            # weights are served before their step is recorded
            self._latest = max(self._latest, stage.challenger or 0)
            # its gateways will be back
            self._followed[stage.key] = self._clock()
        self.changes += 1

    def serves(self, version: int) -> bool:
        """The engine serves the weights of ``version``; returns whether it may have gone back to them."""
        back = self._served is None or version < self._served
        self._served, self._latest = version, max(version, self._latest)
        for stage in self.current:
            if self._is_succeeded(stage) and stage.share > stage.rules.first and not stage.pinned:
                why = f"version {stage.challenger} is the incumbent of other gateways, and version {version} is served"
                stage = self._set(stage.moved(stage.rules.first, self._wall(), SERVER, why))
            self._set(stage.serving(version, self._wall(), self.job))
        return back

    def is_left(self, version: int) -> bool:
        """Whether the engine has gone back from the weights of ``version``: they come again as others."""
        return self._served is not None and self._served < version <= self._latest

    # ------------------------------------------------------------------ what gateways see

    def follow(self, routes: Iterable[FollowedRoute], *, sets_rules: bool = True, may_hold: bool = True) -> None:
        """A gateway answers by the pointers of these routes; new ones begin.

        Args:
            sets_rules: other rules are replaced by those of the routes.
            may_hold: the trials of what begins hold training; else it begins without any.

        Raises:
            RequestError: there are too many.
        """
        for followed in routes:
            key, rules = (followed.route, followed.incumbent), followed.rules
            stage = self.pointers.get(key)
            if stage is None:
                if len(self.pointers) >= MAX_STAGES and not self._make_room():
                    raise RequestError(f"this server has the stages of {MAX_STAGES} routes already")
                version = followed.incumbent_version
                if not may_hold:
                    # nobody's training waits for it, and it takes no other's challenger back
                    rules, version = rules.model_copy(update={"trial_every": None, "after_rollback": "train"}), 0
                stage = ServingStage.begun(*key, rules, self._wall(), secrets.token_hex(16), version)
            else:
                # a gateway that may hold no training has begun the stage without this version
                stage = stage.set_version(followed.incumbent_version) if may_hold else stage
                stage = stage.set_rules(rules, self._wall()) if sets_rules else stage
            self._set(stage if self._served is None else stage.serving(self._served, self._wall(), self.job))
            self._followed[key] = self._clock()
        self._leave_incumbents_before()

    def taken_back(self) -> list[ServingStage]:
        """What gateways may follow while the last changes are not on disk: what they had last, and in place of that
        each stage whose share has become lower; nothing where none has."""
        pairs = [(self.pointers[key], copy) for key, copy in self.copies.items() if key in self.pointers]
        lower = any(now.share < copy.share for now, copy in pairs)
        return [now if now.share < copy.share else copy for now, copy in pairs] if lower else []

    @property
    def current(self) -> list[ServingStage]:
        """The pointers, without those of incumbents that another one of the route has followed: no gateway asks for
        them any more."""
        followed = self._followed_now
        routes = {route for route, _ in followed}
        return [stage for key, stage in self.pointers.items() if key in followed or stage.route not in routes]

    @property
    def held(self) -> dict[int, str]:
        """The versions whose checkpoints stay, and why."""
        held: dict[int, list[str]] = {}
        current = {stage.key for stage in self.current}
        for stage in self.pointers.values():
            # weights may have gone on since the promotion: what is proven live is another version then
            answering = {stage.promoted, stage.successor} if stage.key in current else set[int | None]()
            for version, what in (*((each, "promoted") for each in answering), (stage.pinned_challenger, "pinned")):
                if version is not None:
                    held.setdefault(version, []).append(f"{what} on {stage.route}")
        for stage in self.current:
            if stage.incumbent_version:
                held.setdefault(stage.incumbent_version, []).append(f"the incumbent on {stage.route}")
        return {version: ", ".join(why) for version, why in sorted(held.items())}

    @property
    def holds(self) -> bool:
        """Whether training waits: on a route that a gateway follows a trial is open, or a challenger was taken back."""
        return self.next_lapse() is not None

    def next_lapse(self) -> float | None:
        """When, on the clock, training goes on unless gateways go on following; ``None``: it does not wait.

        It waits for no challenger that a gateway has as the next incumbent already, also where another gateway stays
        with the incumbent before."""
        self._end_trials()
        ahead = self._clock() - self._wall()
        lapses = [
            min(
                self._followed.get(key, -math.inf) + FOLLOWED_SECONDS,
                math.inf if stage.until is None or stage.pinned else stage.until + ahead,
            )
            for key, stage in self.pointers.items()
            if stage.paused or (stage.trial and (stage.pinned or not self._is_succeeded(stage)))
        ]
        latest = max(lapses, default=-math.inf)
        return latest if latest > self._clock() else None

    # ------------------------------------------------------------------ moves

    def judged(self, evidence: PairedEvidence) -> None:
        """What follows from another pair or rating of ``evidence``."""
        terms = evidence.terms
        if (stage := self.pointers.get((terms.route, terms.incumbent))) is not None:
            stage = self._set(stage.judged(evidence, self._wall(), self.job))
            for other in list(self.pointers.values()):
                if other.recalled and (other.route, other.incumbent_version) == (stage.route, stage.successor):
                    # it is to be the incumbent once more
                    self._set(other.set_recalled(False))

    def counts(self, evidence: PairedEvidence) -> bool:
        """Whether it is by the rules of its stage, and of the job's own model."""
        stage = self.pointers.get((evidence.terms.route, evidence.terms.incumbent))
        return stage is not None and stage.rules.count(evidence, self.job)

    def find(self, route: str, incumbent: str) -> ServingStage:
        """The pointer that is meant; without names the only one, of a route's several that of the latest version.

        Raises:
            NotFoundError: there is none.
            RequestError: several are meant.
        """
        stages = self.pointers.values() if incumbent else self.current
        fitting = [stage for stage in stages if route in ("", stage.route) and incumbent in ("", stage.incumbent)]
        if not incumbent and len({stage.route for stage in fitting}) == 1:
            # for a minute those of incumbents before are listed too
            fitting = [stage for stage in fitting if not stage.recalled] or fitting
            latest = max(stage.incumbent_version for stage in fitting)
            # a challenger that answers users is meant by nobody who does not know of it
            fitting = [stage for stage in fitting if stage.incumbent_version == latest or stage.share > 0]
        if not fitting:
            meant = f" {route[:100]!r}" if route else ""
            before = f"the incumbent {incumbent[:100]!r}" if incumbent else "an incumbent"
            raise NotFoundError(
                f"no route{meant} with {before} is known here: {_listed(self.pointers.values())}", code="no_stage"
            )
        if len(fitting) > 1:
            raise RequestError(f"say which route, and which incumbent: {_listed(fitting)}", param="route")
        return fitting[0]

    def promote(
        self, seen: ServingStage, version: int | None, by: str, why: str, *, share: float | None = None
    ) -> ServingStage:
        """Give the challenger ``share`` of the conversations (``None``: the one after that of ``version``); a
        repetition of the last move changes nothing.

        Raises:
            ConflictError: it moved since ``version``, nobody is promoted there, there is no challenger yet, or it is
                live.
            RequestError: the share is not above that of now, or neither it nor the version is said.
        """
        if share is None and version is None:
            raise RequestError("say the share, or the version of the stage that you saw", param="share")
        after = seen.rules.after(seen.before) if share is None and seen.share > seen.before else share
        if after is not None and _is_done(seen, version, after, by, why):
            return seen
        stage = self._unmoved(seen, version)
        if stage.rules.mode == "never":
            raise ConflictError(f"nobody is promoted on {stage.route}: gate.mode is never", code="never_promoted")
        if stage.challenger is None:
            raise ConflictError(f"{stage.route} has no challenger yet: its engine has not served", code="no_challenger")
        if stage.share == 1:
            raise ConflictError(f"the challenger of {stage.route} is live already", code="already_live")
        share = stage.rules.after(stage.share) if share is None else share
        if share <= stage.share:
            raise RequestError(f"the share is {stage.share:g} already; a rollback lowers it", param="share")
        return self._set(stage.moved(share, self._wall(), by, why))

    def roll_back(self, seen: ServingStage, version: int | None, by: str, why: str) -> ServingStage:
        """The incumbent answers everybody, and training goes on; a repetition changes nothing.

        Raises:
            ConflictError: it moved since ``version``.
        """
        if _is_done(seen, version, 0.0, by, why):
            return seen
        return self._set(self._unmoved(seen, version).moved(0.0, self._wall(), by, why))

    def recall(self, seen: ServingStage, version: int | None, by: str, why: str) -> ServingStage:
        """Let no challenger of the route answer, and no version of the job: the incumbent of the gateway's file is to
        take the place of that of now; a repetition changes nothing.

        Raises:
            ConflictError: it moved since ``version``, or the incumbent is no version.
        """
        if not seen.incumbent_version:
            raise ConflictError(
                f"{seen.incumbent} is the incumbent of the gateway's file, and no promoted version", code="not_promoted"
            )
        if seen.recalled and seen.share == 0:
            return seen
        stage = self._unmoved(seen, version)
        for other in list(self.pointers.values()):
            if other.route == stage.route and other.share > 0 and other is not stage:
                self._set(other.moved(0.0, self._wall(), by, why))
        return self._set(stage.moved(0.0, self._wall(), by, why).set_recalled(True))

    def roll_back_all(self, why: str) -> None:
        """The watch over the training lets each incumbent answer everybody, unless a person holds the challenger."""
        for stage in list(self.pointers.values()):
            if stage.share > 0 and not stage.pinned:
                self._set(stage.moved(0.0, self._wall(), WATCH, why))

    def resume(self) -> None:
        """Training goes on although challengers were taken back."""
        for stage in list(self.pointers.values()):
            self._set(stage.resumed())

    def pin(self, seen: ServingStage, version: int | None, by: str, why: str, *, pinned: bool) -> ServingStage:
        """Let no verdict move it, or let verdicts move it again; a repetition changes nothing.

        Raises:
            ConflictError: it moved since ``version``.
        """
        if (seen.pinned, seen.pinned_by, seen.pinned_why) == (pinned, by, why):
            return seen
        return self._set(self._unmoved(seen, version).set_pinned(pinned, by, why, self._wall()))

    @property
    def _followed_now(self) -> set[Key]:
        since = self._clock() - FOLLOWED_SECONDS
        return {key for key, at in self._followed.items() if at > since}

    @property
    def _incumbents(self) -> set[tuple[str, int]]:
        """The routes whose gateways have a version as their incumbent now, and the version."""
        followed = (self.pointers[key] for key in self._followed_now)
        return {(stage.route, stage.incumbent_version) for stage in followed if stage.incumbent_version}

    def _leave_incumbents_before(self) -> None:
        """A comparison with an incumbent that a later version succeeded begins again, should that incumbent come back:
        what is live there is no longer what was proven."""
        latest: dict[str, int] = {}
        for route, version in self._incumbents:
            latest[route] = max(version, latest.get(route, 0))
        if not latest:
            return
        followed = self._followed_now
        for key, stage in list(self.pointers.items()):
            left = key not in followed and stage.incumbent_version < latest.get(stage.route, 0)
            if left and stage.share > stage.rules.first and not stage.pinned:
                why = f"version {latest[stage.route]} became the incumbent"
                self._set(stage.moved(stage.rules.first, self._wall(), SERVER, why))

    def _make_room(self) -> bool:
        """Let the first stage go of a version that was an incumbent once and is followed no more, unless a person holds
        its challenger; what moved it stays in the journal. Whether there was one."""
        followed = self._followed_now
        for key, stage in self.pointers.items():
            if stage.incumbent_version and not stage.pinned and key not in followed:
                del self.pointers[key]
                self._followed.pop(key, None)
                return True
        return False

    def _is_succeeded(self, stage: ServingStage) -> bool:
        """Whether some gateways have its challenger as their incumbent, while others stay with the incumbent before."""
        version = stage.challenger
        return (stage.route, version) in self._incumbents and stage.incumbent_version != version

    def _end_trials(self) -> None:
        now = self._wall()
        for stage in list(self.pointers.values()):
            self._set(stage.at_time(now))

    def _unmoved(self, stage: ServingStage, version: int | None) -> ServingStage:
        if version is not None and version != stage.version:
            raise ConflictError(
                f"the stage of {stage.route} has moved since version {version}: it is {stage.label} "
                f"(version {stage.version}, by {stage.by}: {stage.why})",
                code="stage_moved",
            )
        return stage

    def _set(self, stage: ServingStage) -> ServingStage:
        before = self.pointers.get(stage.key)
        if stage is before:
            return stage
        if before is None or before.share != stage.share:
            logger.warning("route %s: %s, by %s: %s", stage.route, stage.label, stage.by, stage.why)
        elif before.pinned != stage.pinned:
            held = "pinned" if stage.pinned else "no longer pinned"
            logger.warning("route %s: %s, by %s: %s", stage.route, held, stage.pinned_by, stage.pinned_why)
        self.pointers[stage.key] = stage
        self._append(StageRow(self._run_id, stage.route, stage.incumbent, stage.version, stage.model_dump_json()))
        self.changes += 1
        if before is None or stage.share >= before.share:
            self.waits_for_disk = self.changes
        self.changed.notify()
        return stage


def _is_done(stage: ServingStage, version: int | None, share: float, by: str, why: str) -> bool:
    """Whether the last move is this very one, which somebody who heard no answer repeats."""
    moved = version is None or version < stage.version
    return moved and (stage.share, stage.by, stage.why) == (share, by, why)


def _listed(stages: Iterable[ServingStage]) -> str:
    return "; ".join(f"{stage.route} before {stage.incumbent}" for stage in stages) or "none"
