"""``AsyncSwarmClient``: whole groups of episodes for event loops, as the gateway uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

import httpx

from swarm.client.wire import EpisodeEndpoint
from swarm.protocol import EpisodeType, ServerStatus
from swarm.states import EngineState
from swarm.types import WorkflowOutput


class AsyncSwarmClient:
    """Claims, ends and aborts episodes of one swarm server over pooled connections."""

    def __init__(
        self,
        server_url: str,
        token: str | None = None,
        client_uuid: str | None = None,
        *,
        request_timeout: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        raise NotImplementedError

    async def claim_group(
        self,
        count: int,
        wait_seconds: float = 0.0,
        *,
        episode_type: EpisodeType = "train",
        discard_episode_timeout: float = 240.0,
    ) -> list[EpisodeEndpoint]:
        """Claim ``count`` episodes at once or none, waiting up to ``wait_seconds`` for them.

        Raises:
            UnavailableError: no server, or no episodes in time; ``code`` says which (``server_unreachable``,
                ``engine_offline``, ``engine_syncing``, ``engine_post_rolling``, ``no_episodes``, ``not_ready``).
            RequestError: the server refuses the request itself (wrong token, count above its slots).
        """
        raise NotImplementedError

    async def end_group(self, task_id: str, outputs: Mapping[str, WorkflowOutput]) -> None:
        """End all episodes of one task in one transition; ``outputs`` maps episode uuid to its result. Idempotent."""
        raise NotImplementedError

    async def abort(self, episode_uuids: Iterable[str]) -> None:
        """Give up episodes. Never raises: what cannot be told to the server falls to its idle timeout (logged).

        The calls go on in the background when the caller is cancelled meanwhile; :meth:`close` waits for them.
        """
        raise NotImplementedError

    async def status(self) -> ServerStatus:
        """Everything the server tells about itself."""
        raise NotImplementedError

    async def wait_for_state(self, *states: EngineState, timeout: float) -> ServerStatus:
        """Wait until the engine is in one of ``states``.

        Raises:
            EngineError: the engine is OFFLINE and that was not waited for; carries its reason and last lines.
            UnavailableError: the time is over.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Finish background aborts (bounded) and close the connections."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
