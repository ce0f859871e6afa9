"""``ServingStage``: which share of a route's conversations the challenger answers, who says so, why and since when; and
the moves from each to the next.

A *trial* is the time for which training waits, so that one policy version lives long enough to be judged, and so that
what was proven is what answers. It begins every ``trial_every`` steps in the shadow, and with the last version. It ends
with the verdict, after ``trial_requests`` (and draws of each suite that is not decided) or ``trial_hours`` without one,
or with the rollback of what it proved.

Invariant: every change is a new value with the next version. Only :meth:`ServingStage.judged` moves a share by itself:
up where the challenger of an open trial is proven not worse under this very share and these very rules, down where it
is proven worse. Other weights only ever lower it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import AfterValidator, Field, computed_field

from swarm.evidence.pairs import MAX_NAME, MAX_SUITES, GateRules, SuiteName
from swarm.evidence.verdict import PairedEvidence
from swarm.types import TolerantModel

StageName: TypeAlias = Literal["shadow", "canary", "live"]
Mode: TypeAlias = Literal["auto", "manual", "never"]
AfterRollback: TypeAlias = Literal["train", "pause"]
_Between: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


def _rising(shares: tuple[float, ...]) -> tuple[float, ...]:
    if list(shares) != sorted(set(shares)):
        raise ValueError(f"shares: each is above that before it, not {list(shares)}")
    return shares


#: of the conversations that begin, one after another
Shares: TypeAlias = Annotated[tuple[_Between, ...], Field(min_length=1, max_length=20), AfterValidator(_rising)]
#: who moved a stage, where no person did
VERDICT, SERVER, CONFIGURATION = "the verdict", "the swarm server", "the configuration"
WATCH = "the watch over the training"
MAX_REASON = 1000


class JobTerms(NamedTuple):
    """What the job says of each comparison; ``None``: not known."""

    model: str | None = None
    num_repeat: int | None = None
    last_version: int | None = None


_UNKNOWN = JobTerms()


class TrialRules(TolerantModel):
    """Who moves a comparison on, and when one without a verdict is over."""

    mode: Mode = Field(
        default="manual",
        description="auto: the verdict moves the stage, up and back; manual: it waits for a person (`swarm-gateway "
        "policies promote`); never: nobody is promoted",
    )
    trial_every: int | None = Field(
        default=None,
        ge=1,
        description="after so many steps training waits until the verdict on the newest weights is there, and while a "
        "challenger answers users; null: it never waits, so that only a long step is ever decided",
    )
    trial_requests: int = Field(
        default=1000,
        ge=1,
        description="compared requests, and draws of each suite, after which a trial without a verdict ends",
    )
    trial_hours: float = Field(
        default=1.0, gt=0, le=1000, description="after so long in one stage a trial without a verdict ends too"
    )
    after_rollback: AfterRollback = Field(
        default="train",
        description="once a verdict, the watch or a person took the challenger back. train: it learns on; pause: "
        "training waits for a person, who lets it go on (`swarm-gateway policies resume`) or forks an earlier version",
    )


class StageRules(TrialRules):
    """Where a comparison begins, who moves it on, and which pairs prove something: those judged by this hook and its
    code, by the rules of this gate, with ``num_repeat`` answers (``None``: as many as the job's groups), beside draws
    of these suites."""

    begins: StageName = "shadow"
    shares: Shares = (0.05, 0.25)
    gate: GateRules = GateRules()
    hook: str = Field(default="", max_length=MAX_NAME)
    code: str = Field(default="", max_length=MAX_NAME)
    num_repeat: int | None = Field(default=None, ge=1)
    suites: tuple[SuiteName, ...] = Field(default=(), max_length=MAX_SUITES)

    @property
    def first(self) -> float:
        """The share with which a comparison begins."""
        return {"shadow": 0.0, "canary": self.shares[0], "live": 1.0}[self.begins]

    def count(self, evidence: PairedEvidence, job: JobTerms) -> bool:
        """Whether ``evidence`` was judged by these rules, of the job's own model. Whoever names other suites has begun
        a second comparison of the same trial."""
        terms, repeat = evidence.terms, self.num_repeat or job.num_repeat
        if (terms.rules, terms.hook, terms.code, {*terms.suites}) != (self.gate, self.hook, self.code, {*self.suites}):
            return False
        return repeat in (None, terms.num_repeat) and job.model in (None, terms.model)

    def after(self, share: float) -> float:
        """The share that follows ``share``, which is below 1."""
        return min(higher for higher in (*self.shares, 1.0) if higher > share)


class ServingStage(TolerantModel):
    """The stage of one route's challenger against one incumbent.

    Attributes:
        share: of the conversations that begin, answered by the challenger: 0 in the shadow, 1 live.
        before: the share before it was last changed.
        version: of this pointer, for compare-and-set.
        by, why, at: of the last move; Unix seconds.
        salt: of the hash by which conversations get their side; empty for readers who answer nobody.
        challenger: the policy version that is served; ``None``: not known yet.
        trial: training waits for the verdict on it, or because it answers users.
        until: Unix time at which the trial ends without a verdict, unless it is pinned; ``None``: it waits for a
            person, or for what it proved.
        tried: the version of the last trial; 0: none.
        ended: why the last trial ended, where that moved nothing: what pairs prove may be less after further ones.
        pinned: no verdict moves it, since ``pinned_by`` said so.
        promoted: the version that was last promoted and not taken back: its checkpoint stays.
        successor: the version that is proven live: where ``incumbent.policy`` is ``promoted``, the next incumbent.
        pinned_challenger: the version that was served when it was pinned: its checkpoint stays.
        paused: training waits for a person, since the challenger was taken back.
        incumbent_version: the version that the incumbent is; 0: none.
        recalled: the incumbent is to answer nobody any more: that of the gateway's file takes its place.
    """

    route: str
    incumbent: str
    rules: StageRules
    share: float = Field(ge=0, le=1)
    before: float = Field(ge=0, le=1)
    version: int = 1
    by: str
    why: str
    at: float
    salt: str = ""
    challenger: int | None = None
    trial: bool = False
    until: float | None = None
    tried: int = 0
    ended: str = ""
    pinned: bool = False
    pinned_by: str = ""
    pinned_why: str = ""
    promoted: int | None = None
    successor: int | None = None
    pinned_challenger: int | None = None
    paused: bool = False
    incumbent_version: int = 0
    recalled: bool = False

    @classmethod
    def begun(cls, route: str, incumbent: str, rules: StageRules, at: float, salt: str, version: int = 0) -> Self:
        """The first of a route; with ``version``, which the incumbent is, nothing is compared."""
        return cls(
            route=route,
            incumbent=incumbent,
            rules=rules,
            share=rules.first,
            before=rules.first,
            by=CONFIGURATION,
            why=f"serve.stage is {rules.begins}",
            at=at,
            salt=salt,
            tried=version,
            incumbent_version=version,
        )

    @computed_field
    @property
    def stage(self) -> StageName:
        """In a word."""
        return "shadow" if self.share == 0 else "live" if self.share == 1 else "canary"

    @computed_field
    @property
    def rolled_back(self) -> bool:
        """Whether it is in the shadow because it was taken back; ``why`` says more."""
        return self.share == 0 < self.before

    @property
    def key(self) -> tuple[str, str]:
        """Of which it is the only one."""
        return self.route, self.incumbent

    @property
    def label(self) -> str:
        """Names the stage in the terms of a comparison: evidence of one share says nothing of another."""
        return f"canary {self.share:g}" if self.stage == "canary" else self.stage

    @property
    def shown(self) -> Self:
        """Without the salt, with which one chooses one's side."""
        return self.model_copy(update={"salt": ""})

    # ------------------------------------------------------------------ moves

    @property
    def _is_incumbent(self) -> bool:
        """Whether the weights that are served are the incumbent's own: these are proven, and succeed nobody."""
        return self.challenger == self.incumbent_version > 0

    def moved(self, share: float, at: float, by: str, why: str) -> Self:
        """With another share; whoever answers users trains no more, where there are trials."""
        trial = share > 0 and self.rules.trial_every is not None and not self._is_incumbent
        # a second rollback takes back what the first one did
        before = self.before if share == self.share else self.share
        promoted = self.challenger if share > self.share else self.promoted
        if share == 0 and promoted == self.challenger:
            promoted = None
        changes: dict[str, Any] = {"by": by, "why": why[:MAX_REASON], "trial": trial, "promoted": promoted}
        # other weights and other rules take nobody back
        taken_back = share == 0 < self.share and by not in (SERVER, CONFIGURATION)
        paused = self.rules.after_rollback == "pause" and (taken_back or (self.paused and share == 0))
        changes |= {"successor": None, "paused": paused, "ended": ""}
        moved = self._next(share=share, before=before, at=at, **changes)
        return moved._timed(at)

    def set_rules(self, rules: StageRules, at: float) -> Self:
        """Under other rules, from now on."""
        if rules == self.rules:
            return self
        trial = rules.trial_every is not None and (self.trial or (self.share > 0 and not self._is_incumbent))
        return self._next(rules=rules, trial=trial)._timed(at)

    def set_version(self, version: int) -> Self:
        """With an incumbent that is this version of the job, with which nothing is compared."""
        if version == self.incumbent_version:
            return self
        return self._next(incumbent_version=version, tried=max(self.tried, version))

    def set_pinned(self, pinned: bool, by: str, why: str, at: float) -> Self:
        """Held where it is, or no longer: then a trial whose time was over meanwhile has its time again."""
        challenger = self.challenger if pinned else None
        held = self._next(pinned=pinned, pinned_by=by, pinned_why=why[:MAX_REASON], pinned_challenger=challenger)
        over = self.until is not None and self.until <= at
        return held._timed(at) if over and not pinned else held

    def resumed(self) -> Self:
        """A person lets training go on after a rollback."""
        return self._next(paused=False) if self.paused else self

    def set_recalled(self, recalled: bool) -> Self:
        """With an incumbent that is to answer nobody any more, or that answers again."""
        return self if recalled == self.recalled else self._next(recalled=recalled)

    def begun_again(self, at: float, why: str, from_step: int = 0) -> Self:
        """Back to where a comparison begins, or below: of the weights before, those up to ``from_step`` are left."""
        share = self.share if self.pinned else min(self.rules.first, self.share)
        moved = self.moved(share, at, SERVER, why) if share < self.share else self
        left = self._held_up_to(from_step)
        return moved._next(
            version=self.version + 1,
            challenger=None,
            trial=False,
            until=None,
            tried=0,
            ended="",
            paused=False,
            **left,
        )

    def serving(self, version: int, at: float, job: JobTerms = _UNKNOWN) -> Self:
        """The weights of ``version`` are served from now on."""
        if version == self.challenger:
            return self
        rules, stage = self.rules, self
        if rules.mode == "auto" and not self.pinned and self.challenger is not None and self.share > rules.first:
            stage = self.moved(rules.first, at, SERVER, f"version {version} begins a new comparison")
        every, is_incumbent = rules.trial_every, version == self.incumbent_version > 0
        # of a version that comes back, the weights are others; the incumbent's own is proven, and succeeds nobody
        tried = version if is_incumbent else min(self.tried, version)
        due = every is not None and (version - tried >= every or tried < version == job.last_version)
        trial = due or (self.trial and (self.pinned or not is_incumbent))
        changes: dict[str, Any] = {"challenger": version, "trial": trial, "tried": version if trial else tried}
        changes |= {"ended": "" if trial else self.ended} | stage._held_up_to(version)
        return stage.model_copy(update={**changes, "version": self.version + 1})._timed(at)

    def judged(self, evidence: PairedEvidence, at: float, job: JobTerms = _UNKNOWN) -> Self:
        """What follows from what is proven now."""
        terms, rules, served = evidence.terms, self.rules, self.share > 0
        if self.pinned or (terms.stage, terms.challenger) != (self.label, self.challenger):
            return self
        if not rules.count(evidence, job):
            return self
        auto = rules.mode == "auto"
        if evidence.alarm():
            if served and auto:
                return self.moved(0.0, at, VERDICT, evidence.verdict().sentence)
            # where a person takes it back, training does not wait for him, and it does not become the incumbent
            stage = self if self.successor is None else self._next(successor=None)
            return stage._untried(evidence.verdict().sentence) if self.trial else stage
        if self.share == 1 and evidence.promotable() and self.successor != self.challenger:
            return self._next(successor=self.challenger).judged(evidence, at, job)
        if not self.trial:
            return self
        if self.share == 1:
            # what was promoted stays what was proven; what began live learns on
            over = rules.begins == "live" and (evidence.promotable() or evidence.tried >= rules.trial_requests)
            return self._untried(evidence.verdict().sentence) if over else self
        if evidence.promotable():
            if auto:
                return self.moved(rules.after(self.share), at, VERDICT, evidence.verdict().sentence)
            if rules.mode == "never":
                return self._untried(evidence.verdict().sentence)
            # a person is asked, and until then the weights stay what was judged
            return self if self.until is None else self._next(until=None)
        if evidence.tried < rules.trial_requests:
            return self
        return self._undecided(at, f"no proof in {evidence.tried} requests: {evidence.verdict().sentence}")

    def at_time(self, now: float) -> Self:
        """A trial without a verdict ends by the clock."""
        if not self.trial or self.until is None or now < self.until:
            return self
        if self.pinned:
            # a person holds what answers users; in the shadow nobody is answered by it
            return self if self.share > 0 else self._untried("pinned")
        return self._undecided(now, f"no proof in {self.rules.trial_hours:g} hours")

    def _held_up_to(self, version: int) -> dict[str, int | None]:
        """What is held of the versions up to ``version``: later ones will be other weights when they come again."""
        held = {name: getattr(self, name) for name in ("promoted", "successor", "pinned_challenger")}
        return {name: None if step is None or step > version else step for name, step in held.items()}

    def _undecided(self, at: float, why: str) -> Self:
        if 0 < self.share < 1 and self.rules.mode == "auto":
            return self.moved(0.0, at, VERDICT, why)
        return self._untried(why)

    def _untried(self, why: str) -> Self:
        return self._next(trial=False, until=None, ended=why[:MAX_REASON]) if self.trial else self

    def _timed(self, at: float) -> Self:
        """Its trial begins now."""
        # what was promoted to live stays what was proven
        ends = self.trial and (self.share < 1 or self.rules.begins == "live")
        return self.model_copy(update={"until": at + self.rules.trial_hours * 3600 if ends else None})

    def _next(self, **changes: Any) -> Self:
        return self.model_copy(update={"version": self.version + 1, **changes})
