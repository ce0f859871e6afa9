"""Batches of any shape through verl's real trainer and engine, for one rank and for two."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("verl") is None, reason="needs the cpu extra"),
]

EXAMPLES = 12
RANKS = (1, 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What :mod:`tests.adapters.verl.train_rows` prints."""
    model = tiny_model.build(tmp_path_factory.mktemp("rows") / "tiny")
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.train_rows"],
        input=json.dumps({"model": str(model), "examples": EXAMPLES, "ranks": RANKS}),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("ranks", RANKS)
def test_every_row_is_trained_with_the_gradient_that_it_has_without_padding(
    found: dict[str, list[dict[str, Any]]], ranks: int
) -> None:
    assert len(found[str(ranks)]) == ranks
    for done in found[str(ranks)]:
        assert done["examples"] == EXAMPLES + 1
        assert 0 < done["padded"] < done["examples"], "with and without padding"
