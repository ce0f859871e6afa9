"""Hand the rewards of a group to the swarm server, apart from the request that earned them.

Invariant: a group counts as trained only after the server acknowledged it; what is given up is aborted and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

from gateway.observability.request import phase
from gateway.stats import DropReason, Stats
from swarm.client import AsyncSwarmClient
from swarm.errors import SwarmGatewayError, UnavailableError
from swarm.types import WorkflowOutput

logger = logging.getLogger(__name__)

_RETRY_FIRST, _RETRY_MOST = 0.2, 5.0


class Submitter:
    """Offers groups to one swarm server until it acknowledges, refuses, or the deadline passes."""

    def __init__(self, client: AsyncSwarmClient) -> None:
        self._client = client

    async def submit(
        self, task_id: str, outputs: Mapping[str, WorkflowOutput], seconds: float, stats: Stats
    ) -> DropReason | None:
        """End all episodes of a group; repeated while the server is away, which is safe because ends are idempotent.

        Args:
            task_id: of the group.
            outputs: by episode uuid.
            seconds: until it is given up.
            stats: where the outcome is counted.

        Returns:
            ``None`` when acknowledged, else why not; then the episodes are aborted.
        """
        with phase("submit") as submitting:
            try:
                async with asyncio.timeout(seconds):
                    reason = await self._offer(task_id, outputs)
            except TimeoutError:
                logger.error("group %s is not trained: not acknowledged within %g s", task_id, seconds)
                reason = DropReason.SUBMIT_TIMEOUT
            except Exception as exc:  # nobody else gives these episodes back
                logger.error("group %s is not trained: %s", task_id, type(exc).__name__, exc_info=exc)
                reason = DropReason.REFUSED
            submitting.set("gateway.drop_reason", reason or "")
        if reason is None:
            stats.trained += 1
        else:
            stats.dropped[reason] += 1
            await self._client.abort(outputs, reason.value)
        return reason

    async def _offer(self, task_id: str, outputs: Mapping[str, WorkflowOutput]) -> DropReason | None:
        pause = _RETRY_FIRST
        while True:
            try:
                note = await self._client.end_group(task_id, outputs)
                if note:
                    logger.warning("group %s is accepted but not trained: %s", task_id, note)
                return DropReason.QUARANTINED if note else None
            except UnavailableError as exc:
                logger.warning("group %s: %s; offering it again", task_id, exc)
            except SwarmGatewayError as exc:
                logger.warning("group %s is not trained: %s", task_id, exc)
                return DropReason.REFUSED
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _RETRY_MOST)
