"""``swarm-gateway up`` goes on from the last saved step, whichever of its processes was killed whenever.

5 kills; ``SWARM_KILLS=40`` for more, ``SWARM_KILL_SEED`` for the choices of an earlier run (timing apart), or
``python -m tests.kill --up`` for a report, with ``--engine real`` of the real engine.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.kill.going_on import VICTIMS, GoingOn

KILLS = int(os.environ.get("SWARM_KILLS", "5"))


@pytest.mark.slow
def test_the_same_command_goes_on_from_the_last_saved_step(tmp_path: Path) -> None:
    seed = int(os.environ.get("SWARM_KILL_SEED", random.randrange(2**32)))
    print(f"SWARM_KILL_SEED={seed}")
    going = GoingOn(tmp_path, seed)
    going.run(KILLS)
    report = going.summary()
    assert going.wrong == [], report
    # it was a test: everything was killed, and there was something to lose
    assert going.kills.keys() == VICTIMS.keys()
    assert all(0 < saved <= origin for saved, origin in going.origins)
    assert len(going.witnesses.acknowledged) > KILLS
    assert report["answers_of_users"][200] > KILLS
