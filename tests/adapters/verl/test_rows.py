"""Batches of any shape through verl's real trainer and engine, for one rank and for two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import tiny_model

pytest.importorskip("verl", reason="needs the cpu extra")

ROOT = Path(__file__).parents[3]
EXAMPLES = 12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_is_trained_with_the_gradient_that_it_has_without_padding(tmp_path: Path, ranks: int) -> None:
    asked = json.dumps({"model": str(tiny_model.build(tmp_path / "tiny")), "examples": EXAMPLES})
    meeting = {"WORLD_SIZE": str(ranks), "DIST_INIT_METHOD": f"file://{tmp_path / 'ranks'}"}
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            with (tmp_path / f"{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.adapters.verl.train_rows"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, **meeting, "RANK": str(rank)},
                )
            started.append(process)
            assert process.stdin is not None
            process.stdin.write(asked)
            process.stdin.close()
            process.stdin = None
        for rank, process in enumerate(started):
            told, _ = process.communicate(timeout=1200)
            assert process.returncode == 0, (tmp_path / f"{rank}.log").read_text()
            done = json.loads(told.splitlines()[-1])
            assert done["examples"] == EXAMPLES + 1
            assert 0 < done["padded"] < done["examples"], "with and without padding"
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
