"""A private prompt behind an incumbent."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import OpenGateway, ask
from tests.gateway.takeover.test_shadow import became, serve
from tests.standins.swarm import Swarm, completion
from tests.standins.upstream import Upstream

pytestmark = pytest.mark.anyio


async def test_what_is_private_has_no_shadow(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(**serve(upstream), data={"redact": "group"}) as http:
        answer = await ask(http, messages=[{"role": "user", "content": "write to ann@example.com"}])
        assert answer.json() == completion("from the upstream")
        await became(http, left_out=1)
    assert not swarm.claims
