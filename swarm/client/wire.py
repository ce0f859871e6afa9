"""What the client sends and how it reads answers, free of I/O: both clients share it."""

from __future__ import annotations

from swarm.types import Model


class EpisodeEndpoint(Model):
    """Where one claimed episode samples: an OpenAI ``base_url`` and its key, both dead once the episode is over."""

    episode_uuid: str
    base_url: str
    api_key: str
