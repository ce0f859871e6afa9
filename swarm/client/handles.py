"""Episodes as the clients' context managers hand them out.

Invariant: a handle that was ended successfully is not ended again and not aborted when its block is left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from swarm.client.wire import EpisodeEndpoint, EpisodeGroup
from swarm.errors import StateError
from swarm.types import Task, WorkflowOutput


class _Handle:
    def __init__(self, name: str) -> None:
        self._name = name
        self.ended = False

    def _check_open(self) -> None:
        if self.ended:
            raise StateError(f"{self._name} has been ended already")


class _EpisodeHandle(_Handle):
    def __init__(self, endpoint: EpisodeEndpoint) -> None:
        super().__init__(f"episode {endpoint.episode_uuid}")
        self.endpoint = endpoint
        self.episode_uuid = endpoint.episode_uuid
        self.base_url = endpoint.base_url
        self.api_key = endpoint.api_key


class _GroupHandle(_Handle):
    def __init__(self, episodes: EpisodeGroup) -> None:
        super().__init__(f"group {episodes.group_uuid}".rstrip())
        self.episodes = episodes
        self.base_url = episodes.base_url
        self.api_key = episodes.api_key


class Episode(_EpisodeHandle):
    """One claimed episode inside :meth:`SwarmClient.episode`."""

    def __init__(self, endpoint: EpisodeEndpoint, end: Callable[[Task | str, str, WorkflowOutput], str]) -> None:
        super().__init__(endpoint)
        self._end = end

    def end(self, task: Task | str, workflow_output: WorkflowOutput) -> str:
        """Hand in the result; see :meth:`SwarmClient.end_episode`.

        Raises:
            StateError: it has been ended before.
        """
        self._check_open()
        dropped = self._end(task, self.episode_uuid, workflow_output)
        self.ended = True
        return dropped


class Group(_GroupHandle):
    """The episodes of one task inside :meth:`SwarmClient.group`."""

    def __init__(self, episodes: EpisodeGroup, end: Callable[[Task | str, Mapping[str, WorkflowOutput]], str]) -> None:
        super().__init__(episodes)
        self._end = end

    def end(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """Hand in the results by episode; see :meth:`SwarmClient.end_group`.

        Raises:
            StateError: it has been ended before.
        """
        self._check_open()
        dropped = self._end(task, outputs)
        self.ended = True
        return dropped


class AsyncEpisode(_EpisodeHandle):
    """One claimed episode inside :meth:`AsyncSwarmClient.episode`."""

    def __init__(
        self, endpoint: EpisodeEndpoint, end: Callable[[Task | str, str, WorkflowOutput], Awaitable[str]]
    ) -> None:
        super().__init__(endpoint)
        self._end = end

    async def end(self, task: Task | str, workflow_output: WorkflowOutput) -> str:
        """Hand in the result; see :meth:`AsyncSwarmClient.end_episode`.

        Raises:
            StateError: it has been ended before.
        """
        self._check_open()
        dropped = await self._end(task, self.episode_uuid, workflow_output)
        self.ended = True
        return dropped


class AsyncGroup(_GroupHandle):
    """The episodes of one task inside :meth:`AsyncSwarmClient.group`."""

    def __init__(
        self, episodes: EpisodeGroup, end: Callable[[Task | str, Mapping[str, WorkflowOutput]], Awaitable[str]]
    ) -> None:
        super().__init__(episodes)
        self._end = end

    async def end(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """Hand in the results by episode; see :meth:`AsyncSwarmClient.end_group`.

        Raises:
            StateError: it has been ended before.
        """
        self._check_open()
        dropped = await self._end(task, outputs)
        self.ended = True
        return dropped


def task_id_of(task: Task | str) -> str:
    """The id of a task that is given as such or by its id."""
    return task if isinstance(task, str) else task.task_id
