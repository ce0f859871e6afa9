"""Real agents' requests come into the right session without a header of ours.

Recorded by ``tests/clients/recorder.py`` from Claude Code 2.1.197, Codex CLI 0.169.0, opencode 1.18.33 and Qwen Code
0.15.10, with sub-agents, titles, compaction, forks, and retries after a 503 and after an answer that broke off; long
texts are cut. ``session`` is what the user would call one: what was begun anew, or forked, is another.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from gateway.sessions.sessions import Sessions
from tests.gateway.sessions.talk import Ended, ask, route

pytestmark = pytest.mark.anyio

CALLS = [json.loads(line) for line in (Path(__file__).parent / "recorded_agents.jsonl").read_text().splitlines()]


def at_once(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of all sessions in turn, as if they ran at the same time; a fork begins when its origin is over."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        runs.setdefault(call["session"].removesuffix("fork"), []).append(call)
    return [call for turn in zip_longest(*runs.values()) for call in turn if call is not None]


@pytest.mark.parametrize("order", [list, at_once])
async def test_calls_come_into_the_right_session(order: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hook = Ended()
    to, found = route(hook), dict[str, Counter[int]]()
    async with Sessions() as sessions:
        for number, call in enumerate(order(CALLS)):
            named = {"user": call["user"]} if "user" in call else {}
            link = ask(sessions, to, call["messages"], headers=call["headers"], **named)
            link.delivered(f"chatcmpl-{number}", call["answer"], 0.5)
            if call["broken"]:
                link.abandoned()
            found.setdefault(call["session"], Counter())[id(link.report)] += 1
        linked, regenerated = sessions.counts.linked, sessions.counts.signals["regenerated"]
    with capsys.disabled():
        right = 0
        for agent in ("claude", "codex", "opencode", "qwen"):
            of_agent = {label: held for label, held in found.items() if label.startswith(agent)}
            # a session that holds calls of two is the right one for neither
            own = [
                held.most_common(1)[0]
                for label, held in of_agent.items()
                if not any(held.most_common(1)[0][0] in other for name, other in found.items() if name != label)
            ]
            count, total = sum(count for _, count in own), sum(held.total() for held in of_agent.values())
            right += count
            print(f"\n{agent}: {count} of {total} calls of {len(of_agent)} sessions in the right one", end="")
        print(f"\n{right / len(CALLS):.1%}, {dict(linked)}", end=" ")
    assert right / len(CALLS) >= 0.99
    # who lost an answer and asks again asks for no other; without a session's name it may be a user who does
    broken = Counter(call["session"].startswith("qwen") for call in CALLS if call["broken"])
    turns = sum(len(session.turns) for session in hook.sessions)
    assert (turns, regenerated) == (len(CALLS) - broken[False], broken[True])
