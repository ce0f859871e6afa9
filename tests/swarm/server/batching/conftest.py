"""Jobs, trajectories and a clock that stands until it is told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from swarm.job import TrainJob
from swarm.tokens import Trajectory
from tests import token_data

_names = count()


def trajectory(
    task: str, name: str = "", reward: float = 1.0, version: int = 0, newest: int | None = None
) -> Trajectory:
    """A finished episode; with ``newest`` it has a second timeline, sampled by those weights."""
    versions = [version] if newest is None else [newest, version]
    lines = [token_data.timeline([1], [2], one) for one in versions]
    name = name or f"e{next(_names)}"
    return token_data.trajectory(*lines, episode_uuid=name, task_id=task, reward=reward)


def job(**more: Any) -> TrainJob:
    return TrainJob(**({"model": "tiny", "batch_size": 2, "num_repeat": 2} | more))


@dataclass
class Clock:
    """Seconds; stands still."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
