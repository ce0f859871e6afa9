"""A study through the command line, with a real swarm server and an engine that only stands in for verl."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from swarm.client import SwarmClient
from swarm.job import TrainJob
from swarm.research.ledger import read
from swarm.states import EngineState
from tests.swarm.research.storm import CLI, check, environment, ran, server, steps_of, study_at


@pytest.mark.slow
def test_it_survives_kills_and_leaves_nothing_running(tmp_path: Path) -> None:
    with server(tmp_path / "server") as url:
        folder = study_at(
            tmp_path / "study",
            [url],
            proposer={"kind": "grid", "space": {"lr": [3e-5]}},
            # no gain is large enough to be confirmed
            decision={"min_effect": 10.0},
        )
        assert ran(folder, 2, random.Random(1), 4) == 2
        state = read(folder)
        check(state, steps_of([tmp_path / "server"], f"study-{state.study}"))
        base, e1 = state.runs["base"], state.runs["e1"]
        assert base.scores[0] == pytest.approx([0.2 + 0.001 * task for task in range(6)], abs=1e-6)
        assert e1.means[4] > base.means[4] + 0.2
        assert state.experiments["e1"].verdict == "dropped"
        with SwarmClient(url) as client:
            assert client.status().engine.engine_status is EngineState.OFFLINE
            # somebody else's engine is left alone
            client.sync_train_config(TrainJob(model="m", batch_size=2, num_repeat=2))
            client.start_engine()
            other = study_at(tmp_path / "other", [url])
            done = subprocess.run(
                [*CLI, "run", str(other)], env=environment(other), capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 1 and "runs another job" in done.stderr
            assert client.status().engine.engine_status is EngineState.ROLLING
