"""The tutorial of the takeover: its readme with stand-ins for both engines, and the whole story on real ones."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

from swarm.job import TrainJob
from tests.tutorial.readmes import folder_of, run, tutorial_copy


def check_readme(folder: Path, said: str) -> None:
    """What its commands leave."""
    assert (folder / "demo-out" / "takes_over.png").stat().st_size
    moves = [line for line in said.splitlines() if " -> " in line]
    assert [line.partition(", by ")[0] for line in moves] == ["shadow -> canary 0.5", "canary 0.5 -> live"], said
    assert all("by the verdict: better by " in line for line in moves), said
    assert " 0 failures" in said


def test_what_is_promoted_has_a_checkpoint() -> None:
    file = yaml.safe_load((folder_of("takeover") / "config.yaml").read_text())
    every = file["gateway"]["serve"]["gate"]["trial_every"]
    assert every % TrainJob.model_validate(file["job"]).checkpoint_every == 0, "`up` warns of it"


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra")
def test_a_challenger_takes_over_and_is_taken_back_on_real_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tutorial_copy("takeover", tmp_path)
    monkeypatch.setattr("tests.tutorial.readmes.SECONDS", 1800.0)
    said = run([sys.executable, "demo.py"], folder)
    moves = [line for line in said.splitlines() if " -> " in line]
    ups = ["shadow -> canary 0.5, by the verdict: better by", "canary 0.5 -> live, by the verdict: better by"]
    downs = ["shadow -> canary 0.5, by ", "canary 0.5 -> shadow, by the verdict: worse by"]
    assert len(moves) == 4 and all(map(str.startswith, moves, [*ups, *downs])), said
    assert all((folder / "demo-out" / f"{act}.png").stat().st_size for act in ("takes_over", "is_taken_back"))
    assert said.count(" 0 failures") == 2, said
    seconds = re.search(r"(\d+) s in all", said)
    assert seconds is not None and int(seconds[1]) < 1800, said
