"""Routes of episodes: claim, end, abort, agree.

Invariant: what an answer tells is on disk; claims with a key, ends and aborts may be repeated; a claim whose caller
left while it waited leaves nothing behind.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import ConflictError, NotFoundError
from swarm.http.asgi import base_url
from swarm.protocol import (
    AbortEpisodeRequest,
    AgreeSyncWeightRequest,
    CanContinueResponse,
    ClaimedEpisode,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimGroupRequest,
    ClaimGroupResponse,
    EndEpisodeRequest,
    EndGroupRequest,
    EpisodeRequest,
    LateEndResponse,
    SuccessResponse,
    WithdrawClaimRequest,
)
from swarm.server.api.responses import OfClientT, answer, read_as_client
from swarm.server.auth import ClientNames
from swarm.server.concurrency import ClientGoneError
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.endings import DELETED
from swarm.server.episodes.episode import Claim, ClaimWish, Grant
from swarm.server.meters import Meters
from swarm.states import EngineState

_GONE = "the caller is gone"


@dataclass(frozen=True)
class EpisodeRoutes:
    """``/claim_*``, ``/withdraw_claim``, ``/end_*``, ``/abort_episode``, ``/can_continue_episode`` and
    ``/agree_sync_weight``."""

    config: ServerConfig
    controller: Controller
    meters: Meters
    names: ClientNames

    def routes(self) -> list[Route]:
        return [
            Route("/claim_episode", self.claim_episode, methods=["POST"]),
            Route("/claim_group", self.claim_group, methods=["POST"]),
            Route("/withdraw_claim", self.withdraw_claim, methods=["POST"]),
            Route("/end_episode", self.end_episode, methods=["POST"]),
            Route("/end_group", self.end_group, methods=["POST"]),
            Route("/abort_episode", self.abort_episode, methods=["POST"]),
            Route("/can_continue_episode", self.can_continue_episode, methods=["POST"]),
            Route("/agree_sync_weight", self.agree_sync_weight, methods=["POST"]),
        ]

    async def claim_episode(self, request: Request) -> Response:
        wanted = await self._read(request, ClaimEpisodeRequest)
        grant = await self._claim(request, wanted, 1, as_group=False)
        if isinstance(grant, str):
            return answer(ClaimEpisodeResponse(success=False, client_uuid=wanted.client_uuid, fail_cause=grant))
        (claim,) = grant.claims
        return answer(
            ClaimEpisodeResponse(
                success=True,
                client_uuid=wanted.client_uuid,
                episode_uuid=claim.episode_uuid,
                openai_base_url=_episode_url(request, claim),
                openai_api_key=claim.key,
            )
        )

    async def claim_group(self, request: Request) -> Response:
        wanted = await self._read(request, ClaimGroupRequest)
        grant = await self._claim(request, wanted, wanted.count, as_group=True)
        if isinstance(grant, str):
            return answer(ClaimGroupResponse(success=False, client_uuid=wanted.client_uuid, fail_cause=grant))
        episodes = [
            ClaimedEpisode(
                episode_uuid=claim.episode_uuid,
                openai_base_url=_episode_url(request, claim),
                openai_api_key=claim.key,
            )
            for claim in grant.claims
        ]
        return answer(
            ClaimGroupResponse(
                success=True,
                client_uuid=wanted.client_uuid,
                episodes=episodes,
                group_uuid=grant.group_uuid,
                openai_base_url=f"{base_url(request)}groups/{grant.group_uuid}/v1",
                openai_api_key=grant.group_key,
            )
        )

    async def withdraw_claim(self, request: Request) -> Response:
        wanted = await self._read(request, WithdrawClaimRequest)
        await self.controller.withdraw_claim(wanted.client_uuid, wanted.idempotency_key)
        return answer(SuccessResponse(success=True))

    async def end_episode(self, request: Request) -> Response:
        wanted = await self._read(request, EndEpisodeRequest)
        key = wanted.idempotency_key or ""
        try:
            dropped = await self.controller.end(
                wanted.client_uuid, wanted.task_id, [wanted], as_group=False, end_key=key
            )
        except ConflictError as exc:
            if key or exc.code != DELETED:
                raise
            # AgentJet's client names no ends, and takes these words for «go on» but every other error for «run the
            # task once more»
            detail = f"{EngineState.WEIGHT_SYNCING}: {exc.message}"
            late = LateEndResponse(success=False, error=exc.message, code=DELETED, detail=detail)
            return answer(late, status=400, headers={"x-should-retry": "false"})
        return _ended(dropped)

    async def end_group(self, request: Request) -> Response:
        wanted = await self._read(request, EndGroupRequest)
        key = wanted.idempotency_key or ""
        return _ended(
            await self.controller.end(wanted.client_uuid, wanted.task_id, wanted.ends, as_group=True, end_key=key)
        )

    async def abort_episode(self, request: Request) -> Response:
        wanted = await self._read(request, AbortEpisodeRequest)
        try:
            note = await self.controller.abort(wanted.client_uuid, wanted.episode_uuid, wanted.reason, wanted.metadata)
        except NotFoundError as exc:
            # whoever aborts wants to be rid of it: an error would only have the client try again
            note = exc.message
        return answer(SuccessResponse(success=True, error=note or None))

    async def can_continue_episode(self, request: Request) -> Response:
        wanted = await self._read(request, EpisodeRequest)
        mine = await self.controller.can_continue(wanted.client_uuid, wanted.episode_uuid)
        return answer(CanContinueResponse(can_continue=mine))

    async def agree_sync_weight(self, request: Request) -> Response:
        wanted = await self._read(request, AgreeSyncWeightRequest)
        return answer(await self.controller.agree(wanted.client_uuid))

    async def _read(self, request: Request, model: type[OfClientT]) -> OfClientT:
        """The body of a request, whose caller may act for the client that it names."""
        return await read_as_client(request, model, self.config.max_body_bytes, self.names)

    async def _claim(self, request: Request, wanted: ClaimEpisodeRequest, count: int, *, as_group: bool) -> Grant | str:
        wish = wish_for(wanted, self.config, count, as_group=as_group)
        came = time.monotonic()
        try:
            outcome = await self.controller.claim(wish, wanted.wait_seconds, request.receive)
        except ClientGoneError:
            return _GONE
        if isinstance(outcome, Grant):
            self.meters.claim_granted(time.monotonic() - came)
        return outcome


def wish_for(wanted: ClaimEpisodeRequest, config: ServerConfig, count: int = 1, *, as_group: bool = False) -> ClaimWish:
    """What a body asks for."""
    return ClaimWish(
        client_uuid=wanted.client_uuid,
        episode_type=wanted.episode_type,
        idle_timeout=wanted.discard_episode_timeout,
        max_seconds=wanted.max_episode_seconds or config.max_episode_seconds,
        episodes=count,
        as_group=as_group,
        claim_key=wanted.idempotency_key or "",
        throttle=wanted.throttle_policy,
    )


def not_trained(dropped: str) -> str | None:
    """The ``error`` of an end that is accepted (``success``), though nothing of it is trained."""
    return f"not trained: {dropped}" if dropped else None


def _ended(dropped: str) -> Response:
    return answer(SuccessResponse(success=True, error=not_trained(dropped)))


def _episode_url(request: Request, claim: Claim) -> str:
    # the address under which this caller reached us is the one that it can reach again
    return f"{base_url(request)}episodes/{claim.episode_uuid}/v1"
