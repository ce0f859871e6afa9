"""``/admin``: what only the operator may do. On loopback without keys everybody on the machine is the operator."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.runtime import Gateway


async def reload(request: Request) -> Response:
    """``POST /admin/reload``: read the configuration again; 400 says what is wrong with it, and the old one stays."""
    gateway: Gateway = request.state.gateway
    needs_restart = await gateway.reload()
    return JSONResponse(
        {"routes": [route.name for route in gateway.routes.plan.routes], "needs_restart": needs_restart}
    )
