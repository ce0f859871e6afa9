"""Routes of episodes: claim, end, abort, agree.

Invariant: what a response to an end or an abort says is on disk; claims with a key, ends and aborts may be repeated; a
claim whose caller left while it waited leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.concurrency import until_gone
from swarm.errors import ConflictError, NotFoundError
from swarm.http.asgi import header
from swarm.protocol import (
    LATE_CODES,
    MAX_SECONDS,
    AbortEpisodeRequest,
    AgreeSyncWeightRequest,
    BoolResponse,
    CanContinueResponse,
    ClaimedEpisode,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimGroupRequest,
    ClaimGroupResponse,
    EndedResponse,
    EndEpisodeRequest,
    EndGroupRequest,
    EpisodeEnd,
    EpisodeRequest,
    EpisodeTokens,
    FollowStagesRequest,
    LateEndResponse,
    RecordPairRequest,
    RecordRatingRequest,
    StagesResponse,
    SuccessResponse,
    WithdrawClaimRequest,
)
from swarm.server.api.engine import BACKLOG
from swarm.server.auth import ClientNames, ControlRoute
from swarm.server.config import ServerConfig
from swarm.server.engine.requests import EpisodeRequests
from swarm.server.episodes.episode import ClaimWish, Grant
from swarm.server.foreign import ForeignClients
from swarm.server.monitor import Meters, VerboseLog
from swarm.tokens import TokenCounts


@dataclass(frozen=True)
class EpisodeRoutes:
    """``/claim_*``, ``/withdraw_claim``, ``/end_*``, ``/record_*``, ``/abort_episode``, ``/can_continue_episode``
    and ``/agree_sync_weight``; callers act only for clients that are theirs."""

    config: ServerConfig
    episodes: EpisodeRequests
    meters: Meters
    names: ClientNames
    log: VerboseLog
    foreign: ForeignClients

    def routes(self) -> list[BaseRoute]:
        claims = {409: "an idempotency key of another claim", 503: BACKLOG}
        not_yours = {404: "no such episode, or it is another client's"}
        ends = not_yours | {409: "too late: the code says how the episode had ended", 503: BACKLOG}
        no_job = {409: "there is no training job yet"}
        return [
            ControlRoute("POST", "/claim_episode", self.claim_episode, "claim", refusals=claims),
            ControlRoute("POST", "/claim_group", self.claim_group, "claim", refusals=claims),
            ControlRoute(
                "POST",
                "/end_episode",
                self.end_episode,
                "claim",
                refusals=ends,
                refused=LateEndResponse,
            ),
            ControlRoute("POST", "/end_group", self.end_group, "claim", refusals=ends),
            ControlRoute("POST", "/record_pair", self.record_pair, "claim", refusals=no_job | {503: BACKLOG}),
            ControlRoute("POST", "/record_rating", self.record_rating, "claim", refusals=no_job | {503: BACKLOG}),
            ControlRoute("POST", "/follow_stages", self.follow_stages, "claim", refusals=no_job),
            ControlRoute("POST", "/withdraw_claim", self.withdraw_claim, "claim"),
            ControlRoute("POST", "/abort_episode", self.abort_episode, "claim", refusals={503: BACKLOG}),
            ControlRoute("POST", "/can_continue_episode", self.can_continue_episode, "claim", refusals=no_job),
            ControlRoute(
                "POST", "/agree_sync_weight", self.agree_sync_weight, "claim", refusals=no_job | {503: BACKLOG}
            ),
        ]

    async def claim_episode(self, request: Request, wanted: ClaimEpisodeRequest) -> ClaimEpisodeResponse:
        """Claim an episode."""
        grant = await self._claim(request, wanted, 1, as_group=False)
        if isinstance(grant, str):
            return ClaimEpisodeResponse(success=False, client_uuid=wanted.client_uuid, fail_cause=grant)
        (claim,) = grant.claims
        return ClaimEpisodeResponse(
            success=True,
            client_uuid=wanted.client_uuid,
            episode_uuid=claim.episode_uuid,
            openai_base_url=f"{_reached_at(request)}/episodes/{claim.episode_uuid}/v1",
            openai_api_key=claim.key,
        )

    async def claim_group(self, request: Request, wanted: ClaimGroupRequest) -> ClaimGroupResponse:
        """Claim several episodes of one task, all or none."""
        grant = await self._claim(request, wanted, wanted.count, as_group=True)
        if isinstance(grant, str):
            return ClaimGroupResponse(success=False, client_uuid=wanted.client_uuid, fail_cause=grant)
        server = _reached_at(request)
        return ClaimGroupResponse(
            success=True,
            client_uuid=wanted.client_uuid,
            episodes=[
                ClaimedEpisode(
                    episode_uuid=claim.episode_uuid,
                    openai_base_url=f"{server}/episodes/{claim.episode_uuid}/v1",
                    openai_api_key=claim.key,
                )
                for claim in grant.claims
            ],
            group_uuid=grant.group_uuid,
            openai_base_url=f"{server}/groups/{grant.group_uuid}/v1",
            openai_api_key=grant.group_key,
        )

    async def withdraw_claim(self, request: Request, wanted: WithdrawClaimRequest) -> SuccessResponse:
        """Cancel a claim that waits; always succeeds."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        await self.episodes.withdraw_claim(wanted.client_uuid, wanted.idempotency_key)
        return SuccessResponse(success=True)

    async def end_episode(self, request: Request, wanted: EndEpisodeRequest) -> EndedResponse | Response:
        """End an episode with its reward."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        key = wanted.idempotency_key or ""
        try:
            dropped = await self.episodes.end(wanted.client_uuid, wanted.task_id, [wanted], as_group=False, end_key=key)
        except ConflictError as exc:
            late = None if key or exc.code not in LATE_CODES else self.foreign.late_end(exc)
            if late is None:
                raise
            self.log.push("episodes", exc.message)
            return late
        return self._ended(dropped, [wanted])

    async def end_group(self, request: Request, wanted: EndGroupRequest) -> EndedResponse:
        """End several episodes of one task in one transition."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        key = wanted.idempotency_key or ""
        dropped = await self.episodes.end(
            wanted.client_uuid, wanted.task_id, wanted.ends, as_group=True, end_key=key, pair=wanted.pair
        )
        return self._ended(dropped, wanted.ends)

    async def record_pair(self, request: Request, wanted: RecordPairRequest) -> SuccessResponse:
        """Record what a challenger's group and an incumbent did with one request, where no end takes it along."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        await self.episodes.record_pair(wanted.pair)
        return SuccessResponse(success=True)

    async def record_rating(self, request: Request, wanted: RecordRatingRequest) -> SuccessResponse:
        """Record what a user said of one side's answer; a later rating of the answer replaces it."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        await self.episodes.record_rating(wanted.rating)
        return SuccessResponse(success=True)

    async def follow_stages(self, request: Request, wanted: FollowStagesRequest) -> StagesResponse:
        """Who answers the users of a gateway's routes, now or once that changes; routes that are new begin."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        # once, when a gateway begins: two with other rules would go on replacing each other's
        admin = request.scope["caller"].may("admin")
        sets_rules = wanted.after_change is None and admin
        following = self.episodes.follow_stages(
            wanted.routes, wanted.after_change, wanted.wait_seconds, sets_rules=sets_rules, may_hold=admin
        )
        changes, stages = await until_gone(request.receive, following)
        return StagesResponse(changes=changes, stages=stages)

    async def abort_episode(self, request: Request, wanted: AbortEpisodeRequest) -> SuccessResponse:
        """Give an episode up; always succeeds."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        try:
            note = await self.episodes.abort(wanted.client_uuid, wanted.episode_uuid, wanted.reason, wanted.notes)
        except NotFoundError as exc:
            # the caller wants to be rid of it: an error would only make it try again
            note = exc.message
        return SuccessResponse(success=True, error=note or None)

    async def can_continue_episode(self, request: Request, wanted: EpisodeRequest) -> CanContinueResponse:
        """Whether an episode is still this client's to run."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        mine = await self.episodes.can_continue(wanted.client_uuid, wanted.episode_uuid)
        return CanContinueResponse(can_continue=mine)

    async def agree_sync_weight(self, request: Request, wanted: AgreeSyncWeightRequest) -> BoolResponse:
        """Say that this client has no more for the current batch."""
        self.names.check(request.scope["caller"], wanted.client_uuid)
        return await self.episodes.agree(wanted.client_uuid, wanted.idempotency_key or "")

    def _ended(self, dropped: str, ends: Sequence[EpisodeEnd]) -> EndedResponse:
        """The response to an end that is accepted, though perhaps nothing of it is trained."""
        counts_of = self.episodes.run.pool.tokens(end.episode_uuid for end in ends)
        return EndedResponse(
            success=True,
            error=f"not trained: {dropped}" if dropped else None,
            tokens={name: _tokens_of(counts, dropped) for name, counts in counts_of.items()},
        )

    async def _claim(self, request: Request, wanted: ClaimEpisodeRequest, count: int, *, as_group: bool) -> Grant | str:
        self.names.check(request.scope["caller"], wanted.client_uuid)
        wish = ClaimWish(
            client_uuid=wanted.client_uuid,
            episode_type=wanted.episode_type,
            idle_timeout=wanted.discard_episode_timeout,
            max_seconds=wanted.max_episode_seconds or min(MAX_SECONDS, self.config.max_episode_seconds),
            episodes=count,
            as_group=as_group,
            claim_key=wanted.idempotency_key or "",
            throttle=wanted.throttle_policy,
            unless_batch_waits=wanted.unless_batch_waits,
        )
        wait = wanted.wait_seconds
        held = self.foreign.held_seconds
        if held is not None and not as_group and "wait_seconds" not in wanted.model_fields_set:
            wish, wait = wish._replace(while_closed=True), held
        came = time.monotonic()
        outcome = await self.episodes.claim(wish, wait, request.receive)
        if isinstance(outcome, Grant):
            self.meters.claim_waits.observe(time.monotonic() - came)
        return outcome


def _tokens_of(counts: TokenCounts, dropped: str) -> EpisodeTokens:
    lost = counts.sampled if not counts.timelines else 0
    return EpisodeTokens(**structs.asdict(counts), dropped=lost, why=dropped if lost else "")


def _reached_at(request: Request) -> str:
    """The address by which this caller reached us, so that it can reach it again; without a slash at its end."""
    scope = request.scope
    host = header(scope["headers"], b"host")
    if host is None:
        return str(request.base_url).rstrip("/")
    # parsing it into an URL would take as long as the claim
    return f"{scope['scheme']}://{host.decode('latin-1')}{scope.get('root_path', '')}"
