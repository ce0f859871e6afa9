"""A claim passes few objects between its route and the journal."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from swarm.server.api.episodes import EpisodeRoutes
from swarm.server.journal.journal import Journal
from tests.swarm.server.conftest import Rig

pytestmark = pytest.mark.anyio

#: from the route on: requests, queue, pool, running episodes, journal
MOST_OBJECTS = 6


def objects_of(frame: FrameType | None) -> list[object]:
    """The objects of the swarm server whose methods wait for the one of ``frame``, itself first, each once."""
    objects: list[object] = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__module__.startswith("swarm.server.") and not any(owner is other for other in objects):
            objects.append(owner)
        frame = frame.f_back
    return objects


async def test_a_claim_passes_few_objects_on_its_way_to_the_journal(rig: Rig) -> None:
    ways: list[list[str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and isinstance(frame.f_locals.get("self"), Journal):
            objects = objects_of(frame)
            names = [type(owner).__name__ for owner in objects]
            if EpisodeRoutes.__name__ in names:  # else a timer's, or another task's
                ways.append(names[: names.index(EpisodeRoutes.__name__) + 1])

    sys.setprofile(note)
    try:
        await rig.claim()
    finally:
        sys.setprofile(None)
    assert ways and max(len(way) for way in ways) <= MOST_OBJECTS, ways
