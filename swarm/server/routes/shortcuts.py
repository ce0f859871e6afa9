"""Shortcuts to the two busiest routes: one episode is claimed, one episode is ended.

Invariant: here nothing is decided and nobody is refused. What the pool grants or takes at once is answered once it is
on disk, in the very words of :mod:`swarm.server.routes.episodes`; everything else is left to that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from swarm.errors import SwarmGatewayError, UnavailableError
from swarm.http.asgi import base_url_of, error_response, header, parse_json, request_id, validated
from swarm.http.guard import is_json
from swarm.http.shortcuts import Shortcuts, ShortRequest
from swarm.protocol import ClaimEpisodeRequest, EndEpisodeRequest
from swarm.server.auth import Admission, ClientNames
from swarm.server.config import ServerConfig
from swarm.server.controller import Controller
from swarm.server.episodes import Grant
from swarm.server.meters import Meters
from swarm.server.routes.episodes import not_trained, wish_for

#: with these uvicorn's middleware for proxies decides what the application sees
_PROXIED = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})


@dataclass(frozen=True)
class EpisodeShortcuts:
    """``POST /claim_episode`` and ``POST /end_episode``."""

    config: ServerConfig
    controller: Controller
    meters: Meters
    admission: Admission
    names: ClientNames

    def table(self) -> Shortcuts:
        return {"/claim_episode": self.claim, "/end_episode": self.end}

    def claim(self, request: ShortRequest) -> bool:
        began = time.monotonic()
        controller, scope = self.controller, request.scope
        if not controller.has_job or len(controller.claims) or controller.journal_behind:
            return False
        try:
            self._check(scope)
            wanted = validated(ClaimEpisodeRequest, parse_json(request.body))
            self.names.check(scope["caller"], wanted.client_uuid)
            wish = wish_for(wanted, self.config)
            if controller.claims.remembers(wish):
                return False
            # a grant is a sign of life; what is refused here comes to the application, which tells of one
            grant = controller.claims.claim(wish, wait=False)
        except SwarmGatewayError:
            return False
        controller.pool_changed()
        if not isinstance(grant, Grant):
            return False
        (claim,) = grant.claims

        def told(error: UnavailableError | None) -> None:
            if error is not None:
                if not wish.claim_key:
                    controller.claims.give_back(wish, grant)
                self._answer_error(request, began, error)
                return
            self.meters.claim_granted(time.monotonic() - began)
            answer = {
                "success": True,
                "client_uuid": wish.client_uuid,
                "episode_uuid": claim.episode_uuid,
                "openai_base_url": f"{base_url_of(scope)}episodes/{claim.episode_uuid}/v1",
                "openai_api_key": claim.key,
                "fail_cause": "",
            }
            self._answer(request, began, 200, orjson.dumps(answer))

        controller.on_disk(told)
        return True

    def end(self, request: ShortRequest) -> bool:
        began = time.monotonic()
        controller = self.controller
        if not controller.has_job:
            return False
        try:
            self._check(request.scope)
            wanted = validated(EndEpisodeRequest, parse_json(request.body))
            self.names.check(request.scope["caller"], wanted.client_uuid)
            pool, client_uuid, episode_uuid = controller.pool, wanted.client_uuid, wanted.episode_uuid
            if not pool.can_continue(client_uuid, episode_uuid):
                return False
            dropped = pool.end(client_uuid, wanted.task_id, [wanted], end_key=wanted.idempotency_key or "")
        except SwarmGatewayError:
            return False
        controller.pool_changed()

        def told(error: UnavailableError | None) -> None:
            if error is None:
                answer = {"success": True, "error": not_trained(dropped)}
                self._answer(request, began, 200, orjson.dumps(answer))
            else:
                self._answer_error(request, began, error)

        controller.on_disk(told)
        return True

    def _check(self, scope: dict[str, Any]) -> None:
        """What the application's middleware checks.

        Raises:
            SwarmGatewayError: it may refuse the request.
        """
        headers = scope["headers"]
        if not _PROXIED.isdisjoint(dict(headers)) or not is_json(header(headers, b"content-type") or b""):
            raise SwarmGatewayError("not for a shortcut")
        self.admission.admit(scope)

    def _answer(self, request: ShortRequest, began: float, status: int, body: bytes) -> None:
        headers = (
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"application/json"),
            (b"x-request-id", request_id(request.scope["headers"])),
        )
        request.answer(status, headers, body)
        self.meters.request("POST", request.scope["path"], status, time.monotonic() - began)

    def _answer_error(self, request: ShortRequest, began: float, error: SwarmGatewayError) -> None:
        response = error_response(error)
        headers = [*response.raw_headers, (b"x-request-id", request_id(request.scope["headers"]))]
        request.answer(response.status_code, headers, bytes(response.body))
        self.meters.request("POST", request.scope["path"], response.status_code, time.monotonic() - began)
