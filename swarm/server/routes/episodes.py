"""Routes of episodes: claim, end, abort, and what the pool holds.

Invariant: ends and aborts may be repeated; a claim whose caller left gives its episodes back at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.http.asgi import read_model
from swarm.protocol import (
    CanContinueResponse,
    ClaimedEpisode,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimGroupRequest,
    ClaimGroupResponse,
    EndEpisodeRequest,
    EndGroupRequest,
    EpisodeEnd,
    EpisodeRequest,
    SuccessResponse,
)
from swarm.server.concurrency import ClientGoneError, until_gone
from swarm.server.config import ServerConfig
from swarm.server.controller import Controller
from swarm.server.episodes import Claim
from swarm.server.routes.answer import answer


@dataclass(frozen=True)
class EpisodeRoutes:
    """``/claim_*``, ``/end_*``, ``/abort_episode``, ``/can_continue_episode`` and the pool's information."""

    config: ServerConfig
    controller: Controller

    def routes(self) -> list[Route]:
        return [
            Route("/claim_episode", self.claim_episode, methods=["POST"]),
            Route("/claim_group", self.claim_group, methods=["POST"]),
            Route("/end_episode", self.end_episode, methods=["POST"]),
            Route("/end_group", self.end_group, methods=["POST"]),
            Route("/abort_episode", self.abort_episode, methods=["POST"]),
            Route("/can_continue_episode", self.can_continue_episode, methods=["POST"]),
            Route("/get_current_batch_rollout_pool_information", self.pool_information, methods=["GET"]),
        ]

    async def claim_episode(self, request: Request) -> Response:
        wanted = await read_model(request, ClaimEpisodeRequest, self.config.max_body_bytes)
        claims = await self._claim(request, wanted, 1)
        if isinstance(claims, str):
            return answer(ClaimEpisodeResponse(success=False, client_uuid=wanted.client_uuid, fail_cause=claims))
        return answer(ClaimEpisodeResponse(success=True, client_uuid=wanted.client_uuid, **claims[0].model_dump()))

    async def claim_group(self, request: Request) -> Response:
        wanted = await read_model(request, ClaimGroupRequest, self.config.max_body_bytes)
        claims = await self._claim(request, wanted, wanted.count)
        if isinstance(claims, str):
            return answer(ClaimGroupResponse(success=False, client_uuid=wanted.client_uuid, fail_cause=claims))
        return answer(ClaimGroupResponse(success=True, client_uuid=wanted.client_uuid, episodes=claims))

    async def end_episode(self, request: Request) -> Response:
        wanted = await read_model(request, EndEpisodeRequest, self.config.max_body_bytes)
        end = EpisodeEnd(episode_uuid=wanted.episode_uuid, workflow_output=wanted.workflow_output)
        return self._end(wanted.client_uuid, wanted.task_id, [end], as_group=False)

    async def end_group(self, request: Request) -> Response:
        wanted = await read_model(request, EndGroupRequest, self.config.max_body_bytes)
        return self._end(wanted.client_uuid, wanted.task_id, wanted.ends, as_group=True)

    async def abort_episode(self, request: Request) -> Response:
        wanted = await read_model(request, EpisodeRequest, self.config.max_body_bytes)
        note = self.controller.abort(wanted.client_uuid, wanted.episode_uuid)
        return answer(SuccessResponse(success=True, error=note or None))

    async def can_continue_episode(self, request: Request) -> Response:
        wanted = await read_model(request, EpisodeRequest, self.config.max_body_bytes)
        mine = self.controller.pool.can_continue(wanted.client_uuid, wanted.episode_uuid)
        return answer(CanContinueResponse(can_continue=mine))

    async def pool_information(self, request: Request) -> Response:
        return answer(self.controller.pool.information())

    def _end(self, client_uuid: str, task_id: str, ends: list[EpisodeEnd], *, as_group: bool) -> Response:
        dropped = self.controller.pool.end(client_uuid, task_id, ends, as_group=as_group)
        self.controller.pool_changed()
        # success: the end is accepted; the error then says why nothing of it is trained
        return answer(SuccessResponse(success=True, error=f"not trained: {dropped}" if dropped else None))

    async def _claim(self, request: Request, wanted: ClaimEpisodeRequest, count: int) -> list[ClaimedEpisode] | str:
        work = self.controller.claim(
            wanted.client_uuid, wanted.episode_type, wanted.discard_episode_timeout, count, wanted.wait_seconds
        )
        try:
            claims = await until_gone(request.receive, work)
        except ClientGoneError:
            return "the caller is gone"
        return claims if isinstance(claims, str) else [self._address(request, claim) for claim in claims]

    def _address(self, request: Request, claim: Claim) -> ClaimedEpisode:
        # the address under which this caller reached us is the one that it can reach again
        return ClaimedEpisode(
            episode_uuid=claim.episode_uuid,
            openai_base_url=f"{request.base_url}episodes/{claim.episode_uuid}/v1",
            openai_api_key=claim.key,
        )
