"""No acknowledged reward is lost or counted twice, whichever process is killed whenever.

10 kills in each serving mode, 5 while code is synced; ``SWARM_KILLS=200`` for more (of the latter, half),
``SWARM_KILL_SEED`` for the choices of an earlier run (timing apart), or ``python -m tests.kill`` for a report.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import get_args

import pytest

from swarm.job import ServingMode
from swarm.states import EpisodeState
from tests.kill.harness import VICTIMS, Harness
from tests.kill.invariants import violations
from tests.kill.proxy import FAULTS
from tests.kill.report import summary

KILLS = int(os.environ.get("SWARM_KILLS", "10"))


@pytest.mark.slow
@pytest.mark.anyio
async def test_no_code_is_half_applied_and_no_episode_lost_to_a_restart(tmp_path: Path) -> None:
    seed = int(os.environ.get("SWARM_KILL_SEED", random.randrange(2**32)))
    print(f"SWARM_KILL_SEED={seed}")
    outcome = await Harness(tmp_path, seed, "between_steps", code=True).run(KILLS // 2)
    report = summary(outcome)
    assert violations(outcome.witnesses) == [], report
    assert outcome.kills.keys() >= {"server", "researcher"}
    assert len(outcome.witnesses.acknowledged) > KILLS // 2


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("serving", get_args(ServingMode))
async def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, serving: ServingMode) -> None:
    seed = int(os.environ.get("SWARM_KILL_SEED", random.randrange(2**32)))
    print(f"SWARM_KILL_SEED={seed}")
    outcome = await Harness(tmp_path, seed, serving).run(KILLS)
    report = summary(outcome)
    assert violations(outcome.witnesses) == [], report
    # it was a test: everything that can go wrong did, and there was something to lose
    assert outcome.kills.total() == KILLS
    assert outcome.kills.keys() == VICTIMS.keys()
    assert outcome.faults.keys() >= FAULTS.keys()
    assert len(outcome.witnesses.acknowledged) > KILLS
    assert report["steps"] > 0
    assert report["journal"][EpisodeState.TRAINED] > 0
