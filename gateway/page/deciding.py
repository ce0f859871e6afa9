"""Moves of a challenger by who looks at the page: promoted, rolled back, pinned, each with a reason that is kept; keys
and sessions that opt out; and what is kept of a person, for who has an admin key.

Invariant: the audit log of the swarm server, or of the keys, gets to know who did it by the label of the key.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.admin import forwarding
from gateway.keys.ring import KeyRing
from gateway.page.login import Visitor
from gateway.runtime import Gateway
from swarm.errors import ForbiddenError, NotFoundError
from swarm.protocol import PinPolicyRequest, PolicyStatus, PromotePolicyRequest, RollBackPolicyRequest
from swarm.subjects import user_digest

Move = Literal["promote", "rollback", "pin", "unpin"]


class GivenMove(BaseModel):
    """What somebody wants of a challenger.

    Attributes:
        version: of the stage that he saw; the swarm server refuses if it has moved since.
    """

    move: Move
    route: str
    incumbent: str
    version: int
    reason: str = Field(min_length=1, max_length=1000)


class GivenRefusal(BaseModel):
    """Who opts out: a key by its id, a session by its name, or a key's session."""

    key: str = Field(default="", max_length=200)
    session: str = Field(default="", max_length=500)


async def move(gateway: Gateway, visitor: Visitor, wanted: GivenMove) -> PolicyStatus:
    """Have the route's swarm server move its challenger.

    Raises:
        ForbiddenError: the gateway's token may not.
        NotFoundError: no such route is open to the visitor.
        ConflictError: the stage has moved since, or cannot be moved there.
    """
    with gateway.routes.table.held() as table:
        opened = [
            route for route in table.routes if route.name == wanted.route and visitor.holder.caller.opens(route.name)
        ]
        if not opened or opened[0].swarm is None:
            raise NotFoundError(f"no route {wanted.route[:100]!r} with a swarm server is open to you", code="no_stage")
        client, sender = opened[0].swarm.client, visitor.name
        named = wanted.model_dump(include={"route", "incumbent", "version", "reason"})
        match wanted.move:
            case "promote":
                return await client.promote_policy(PromotePolicyRequest(**named), sender)
            case "rollback":
                return await client.roll_back_policy(RollBackPolicyRequest(**named), sender)
            case pin:
                return await client.pin_policy(PinPolicyRequest(**named, pinned=pin == "pin"), sender)


async def opt_out(request: Request, visitor: Visitor, wanted: GivenRefusal, keys: KeyRing) -> dict[str, Any]:
    """Keep and train nothing more of a key or a session; says whether that is new.

    Raises:
        ForbiddenError: the visitor's key is for some routes: a no holds on all.
        SwarmGatewayError: as of :meth:`KeyRing.opt_out`.
    """
    if visitor.holder.caller.routes is not None:
        raise ForbiddenError("your key is for some routes, and a no holds on all of them", code="key_limited")
    new = await keys.opt_out(wanted.key, wanted.session)
    sender = request.client.host if request.client is not None else ""
    who = {"who": visitor.name, "from": sender, "what": "POST /ui/api/data/opt-out"}
    await keys.audit({**who, **wanted.model_dump(), "result": 200})
    return {"new": new}


async def ask_data(request: Request, visitor: Visitor, path: str) -> Response:
    """The answer to ``path`` of the swarm server about whom the query names; a deletion is done here too.

    Raises:
        ForbiddenError: the key is no admin's.
        SwarmGatewayError: as of the gateway's own route.
    """
    if not visitor.holder.admin:
        raise ForbiddenError("this needs an admin key (`swarm-gateway keys create NAME --admin`)", code="admin_needed")
    query = dict(request.query_params)
    query["user"] = user_digest(query.get("user", ""))
    state = {**request.scope["state"], "caller": visitor.holder.caller}
    scope = {**request.scope, "query_string": urlencode(query).encode(), "state": state}
    return await forwarding(path)(Request(scope, request.receive))
