"""Siblings are samples: of a fan-out, only the delivered answer's tool calls are ever run by the client.

``python -m tests.gateway.test_side_effects 1000``: that many fan-outs of each policy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.stack import GROUP, MODEL, Stack, stack

pytestmark = pytest.mark.slow

#: By policy, the rewards of each group. With ``best`` the other answer makes its calls with ``other`` for ``chosen``;
#: with ``first`` both make the same, and would run twice.
REWARDS = {"best": (0.0, 1.0), "first": (1.0, 1.0)}


def run_tools(served: Stack, policy: str, fan_outs: int) -> list[str]:
    """What Anthropic's own agent loop ran in conversations of two fan-outs: two calls at once, and the answer."""
    from anthropic import Anthropic, beta_tool

    ran: list[str] = []
    client = Anthropic(
        base_url=served.url, api_key="any", max_retries=0, timeout=120, default_headers={"x-swarm-policy": policy}
    )

    @beta_tool
    def note(name: str) -> str:
        """Note a name.

        Args:
            name: of what is noted.
        """
        ran.append(name)
        return name

    def converse(number: int) -> None:
        orders = [f"CALL note {json.dumps({'name': f'chosen-{number}-{call}'})}" for call in range(2)]
        messages = [{"role": "user", "content": "\n".join(orders)}]
        client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=200,
            tools=[note],
            messages=messages,  # type: ignore[arg-type]
            stream=bool(number % 2),  # type: ignore[arg-type]
        ).until_done()

    with client, ThreadPoolExecutor(8) as pool:
        list(pool.map(converse, range(fan_outs // 2)))
    return ran


def undelivered(served: Stack, policy: str, fan_outs: int) -> int:
    """How many of the calls that ran are not those of a delivered answer; each of these ran once."""
    with served.trains(fan_outs, rewards=REWARDS[policy]):
        ran = run_tools(served, policy, fan_outs)
    meant = [f"chosen-{number}-{call}" for number in range(fan_outs // 2) for call in range(2)]
    return len(set(ran) - set(meant)) + abs(len(ran) - len(meant))


def test_the_tool_calls_of_siblings_are_never_run(tmp_path: Path) -> None:
    with stack(tmp_path) as served:
        assert {policy: undelivered(served, policy, 20) for policy in REWARDS} == {"best": 0, "first": 0}


if __name__ == "__main__":
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), batch_size=4 * count) as served:
        for policy in REWARDS:
            print(f"{policy}: {count} fan-outs of {GROUP}: {undelivered(served, policy, count)} undelivered calls ran")
