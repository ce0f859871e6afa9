"""A round of ``python -m benchmarks judging`` before the stand-in swarm: what each arm picks by keyboard."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.judging import ANSWERS, REWARD, Arm, ask_all, judge_all
from tests.gateway.conftest import OpenGateway, write_hooks
from tests.gateway.page.browser import Browser, chromium
from tests.standins.swarm import Swarm, said

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH"),
]


def _repeated(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


@pytest.mark.parametrize("name", ["judged", "random", "unjudged"])
async def test_each_group_of_a_round_is_judged_as_its_arm_does(
    open_gateway: OpenGateway, swarm: Swarm, chrome: Browser, tmp_path: Path, name: str
) -> None:
    assert swarm.job is not None
    swarm.job = swarm.job.model_copy(update={"batch_size": 64})
    # an odd digit is repeated by one of four answers, an even one by none
    swarm.answer = lambda body, number: said(_repeated(body) if number == 2 and int(_repeated(body)) % 2 else "x")
    route = {"name": "policy", "swarm_url": swarm.url, "feedback_window_seconds": 1000}
    settings: dict[str, Any] = {"ui": {}, "routes": [{**route, "hooks": str(write_hooks(tmp_path / "judged", REWARD))}]}
    arm, draw = Arm(name, 0), random.Random(0)
    async with open_gateway(**settings) as http, chrome.tab() as tab:
        for number in range(2):
            await ask_all(http, [f"{number}-{group}" for group in range(4)], draw)
            await judge_all(tab, str(http.base_url).rstrip("/"), 4, draw, arm)
        groups = (await http.get("/ui/api/groups")).json()["groups"]
        assert len(groups) == 8 and len(arm.right) == 2
        wholes = [(await http.get(f"/ui/api/groups/{group['id']}")).json() for group in groups]
        right = [
            [answer["index"] for answer in whole["answers"] if answer["text"] == whole["prompt"][-1]["content"]]
            for whole in wholes
        ]
        assert sum(arm.right) * 4 * ANSWERS == sum(map(len, right)) > 0
        picks = [next(iter(group["picks"].values()), "nobody judged") for group in groups]
        if name == "judged":
            assert picks == [indices[0] if indices else None for indices in right]
        else:
            assert (set(picks) == {"nobody judged"}) == (name == "unjudged") and None not in picks
        assert (arm.judgements, arm.late) == (0 if name == "unjudged" else 8, 0)
