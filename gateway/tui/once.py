"""One look at all servers, as JSON.

Invariant: every server is in it, with its status or with the reason why there is none, and none is waited for longer
than one deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from gateway.tui.asking import Asker, Trouble
from gateway.tui.history import STEPS
from gateway.tui.targets import Kind, Target
from gateway.tui.told import GatewayStatus
from swarm.protocol import ServerStatus


async def look(targets: Sequence[Target]) -> tuple[dict[str, Any], list[str]]:
    """``{"swarm_servers": [...], "gateways": [...]}``, each with ``url``, ``trouble`` (a word), ``error`` (what to do)
    and ``status``, of which either the last is null or those before; and the errors alone."""
    answers = await asyncio.gather(*(_ask(target) for target in targets))
    told: dict[str, list[dict[str, Any]]] = {"swarm_servers": [], "gateways": []}
    for target, answer in zip(targets, answers, strict=True):
        trouble = answer if isinstance(answer, Trouble) else None
        told["swarm_servers" if target.kind is Kind.SWARM else "gateways"].append(
            {
                "url": target.address,
                "trouble": trouble and trouble.why.value,
                "error": trouble and trouble.words,
                "status": None if isinstance(answer, Trouble) else answer.model_dump(mode="json"),
            }
        )
    return told, [answer.words for answer in answers if isinstance(answer, Trouble)]


async def _ask(target: Target) -> BaseModel | Trouble:
    if target.kind is Kind.GATEWAY:
        return await _closing(Asker(target, GatewayStatus), {})
    return await _closing(Asker(target, ServerStatus), {"steps": STEPS})


async def _closing(asker: Asker[Any], query: dict[str, str | int | float]) -> BaseModel | Trouble:
    try:
        return await asker.ask(query)
    finally:
        await asker.close()
