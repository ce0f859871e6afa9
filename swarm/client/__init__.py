"""SDK of the swarm server: :class:`SwarmClient` for threads, :class:`AsyncSwarmClient` for event loops."""

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.episodes import AsyncEpisode, AsyncGroup
from swarm.client.sync import Episode, Group, SwarmClient
from swarm.client.throttling import ThrottleSchedule
from swarm.client.training import auto_train_with_dataset, auto_train_with_dataset_async
from swarm.client.training_options import TrainReport
from swarm.client.wire import EpisodeEndpoint, EpisodeGroup, RetryPolicy
from swarm.protocol import SwarmThrottlePolicy

__all__ = [
    "AsyncEpisode",
    "AsyncGroup",
    "AsyncSwarmClient",
    "Episode",
    "EpisodeEndpoint",
    "EpisodeGroup",
    "Group",
    "RetryPolicy",
    "SwarmClient",
    "SwarmThrottlePolicy",
    "ThrottleSchedule",
    "TrainReport",
    "auto_train_with_dataset",
    "auto_train_with_dataset_async",
]
