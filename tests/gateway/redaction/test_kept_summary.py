"""A private summary among the responses that are kept."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.gateway.conftest import CHAT, OpenGateway
from tests.standins.swarm import Swarm, said

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("summary", "status"), [("write to anna@example.com", 404), ("write to Anna", 200)])
async def test_a_private_summary_is_not_kept_though_it_is_sealed(
    swarm: Swarm, open_gateway: OpenGateway, summary: str, status: int
) -> None:
    async def answer(_: Request) -> Response:
        return said(summary)

    swarm.app.router.routes.append(Route(CHAT, answer, methods=["POST"]))
    asked = {"model": "tiny", "input": [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]}
    async with open_gateway(num_repeat=1, data={"redact": "group"}) as http:
        given = (await http.post("/v1/responses", json=asked)).json()
        assert given["output"][0]["type"] == "compaction"
        assert (await http.get(f"/v1/responses/{given['id']}")).status_code == status
