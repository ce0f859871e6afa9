"""What a step's log-probabilities say about the weights that sampled them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters.verl.lora import MIN_TOKENS, StaleAdapterError, allowed_difference, check_agreement, sampling_difference
from swarm.job import TrainJob

TOKENS = 1000
CHANCE = np.random.default_rng(0)
TRAINED = CHANCE.uniform(-5, 0, TOKENS).astype(np.float32)
ALL, NEWEST = np.ones(TOKENS), np.full(TOKENS, 3)


def far(sampled: Any, mask: Any = ALL, versions: Any = NEWEST) -> float | None:
    return sampling_difference(TRAINED, np.asarray(sampled, np.float32), mask, versions, 3)


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
    check_agreement(1e-5, 1e-3, 7)
    with pytest.raises(StaleAdapterError, match=r"adapter of version 7: .* 10% .* more than 0.3 .allowed: 0.001"):
        check_agreement(0.3, 1e-3, 7)


def config(**changes: Any) -> Any:
    values = {"rank": 8, "merge": False, "sampling": "trainer", "bypass": False, "dtype": "float32"} | changes
    model = SimpleNamespace(lora_rank=values["rank"], lora=SimpleNamespace(merge=values["merge"]))
    rollout = SimpleNamespace(dtype=values["dtype"])
    correction = None if values["bypass"] is None else SimpleNamespace(bypass_mode=values["bypass"])
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(model=model, rollout=rollout),
        trainer=SimpleNamespace(sampling=values["sampling"]),
        algorithm=SimpleNamespace(rollout_correction=correction),
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
        # algorithm.rollout_correction: null
        ({"bypass": None}, 1e-3),
    ],
)
def test_what_is_allowed(changes: dict[str, Any], allowed: float | None) -> None:
    assert allowed_difference(config(**changes)) == allowed


# verl imports what Ray has moved
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_run_that_went_back_takes_tokens_of_lost_weights_for_no_stale_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    import torch
    import transfer_queue as tq

    from adapters.verl.config import verl_config
    from tests.adapters.verl.compute_advantages import trainer_of

    # without a cluster, and its batch has tokens of its version that other weights sampled
    job = TrainJob.model_validate({"model": "m", "device": "cpu", "lora": {"rank": 8}})
    trainer = trainer_of(verl_config(job, "m", tmp_path, "cpu"), {}, {})
    row = torch.ones(1, 100)
    data = {"old_log_probs": -row, "rollout_log_probs": -2 * row, "response_mask": row}

    def is_trained(version: int, newest: int) -> bool:
        trainer._replicas = SimpleNamespace(policy_version=lambda: version)
        trainer._feed.newest_step = newest
        monkeypatch.setattr(tq, "kv_batch_get", lambda **_: data | {"policy_versions": version * row})
        try:
            trainer._compare_log_probs(SimpleNamespace(keys=["k"], tags=[{}], partition_id="train"), {}, 1e-3)
        except StaleAdapterError:
            return False
        return True

    # the first step is compared, too, and the last of the lost versions was sampled with
    steps = [(0, 0), (3, 3), (3, 5), (5, 5), (6, 6)]
    assert [is_trained(*step) for step in steps] == [False, False, True, True, False]
