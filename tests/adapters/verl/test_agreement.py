"""What a step's log-probabilities say about the weights that sampled them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters.verl.agreement import MIN_TOKENS, StaleAdapterError, check, difference, tolerance

TOKENS = 1000
CHANCE = np.random.default_rng(0)
TRAINED = CHANCE.uniform(-5, 0, TOKENS).astype(np.float32)
ALL, NEWEST = np.ones(TOKENS), np.full(TOKENS, 3)


def far(sampled: Any, mask: Any = ALL, versions: Any = NEWEST) -> float | None:
    return difference(TRAINED, np.asarray(sampled, np.float32), mask, versions, 3)


def test_the_same_weights_differ_by_what_is_rounded() -> None:
    assert 0 < (far(TRAINED + CHANCE.normal(0, 1e-6, TOKENS)) or 0) < 1e-5


@pytest.mark.parametrize("change", [0.01, 0.5])
def test_other_weights_differ(change: float) -> None:
    found = far(TRAINED + CHANCE.normal(0, change, TOKENS))
    assert found is not None and found > change


def test_some_tokens_may_be_of_the_version_before() -> None:
    some = np.arange(TOKENS) % 20 == 0
    assert far(np.where(some, TRAINED - 1, TRAINED)) == 0


def test_an_answer_that_is_held_to_a_form_is_likelier_where_it_is_sampled() -> None:
    assert far(np.where(np.arange(TOKENS) % 2, TRAINED, 0)) == 0


def test_only_sampled_tokens_of_the_present_version_count() -> None:
    off, half = TRAINED - CHANCE.uniform(0, 1, TOKENS), np.arange(TOKENS) % 2
    sampled = np.where(half, TRAINED, off)
    assert far(sampled, mask=half) == 0
    assert far(sampled, versions=np.where(half, 3, 2)) == 0
    assert (far(sampled) or 0) > 0.1
    assert far(sampled, mask=np.arange(TOKENS) < MIN_TOKENS - 1) is None


def test_too_large_a_difference_is_told_with_the_version() -> None:
    check(1e-5, 1e-3, 7)
    with pytest.raises(StaleAdapterError, match=r"adapter of version 7: .* 10% .* more than 0.3 .allowed: 0.001"):
        check(0.3, 1e-3, 7)


def config(**changes: Any) -> Any:
    values = {"rank": 8, "merge": False, "sampling": "trainer", "bypass": False, "dtype": "float32"} | changes
    model = SimpleNamespace(lora_rank=values["rank"], lora=SimpleNamespace(merge=values["merge"]))
    rollout = SimpleNamespace(dtype=values["dtype"])
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(model=model, rollout=rollout),
        trainer=SimpleNamespace(sampling=values["sampling"]),
        algorithm=SimpleNamespace(rollout_correction=SimpleNamespace(bypass_mode=values["bypass"])),
    )


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, 1e-3),
        ({"dtype": "bfloat16"}, 0.2),
        ({"rank": 0}, None),
        ({"merge": True}, None),
        ({"sampling": "app"}, None),
        ({"bypass": True}, None),
    ],
)
def test_what_is_allowed(changes: dict[str, Any], allowed: float | None) -> None:
    assert tolerance(config(**changes)) == allowed


# verl's trainer without a cluster, whose batch has tokens of its version that other weights sampled
STALE = """
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import transfer_queue as tq

from adapters.verl.agreement import StaleAdapterError
from adapters.verl.config import verl_config
from swarm.job import TrainJob
from tests.adapters.verl.compute_advantages import trainer_of

job = TrainJob.model_validate({"model": "m", "device": "cpu", "lora": {"rank": 8}})
trainer = trainer_of(verl_config(job, "m", Path(tempfile.gettempdir()), "cpu"), {}, {})
trainer._replicas = SimpleNamespace(policy_version=lambda: version)
row = torch.ones(1, 100)
data = {"old_log_probs": -row, "rollout_log_probs": -2 * row, "response_mask": row}
tq.kv_batch_get = lambda **_: data | {"policy_versions": version * row}
for version, newest in ((0, 0), (3, 3), (3, 5), (5, 5), (6, 6)):
    trainer._feed.newest_step = newest
    try:
        trainer._compare_log_probs(SimpleNamespace(keys=["k"], tags=[{}], partition_id="train"), {}, 1e-3)
        print("trained")
    except StaleAdapterError:
        print("refused")
"""


@pytest.mark.slow
def test_a_run_that_went_back_takes_tokens_of_lost_weights_for_no_stale_adapter() -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    done = subprocess.run(
        [sys.executable, "-c", STALE], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # the first step is compared, too, and the last of the lost versions was sampled with
    assert done.stdout.splitlines()[-5:] == ["refused", "refused", "trained", "trained", "refused"]
