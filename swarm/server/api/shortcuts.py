"""Shortcuts to the busiest routes: an episode or a group of them is claimed, or ended.

Invariant: here nothing is decided and nobody is refused. What the pool grants or takes at once is answered once it is
on disk, in the very words of :mod:`swarm.server.api.episodes`; everything else is left to that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

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
from swarm.protocol import ClaimEpisodeRequest, ClaimGroupRequest, EndEpisodeRequest, EndGroupRequest
from swarm.server.api.episodes import not_trained, wish_for
from swarm.server.auth import Admission, Caller, ClientNames, Credentials
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import ClaimWish, Grant
from swarm.server.meters import Meters

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
    """``POST /claim_episode`` and ``/claim_group``, ``POST /end_episode`` and ``/end_group``."""

    config: ServerConfig
    controller: Controller
    meters: Meters
    admission: Admission
    names: ClientNames

    def table(self) -> Shortcuts:
        return {
            "/claim_episode": lambda request: self._claim(request, ClaimEpisodeRequest),
            "/claim_group": lambda request: self._claim(request, ClaimGroupRequest),
            "/end_episode": lambda request: self._end(request, EndEpisodeRequest),
            "/end_group": lambda request: self._end(request, EndGroupRequest),
        }

    def _claim(self, request: ShortRequest, model: type[ClaimEpisodeRequest]) -> bool:
        began = time.monotonic()
        controller = self.controller
        if not controller.unhindered:
            return False
        try:
            caller = self._caller(request)
            wanted = validated(model, parse_json(request.body))
            self.names.check(caller, wanted.client_uuid)
            if isinstance(wanted, ClaimGroupRequest):
                wish = wish_for(wanted, self.config, wanted.count, as_group=True)
            else:
                wish = wish_for(wanted, self.config)
        except SwarmGatewayError:
            return False
        # a grant is a sign of life; what is refused here comes to the application, which tells of one
        grant = controller.claims.claim_at_once(wish)
        controller.pool_changed()
        if grant is None:
            return False

        def told(error: UnavailableError | None) -> None:
            if error is None:
                self.meters.claim_granted(time.monotonic() - began)
                self._answer(request, began, body)
                return
            if not wish.claim_key:
                controller.claims.give_back(wish, grant)
            self._answer_error(request, began, error)

        body = orjson.dumps(_granted(request, wish, grant))
        controller.on_disk(told)
        return True

    def _end(self, request: ShortRequest, model: type[EndEpisodeRequest] | type[EndGroupRequest]) -> bool:
        began = time.monotonic()
        controller = self.controller
        if not controller.has_job:
            return False
        try:
            caller = self._caller(request)
            wanted = validated(model, parse_json(request.body))
            self.names.check(caller, wanted.client_uuid)
            pool, client_uuid = controller.pool, wanted.client_uuid
            as_group = isinstance(wanted, EndGroupRequest)
            ends = wanted.ends if isinstance(wanted, EndGroupRequest) else [wanted]
            if not all(pool.can_continue(client_uuid, end.episode_uuid) for end in ends):
                return False
            end_key = wanted.idempotency_key or ""
            dropped = pool.end(client_uuid, wanted.task_id, ends, as_group=as_group, end_key=end_key)
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


def _granted(request: ShortRequest, wish: ClaimWish, grant: Grant) -> dict[str, Any]:
    """What :class:`EpisodeRoutes` answers."""
    at = request.connection
    base_url = base_url_at(at.scheme, _notes(request.head).host, at.server, at.root_path)
    episodes = [
        {
            "episode_uuid": claim.episode_uuid,
            "openai_base_url": f"{base_url}episodes/{claim.episode_uuid}/v1",
            "openai_api_key": claim.key,
        }
        for claim in grant.claims
    ]
    if not wish.as_group:
        return {"success": True, "client_uuid": wish.client_uuid, **episodes[0], "fail_cause": ""}
    return {
        "success": True,
        "client_uuid": wish.client_uuid,
        "episodes": episodes,
        "group_uuid": grant.group_uuid,
        "openai_base_url": f"{base_url}groups/{grant.group_uuid}/v1",
        "openai_api_key": grant.group_key,
        "fail_cause": "",
    }


def _notes(head: Head) -> _Notes:
    notes: _Notes | None = head.notes
    if notes is None:
        notes = head.notes = _Notes(head.headers)
    return notes
