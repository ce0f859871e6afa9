"""Routes of policies: which challenger stands where, what proves it, how a person moves it, and the versions that are
kept.

Invariant: whoever moves a stage or deletes a version needs the scope ``admin`` and a reason, and is in the audit log;
what is answered is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.routing import BaseRoute

from swarm.errors import ConfigError, NotFoundError
from swarm.evidence.alarms import Alarm
from swarm.evidence.stages import ServingStage
from swarm.evidence.verdict import SLOWEST, PairedEvidence
from swarm.protocol import (
    MovePolicyRequest,
    PinPolicyRequest,
    PoliciesResponse,
    PolicyExplanation,
    PolicyStatus,
    PromotePolicyRequest,
    ResumeRequest,
    RollBackPolicyRequest,
)
from swarm.server.api.engine import BACKLOG
from swarm.server.audit import AuditLog, sender_of
from swarm.server.auth import ControlRoute
from swarm.server.engine.requests import EpisodeRequests
from swarm.server.episodes.stages import Stages
from swarm.server.kept import KeptVersions
from swarm.status import DeletePolicyRequest, KeptPoliciesResponse, KeptVersion, PolicyRecord
from swarm.types import TolerantModel

T = TypeVar("T")


class ExplainPolicyQuery(TolerantModel):
    """The query of ``GET /policies/explain``."""

    challenger: str = Field(default="", alias="of", description="route of the gateway; empty: the only one")
    incumbent: str = Field(default="", description="empty: the route's only one, or the latest version")


@dataclass(frozen=True)
class PolicyRoutes:
    """``/policies``, and below it ``explain``, ``promote``, ``rollback``, ``pin``, ``resume``, ``kept`` and
    ``delete``."""

    episodes: EpisodeRequests
    audit: AuditLog
    run_dir: Path

    def routes(self) -> list[BaseRoute]:
        refusals = {404: "no such route", 409: "it has moved, or cannot be moved there", 503: BACKLOG}
        no_job = {409: "there is no training job yet", 503: BACKLOG}
        not_kept = {404: "it is not kept"}
        return [
            ControlRoute("GET", "/policies", self.policies, "read"),
            ControlRoute("GET", "/policies/explain", self.explain, "read", refusals={404: "no such route"}),
            ControlRoute("POST", "/policies/promote", self.promote, "admin", refusals=refusals),
            ControlRoute("POST", "/policies/rollback", self.roll_back, "admin", refusals=refusals),
            ControlRoute("POST", "/policies/pin", self.pin, "admin", refusals=refusals),
            ControlRoute("POST", "/policies/resume", self.resume, "admin", refusals=no_job),
            ControlRoute("GET", "/policies/kept", self.kept, "read", refusals={404: "nothing was trained yet"}),
            ControlRoute("GET", "/policies/kept/{step}", self.record, "read", refusals=not_kept),
            ControlRoute(
                "POST", "/policies/delete", self.delete, "admin", refusals=not_kept | {409: "the run needs it"}
            ),
        ]

    async def policies(self) -> PoliciesResponse:
        """The challengers of all routes behind this server."""
        pool = self.episodes.run.found_pool
        waits = pool is not None and pool.training_waits
        return PoliciesResponse(policies=self.statuses(), training_waits=waits, alarms=self.alarms())

    def alarms(self) -> list[Alarm]:
        """Those of the training."""
        return [] if (pool := self.episodes.run.found_pool) is None else pool.watch.alarms

    def statuses(self) -> list[PolicyStatus]:
        """Each challenger as it stands."""
        pool = self.episodes.run.found_pool
        return [] if pool is None else [self._status(stage) for stage in pool.stages.current]

    async def explain(self, query: ExplainPolicyQuery) -> PolicyExplanation:
        """What is proven of one challenger, and what follows from it, line by line."""
        if self.episodes.run.found_pool is None:
            raise NotFoundError("there is no training job yet", code="no_stage")
        stage = self.episodes.run.pool.stages.find(query.challenger, query.incumbent)
        status, followed = self._status(stage), self._comparison(stage)
        lines = _lines(stage, followed, status)
        if followed is not None and not self._counts(followed):
            lines.append("the stage has other rules, another hook or another job: this verdict moves nothing")
        return PolicyExplanation(**dict(status), lines=lines)

    async def promote(self, request: Request, wanted: PromotePolicyRequest) -> PolicyStatus:
        """Let the challenger answer more of the users."""
        return await self._moved(request, wanted, partial(Stages.promote, share=wanted.share))

    async def roll_back(self, request: Request, wanted: RollBackPolicyRequest) -> PolicyStatus:
        """Let the incumbent answer everybody from now on, or the one before it, and training go on."""
        return await self._moved(request, wanted, Stages.recall if wanted.recall else Stages.roll_back)

    async def pin(self, request: Request, wanted: PinPolicyRequest) -> PolicyStatus:
        """Let no verdict move the challenger, or let verdicts move it again."""
        return await self._moved(request, wanted, partial(Stages.pin, pinned=wanted.pinned))

    async def resume(self, request: Request, wanted: ResumeRequest) -> PoliciesResponse:
        """Let training go on in spite of the alarms or the rollback that paused it; later ones pause it again."""
        async with self.audit.command(request, "policies resume") as details:
            details |= {"reason": wanted.reason, "alarms": [alarm.sentence for alarm in self.alarms() if alarm.pauses]}
            await self.episodes.resume_training()
        return await self.policies()

    async def kept(self) -> KeptPoliciesResponse:
        """The versions whose checkpoints are kept."""
        return KeptPoliciesResponse(versions=await self._of_folder(KeptVersions.all))

    async def record(self, step: str) -> PolicyRecord:
        """What made one version, what was proven of it, who promoted it and why."""
        if not step.isascii() or not step.isdigit() or len(step) > 9:
            raise NotFoundError(f"there is no step {step[:20]!r}: steps have numbers", code="not_kept")
        return await self._of_folder(partial(KeptVersions.record, step=int(step)))

    async def delete(self, request: Request, wanted: DeletePolicyRequest) -> KeptVersion:
        """Remove the checkpoint of a version; its rows in the journal stay."""
        pool = self.episodes.run.found_pool
        held = None if pool is None else pool.stages.held
        async with self.audit.command(request, "policies delete", wanted.model_dump()) as details:
            gone = await self._of_folder(partial(KeptVersions.delete, step=wanted.step, held=held))
            details |= gone.model_dump()
        return gone

    async def _of_folder(self, ask: Callable[[KeptVersions], T]) -> T:
        try:
            return await asyncio.to_thread(lambda: ask(KeptVersions(self.run_dir)))
        except ConfigError as exc:
            raise NotFoundError(exc.message, code="not_kept") from exc

    async def _moved(
        self, request: Request, wanted: MovePolicyRequest, move: Callable[..., ServingStage]
    ) -> PolicyStatus:
        name, sender = request.scope["caller"].name, sender_of(request)
        by = f"{name} for {sender}" if sender else name
        async with self.audit.command(request, request.url.path.strip("/").replace("/", " ")) as details:
            details |= wanted.model_dump(exclude_defaults=True)
            stage = await self.episodes.move_stage(
                lambda stages: move(
                    stages, stages.find(wanted.route, wanted.incumbent), wanted.version, by, wanted.reason
                )
            )
            details |= {"stage": stage.label, "to_version": stage.version, "challenger": stage.challenger}
        return self._status(stage)

    def _comparison(self, stage: ServingStage) -> PairedEvidence | None:
        """The latest comparison of the challenger that is served, in its stage: of those that may move it, if there is
        one."""
        fitting = [
            followed
            for followed in self.episodes.run.pool.comparisons.of(*stage.key)
            if (terms := followed.terms) and (terms.challenger, terms.stage) == (stage.challenger, stage.label)
        ]
        return next(reversed([followed for followed in fitting if self._counts(followed)] or fitting), None)

    def _counts(self, followed: PairedEvidence) -> bool:
        """Whether a comparison is by the rules of its stage."""
        return self.episodes.run.pool.stages.counts(followed)

    def _status(self, stage: ServingStage) -> PolicyStatus:
        followed = self._comparison(stage)
        verdict = followed.verdict() if followed is not None else None
        waits = ""
        # what is proven by other rules moves nobody, and asks nobody to
        counts = followed is not None and self._counts(followed)
        if verdict is not None and counts and (stage.pinned or stage.rules.mode != "auto"):
            if verdict.finding == "worse" and stage.share > 0:
                waits = "rollback"
            elif verdict.promotable and stage.share < 1 and stage.rules.mode != "never":
                waits = "promote"
        return PolicyStatus(stage=stage.shown, verdict=verdict, waits=waits)


def _lines(stage: ServingStage, evidence: PairedEvidence | None, status: PolicyStatus) -> list[str]:
    since = datetime.fromtimestamp(stage.at, UTC).isoformat(timespec="seconds")
    pinned = f", pinned by {stage.pinned_by}: {stage.pinned_why}" if stage.pinned else ""
    version = "no version yet" if stage.challenger is None else f"version {stage.challenger}"
    lines = [
        f"route {stage.route}: {version} against {stage.incumbent}",
        f"stage {stage.label} since {since}, by {stage.by}: {stage.why}",
        f"mode {stage.rules.mode}{pinned}; shares "
        f"{', '.join(f'{share:g}' for share in stage.rules.shares)}; " + _training(stage),
    ]
    if evidence is None or (verdict := status.verdict) is None:
        return [*lines, f"nothing is compared yet of {version} in the stage {stage.label}"]
    rules, terms = evidence.terms.rules, evidence.terms
    live, unjudged = evidence.draws("")
    begun, rated = (
        f"{ours} of the challenger, {theirs} of the incumbent" for ours, theirs in (verdict.begun, verdict.rated)
    )
    sides = [f"conversations: {begun}, share {terms.share:g}", f"rated answers: {rated}"] if terms.share else []
    lines += [
        f"terms {terms.digest}: hook {terms.hook} ({terms.code[:12]}), {terms.num_repeat} answers, margin "
        f"{rules.margin:g}, alpha {rules.alpha:g}",
        f"evidence: {live} requests, {unjudged} of them not judged (at most {rules.max_unjudged:g} of them)",
        *(
            f"suite {name}: {finding.replace('_', ' ')} in {draws} draws, {missing} of them not judged"
            for name, finding in verdict.suites.items()
            for draws, missing in [evidence.draws(name)]
        ),
        *_guards(evidence),
        f"chance of a false alarm: {', '.join(f'{name} {part:g}' for name, part in verdict.budget.items())}",
        *sides,
        f"verdict: {verdict.sentence}",
        f"promotable: {'yes' if verdict.promotable else 'no'}",
    ]
    return [*lines, f"waits for a person: {status.waits}"] if status.waits else lines


def _training(stage: ServingStage) -> str:
    if stage.paused:
        return "training waits for a person (`policies resume`), for the challenger was taken back"
    if stage.trial:
        return f"training waits (trial of version {stage.tried})"
    return f"training goes on{f' (trial of version {stage.tried}: {stage.ended})' if stage.ended else ''}"


def _guards(evidence: PairedEvidence) -> list[str]:
    rules = evidence.terms.rules
    parts: list[str] = []
    for name, value in evidence.guarded().items():
        if name == "p95_seconds":
            parts.append(
                f"{value:.3f} of the groups took longer than {rules.max_p95_seconds:g} s (at most {SLOWEST:g})"
            )
        elif name == "length":
            parts.append(f"length {value:.2f} times the incumbent's (at most {rules.max_length:g})")
        else:
            parts.append(f"{name} {value:+.3f} (at most {getattr(rules, f'max_{name}'):g})")
    return [f"guards: {', '.join(parts)}"] if parts else []
