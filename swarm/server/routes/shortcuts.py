"""Shortcuts to the two busiest routes: one episode is claimed, one episode is ended.

Invariant: here nothing is decided and nobody is refused. What the pool grants or takes at once is answered once it is
on disk, in the very words of :mod:`swarm.server.routes.episodes`; everything else is left to that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import orjson

from swarm.errors import SwarmGatewayError, UnavailableError
from swarm.http.asgi import (
    RawHeaders,
    base_url_at,
    error_response,
    given_request_id,
    header,
    new_request_id,
    parse_json,
    validated,
)
from swarm.http.guard import is_json
from swarm.http.shortcuts import Head, Shortcuts, ShortRequest
from swarm.protocol import ClaimEpisodeRequest, EndEpisodeRequest
from swarm.server.auth import Admission, Caller, ClientNames, Credentials
from swarm.server.config import ServerConfig
from swarm.server.controller import Controller
from swarm.server.episodes import Grant
from swarm.server.meters import Meters
from swarm.server.routes.episodes import not_trained, wish_for

#: with these uvicorn's middleware for proxies decides what the application sees
_PROXIED = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})


class _Notes:
    """What is kept of a head: from its headers alone, so that it holds for whoever sends it, whenever."""

    __slots__ = ("credentials", "host", "plain", "request_id")

    def __init__(self, headers: RawHeaders) -> None:
        #: whether the application's middleware would let it through, but for its caller
        self.plain = not any(name in _PROXIED for name, _ in headers) and is_json(
            header(headers, b"content-type") or b""
        )
        self.credentials = Credentials(headers)
        self.host = header(headers, b"host")
        self.request_id = given_request_id(headers)


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
        controller = self.controller
        if not controller.has_job or len(controller.claims) or controller.journal_behind:
            return False
        try:
            caller = self._caller(request)
            wanted = validated(ClaimEpisodeRequest, parse_json(request.body))
            self.names.check(caller, wanted.client_uuid)
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
            at = request.connection
            base_url = base_url_at(at.scheme, _notes(request.head).host, at.server, at.root_path)
            answer = {
                "success": True,
                "client_uuid": wish.client_uuid,
                "episode_uuid": claim.episode_uuid,
                "openai_base_url": f"{base_url}episodes/{claim.episode_uuid}/v1",
                "openai_api_key": claim.key,
                "fail_cause": "",
            }
            self._answer(request, began, orjson.dumps(answer))

        controller.on_disk(told)
        return True

    def end(self, request: ShortRequest) -> bool:
        began = time.monotonic()
        controller = self.controller
        if not controller.has_job:
            return False
        try:
            caller = self._caller(request)
            wanted = validated(EndEpisodeRequest, parse_json(request.body))
            self.names.check(caller, wanted.client_uuid)
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
                self._answer(request, began, orjson.dumps(answer))
            else:
                self._answer_error(request, began, error)

        controller.on_disk(told)
        return True

    def _caller(self, request: ShortRequest) -> Caller:
        """Who sends the request, if the application's middleware lets it through.

        Raises:
            SwarmGatewayError: it may refuse the request.
        """
        notes = _notes(request.head)
        if not notes.plain:
            raise SwarmGatewayError("not for a shortcut")
        return self.admission.caller(notes.credentials, request.connection.client, request.head.path)

    def _answer(self, request: ShortRequest, began: float, body: bytes) -> None:
        lines = b"content-length: %d\r\ncontent-type: application/json\r\nx-request-id: %b\r\n"
        request.answer(200, lines % (len(body), _notes(request.head).request_id or new_request_id()), body)
        self.meters.request("POST", request.head.path, 200, time.monotonic() - began)

    def _answer_error(self, request: ShortRequest, began: float, error: SwarmGatewayError) -> None:
        response = error_response(error)
        headers = [*response.raw_headers, (b"x-request-id", _notes(request.head).request_id or new_request_id())]
        lines = b"".join(b"%b: %b\r\n" % one for one in headers)
        request.answer(response.status_code, lines, bytes(response.body))
        self.meters.request("POST", request.head.path, response.status_code, time.monotonic() - began)


def _notes(head: Head) -> _Notes:
    notes: _Notes | None = head.notes
    if notes is None:
        notes = head.notes = _Notes(head.headers)
    return notes
