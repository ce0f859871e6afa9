"""Task readers: data files as streams of :class:`swarm.types.Task`."""

from swarm.data.tasks import read_tasks, task_of

__all__ = ["read_tasks", "task_of"]
