"""SDK of the swarm server: ``SwarmClient`` for threads, ``AsyncSwarmClient`` for event loops."""

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.wire import EpisodeEndpoint

__all__ = ["AsyncSwarmClient", "EpisodeEndpoint"]
