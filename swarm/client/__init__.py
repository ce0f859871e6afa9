"""SDK of the swarm server: :class:`SwarmClient` for threads, :class:`AsyncSwarmClient` for event loops."""

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.policy import RetryPolicy
from swarm.client.sync import Episode, SwarmClient
from swarm.client.wire import EpisodeEndpoint

__all__ = ["AsyncSwarmClient", "Episode", "EpisodeEndpoint", "RetryPolicy", "SwarmClient"]
