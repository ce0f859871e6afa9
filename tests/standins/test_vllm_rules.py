"""The stand-ins answer each case as the table says; ``tests/engine`` asks the real vLLM the same."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from tests.standins.models import ObedientVllm
from tests.standins.vllm import ScriptedVllm
from tests.standins.vllm_rules import (
    CASES,
    WITH_TOOL_PARSER,
    WITHOUT_EYES,
    WITHOUT_REASONING_PARSER,
    WITHOUT_TOOL_PARSER,
    Case,
    VllmRules,
    check,
    request,
    too_long,
)

pytestmark = pytest.mark.anyio

RULES = VllmRules()
EVERY = [
    *[(RULES, case) for case in (*CASES, *WITH_TOOL_PARSER)],
    *[(replace(RULES, tool_parser=False), case) for case in WITHOUT_TOOL_PARSER],
    *[(RULES, case) for case in WITHOUT_REASONING_PARSER],
    *[(replace(RULES, eyes=False), case) for case in WITHOUT_EYES],
    (replace(RULES, context=100), too_long(100)[0]),
]


@pytest.mark.parametrize("make", [ScriptedVllm, ObedientVllm])
async def test_a_stand_in_refuses_what_vllm_refuses(make: type[ScriptedVllm]) -> None:
    vllm = make()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(vllm.app), base_url="http://vllm") as client:
        for vllm.rules, case in EVERY:
            await check(client, case, "tiny")


@pytest.mark.parametrize("case", too_long(100), ids=lambda case: case.name)
def test_the_context_bounds_prompt_and_answer(case: Case) -> None:
    body = request(case, "tiny")
    refusal = VllmRules(context=100).refusal(case.path, body, len(body.get("prompt", ())))
    assert (case.refused in refusal[1]["error"]["message"]) if refusal else not case.refused
