"""Jobs from layers: who wins, and where each value comes from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError
from swarm.job import JOB, LAYERS, SERVER, SET, TrainJob, layered

CLIP = "actor_rollout_ref.actor.clip_ratio"


def test_each_layer_wins_over_those_below() -> None:
    found = layered(
        {"model": "tiny", "lr": 0.1, "algorithm": "rloo", "overrides": {CLIP: 0.2, "trainer.nnodes": 2}},
        set_={"lr": 0.2, f"+{CLIP}": 0.3, "overrides.trainer.save_freq": 7},
        server={"lr": 0.3, "seed": 4, "project_name": "house", "overrides": {CLIP: 0.1, "data.shuffle": True}},
    )
    job = found.job
    assert (job.lr, job.seed, job.project, job.advantage) == (0.2, 4, "house", "rloo")
    assert job.overrides == {f"+{CLIP}": 0.3, "data.shuffle": True, "trainer.nnodes": 2, "trainer.save_freq": 7}
    assert found.fields == {"model": JOB, "lr": SET, "advantage": JOB, "seed": SERVER, "project": SERVER}
    assert found.overrides == {CLIP: SET, "data.shuffle": SERVER, "trainer.nnodes": JOB, "trainer.save_freq": SET}


def test_each_layer_wins_over_those_below_also_where_one_writes_a_mapping() -> None:
    middle = {"model": "tiny", "overrides": {"trainer": {"save_freq": 3}}}
    below = {"overrides": {"trainer.save_freq": 1}}
    assert layered(middle, server=below).job.checkpoint_every == 3
    assert layered(middle, set_={"+trainer.save_freq": 7}, server=below).job.checkpoint_every == 7


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"lrr": 1}, "unknown key 'lrr' .did you mean 'lr'"),
        ({"batch_size": 0}, "batch_size"),
        ({"": 1}, "without a name"),
        ({"overrides": 3, "trainer.nnodes": 2}, "overrides: must be a mapping"),
    ],
)
def test_what_is_wrong_is_named(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layered({"model": "tiny"}, set_=given_)


def test_a_field_by_both_of_its_names_is_refused_in_one_layer() -> None:
    model, both = {"model": "tiny"}, {"algorithm": "grpo", "advantage": "rloo"}
    for job, set_, server in ((both, {}, {}), ({}, both, {}), ({}, {}, both)):
        with pytest.raises(ConfigError, match="advantage is given twice"):
            layered({**model, **job}, set_=set_, server=server)
    assert layered({"model": "tiny", "algorithm": "rloo"}, set_={"advantage": "grpo"}).job.advantage == "grpo"


def test_a_key_of_verl_that_is_no_text_is_refused() -> None:
    for below in ({}, {"overrides": {"trainer.nnodes": 2}}):
        with pytest.raises(ConfigError, match=r"overrides\.7: must be a string"):
            layered({"model": "tiny", "overrides": {7: 2}}, server=below)


def test_overrides_of_a_wrong_kind_are_named_also_below_those_of_another_layer() -> None:
    with pytest.raises(ConfigError, match="overrides: must be a mapping"):
        layered({"model": "tiny", "overrides": [CLIP]}, set_={"trainer.nnodes": 2})


_VALUES = {"lr": st.floats(1e-6, 1.0), "seed": st.integers(0, 9), "batch_size": st.integers(1, 9)}


@given(layers=st.tuples(*(st.fixed_dictionaries({}, optional=_VALUES) for _ in LAYERS)))
def test_a_value_is_that_of_the_strongest_layer_that_has_it(layers: tuple[dict[str, Any], ...]) -> None:
    strongest, middle, weakest = layers
    found = layered({"model": "m", **middle}, set_=strongest, server=weakest)
    for name in _VALUES:
        owner = next((layer for layer, values in zip(LAYERS, layers, strict=True) if name in values), None)
        assert found.fields.get(name) == owner
        wanted = (
            dict(zip(LAYERS, layers, strict=True))[owner][name] if owner else TrainJob(model="m").model_dump()[name]
        )
        assert getattr(found.job, name) == wanted
