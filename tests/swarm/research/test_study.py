"""``study.yaml``: what is wrong is said before anything runs."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.research.episode_process import EpisodeOrder
from swarm.research.study import read_study, rehearsal
from tests.swarm.research.making import folder_of, study_of

#: as YAML reads it
DAY = date(2026, 11, 29)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questin": "x"}, r"unknown key 'questin' \(did you mean 'question'\?\)"),
        ({"budget": {"runs": 10}}, "budget.runs: 11 are needed"),
        ({"budget": {"runs": 40, "steps": 43}}, "budget.steps: 11 runs of 4 steps need 44"),
        ({"decision": {"seeds": 2}}, "decision.seeds"),
        ({"patch_paths": ["evaluate.py"]}, "evaluate.py holds what is locked"),
        ({"patch_paths": ["data/"], "locked": ["data/x.jsonl"]}, "data/ holds what is locked"),
        ({"patch_paths": ["."]}, ". holds what is locked"),
        ({"servers": ["http://a", "http://a"]}, "one is named twice"),
        ({"servers": ["http://a:1", "a:1/"]}, "one is named twice"),
        ({"servers": ["http://localhost:1", "http://127.0.0.1:1"]}, "one is named twice"),
        ({"servers": ["http://a/v1"]}, "server_url 'http://a/v1' ends with /v1"),
        ({"seed": -1}, "seed: must be at least 0, not -1"),
        ({"proposer": {"kind": "grid", "space": {"lr": [-1]}}}, "lr"),
        ({"proposer": {"kind": "grid", "space": {"settings.height": [1]}}}, "there is no setting 'height'"),
        ({"proposer": {"kind": "grid", "space": {"total_training_steps": [1]}}}, "is decided by the study"),
        ({"proposer": {"kind": "grid", "space": {"max_response_length": [8]}}}, "is decided by the study"),
        ({"tasks": "./held_out.jsonl"}, "those of the evaluator would be trained on"),
        ({"proposer": {"kind": "grid", "space": {"data.max_response_length": [8]}}}, "is decided by the study"),
        ({"proposer": {"kind": "random", "count": 2, "space": {"lr": {"low": 0, "high": 1, "log": True}}}}, "0 < low"),
        ({"proposer": {"kind": "magic"}}, "grid"),
        ({"proposer": {"kind": "grid", "space": {"settings.weight": [DAY]}}}, r"settings\.weight.* not a valid JSON"),
        ({"proposer": {"kind": "grid", "space": {"settings.weight": [math.inf]}}}, r"settings\.weight.* finite number"),
        ({"settings": {"weight": DAY}}, r"settings\.weight.* not a valid JSON"),
        ({"job": {"model": "m", "batchsize": 1}}, "batch_size"),
        (
            {"proposer": {"kind": "grid", "space": {"collection": ["all_clients_agree_sync_weight"]}}},
            "every batch would wait",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = folder_of(tmp_path / "study", **changes)
    with pytest.raises(ConfigError, match=message):
        read_study(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 1) for key in ("seed", "experiment", "project_name", "overrides")),
        *((f"{head}trainer.x", 1) for head in ("", "+", "++", "overrides.", "overrides.+")),
        ("+trainer", {"x": 1}),
        ("actor_rollout_ref.rollout", {"max_model_len": 9}),
    ],
)
def test_what_the_study_decides_no_experiment_changes(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="decided by the study"):
        study_of().with_delta({key: value})


def test_a_delta_is_of_the_job_of_verl_and_of_the_workflow() -> None:
    job, settings = study_of().with_delta({"lr": 1e-4, "actor_rollout_ref.actor.clip_ratio": 0.1, "settings.weight": 2})
    assert (job.lr, job.overrides, settings) == (1e-4, {"actor_rollout_ref.actor.clip_ratio": 0.1}, {"weight": 2})


def test_the_process_that_trains_has_the_settings_of_the_study() -> None:
    study = rehearsal(study_of(settings={"cap": math.inf, "weight": [0.0, 1, None]}))
    _, settings = study.with_delta({})
    order = EpisodeOrder(study=study, server="", token=None, folder="", settings=settings, seed=0, shuffle=False)
    assert EpisodeOrder.model_validate_json(json.dumps(order.model_dump())) == order
