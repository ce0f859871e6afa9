"""A job reads back as it was written, and a wrong one is refused by name."""

import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.errors import ConfigError
from swarm.job import TrainJob, dump_job, parse_job, read_job
from swarm.kept_adapters import merges_adapter
from swarm.server.config import ServerConfig
from swarm.types import Model
from swarm.validation import describe_validation, parse_mapping


@pytest.mark.parametrize("value", [0.3, math.inf, None, [1, "1"], date(2026, 11, 29), {1: "x"}])
def test_round_trip(value: object) -> None:
    job = TrainJob(model="/models/tiny", batch_size=4, overrides={"actor_rollout_ref.actor.clip_ratio": value})
    assert parse_job(dump_job(job)) == job == TrainJob.model_validate_json(job.model_dump_json())


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS.filter(lambda it: it != "NaN")
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@given(st.dictionaries(TEXTS, VALUES, max_size=3))
@settings(deadline=None, max_examples=60)
def test_round_trip_of_any_overrides(overrides: dict[str, Any]) -> None:
    job = TrainJob(model="m", experiment="\u2028 e\u0301", overrides=overrides)
    assert parse_job(dump_job(job)) == job == TrainJob.model_validate_json(job.model_dump_json())


def test_a_misspelt_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^job\.yaml: unknown key 'batchsize' \(did you mean 'batch_size'\?\)$"):
        parse_job("model: tiny\nbatchsize: 4", "job.yaml")


def test_a_key_like_no_other_is_named_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"lr: must be greater than 0, not 0; unknown key 'xyzzy'$"):
        parse_job("model: tiny\nxyzzy: 4\nlr: 0", "job.yaml")


def test_an_unknown_key_inside_a_mapping_is_named_with_its_place() -> None:
    class Outer(Model):
        job: TrainJob

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"job": {"model": "m", "batchsize": 1}})
    assert describe_validation(caught.value, "file", Outer).message == (
        "file: job: unknown key 'batchsize' (did you mean 'batch_size'?)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        ("- 1", "must be a mapping"),
        ("batch_size: 4", "model: is required"),
        ("model: m\nlr: 0", "lr: must be greater than 0"),
        ("model: m\nnum_repeat: 1", "num_repeat"),
        ("model: m\nnum_repeat: 8\nmax_parallel_episodes: 4", "at least num_repeat"),
        ("model: m\nbatch_size: 4\nmini_batch_num: 3", "batch_size must be divisible by mini_batch_num"),
        ("model: m\nseed: -1", "seed: must be at least 0, not -1"),
        ("model: m\nseed: 4294967296", "seed: must be less than 2147483648"),
        ("model: m\nn_gpu: 3\ntensor_parallel_size: 2", "must be divisible by tensor_parallel_size"),
        ("model: m\nn_gpu: 6\nnnodes: 2\ntensor_parallel_size: 4", "lies on one node, or fills whole nodes"),
        ("model: m\nn_gpu: 4\nnnodes: 3\ntensor_parallel_size: 6", "lies on one node, or fills whole nodes"),
    ],
)
def test_bad_jobs(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job(text)


def test_slots_are_whole_groups() -> None:
    assert TrainJob(model="m", batch_size=3, num_repeat=4).slots == 12
    assert TrainJob(model="m", batch_size=3, num_repeat=4, max_parallel_episodes=10).slots == 8


def test_model_name_is_the_last_part_unless_given() -> None:
    assert TrainJob(model="/a/b/tiny/").model_name == "tiny"
    assert TrainJob(model="org/name", served_model_name="chat").model_name == "chat"


def test_a_job_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainJob(model="m").lr = 1.0  # type: ignore[misc]


def test_a_job_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    job = TrainJob.model_validate({"model": "m", "algorithm": "rloo", "project_name": "p", "experiment_name": "e"})
    assert (job.advantage, job.project, job.experiment) == ("rloo", "p", "e")
    path = tmp_path / "job.yaml"
    path.write_text(dump_job(job))
    assert read_job(path) == job
    assert read_job(path, algorithm="grpo", lr=0.5) == job.model_copy(update={"advantage": "grpo", "lr": 0.5})
    path.write_text("{model: m, overrides: {trainer.save_freq: 3, trainer.nnodes: 2}}")
    changed = read_job(path, overrides={"+trainer.save_freq": 7}).flat_overrides
    assert changed == {"trainer.save_freq": 7, "trainer.nnodes": 2}, "each key of verl is a value of its own"
    for text, said in (
        ("algorithm: ppo\nmodel: m", "advantage"),
        ("model: m\nlrr: 1", "mean 'lr'"),
        ("- 1", "mapping"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_job(tmp_path / "wrong.yaml")
    with pytest.raises(ConfigError, match="same field"):
        parse_job("model: m\nalgorithm: grpo\nadvantage: grpo")
    with pytest.raises(ConfigError, match="cannot read"):
        read_job(tmp_path / "none.yaml")


def test_only_what_was_given_leaves_room_for_a_servers_defaults() -> None:
    assert dump_job(TrainJob(model="m", lr=0.5), only_set=True) == "model: m\nlr: 0.5\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size: four", "job: batch_size: must be a whole number, not 'four'"),
        ("save_freq: -3", "job: save_freq: must be at least -1, not -3"),
        ("serving: maybe", "job: serving: must be 'auto' or 'always' or 'between_steps', not 'maybe'"),
        ("device: tpu", "job: device: must be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        ("lora: 8", "job: lora: must be a mapping"),
        ("overrides: 3", "job: overrides: must be a mapping"),
        ("batch_size: 3\nmini_batch_num: 2", "job: batch_size must be divisible by mini_batch_num"),
    ],
)
def test_what_is_wrong_is_said_without_the_words_of_pydantic(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(f"model: m\n{text}")
    assert caught.value.message == words


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto")])
def test_on_and_off_may_be_written_as_they_are_documented(text: str, value: str) -> None:
    # YAML reads them as true and false
    assert parse_job(f"{{model: m, shared_prefixes: {text}}}").shared_prefixes == value
    rules = ServerConfig.model_validate(parse_mapping("watch: {entropy: {action: off}}", "swarm")).watch
    assert rules.entropy.action == "off"


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^job.yaml is not .*: the key 'lr' is given twice .*line 3, column 1"):
        parse_job("model: m\nlr: 1e-5\nlr: 3e-3\n", "job.yaml")
    merged = "{a: &a {x: 1}, b: &b {<<: *a, x: 2}, c: {<<: *b, y: 3}}"
    assert parse_mapping(merged, "text") == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 2, "y": 3}}
    both = "{a: &a {x: 1}, b: &b {y: 2}, c: {<<: *a, <<: *b, z: 3}}"
    assert parse_mapping(both, "text")["c"] == {"x": 1, "y": 2, "z": 3}, "each of two merges counts"
    listed = "{a: &a {x: 1, seed: 1}, b: &b {x: 2, seed: 2}, c: {<<: [*a, *b]}}"
    assert parse_mapping(listed, "text")["c"] == {"x": 1, "seed": 1}, "the first of a list counts"


@pytest.mark.parametrize(
    "written",
    [
        {"trainer.save_freq": 3, "actor_rollout_ref.rollout.max_model_len": 70},
        {"+trainer.save_freq": 3, "++actor_rollout_ref.rollout.max_model_len": 70},
        {"trainer": {"save_freq": 3}, "actor_rollout_ref": {"rollout": {"max_model_len": 70}}},
        {
            "trainer.save_freq": 9,
            "trainer": {"save_freq": 3},
            "actor_rollout_ref.rollout": {"max_model_len": 70, "x": 1},
        },
    ],
)
def test_an_override_is_read_however_it_is_written(written: dict[str, Any]) -> None:
    job = TrainJob(model="m", save_freq=-1, overrides=written)
    # a run that crashed goes on from a checkpoint only where the job writes some
    assert (job.checkpoint_every, job.max_model_len) == (3, 70)
    assert job.flat_overrides["trainer.save_freq"] == 3 and "trainer.nnodes" not in job.flat_overrides
    merging = job.model_copy(update={"overrides": {"actor_rollout_ref": {"model": {"lora": {"merge": True}}}}})
    assert merges_adapter(merging) and not merges_adapter(job)


def test_numbers_of_overrides_are_numbers_as_for_verl() -> None:
    # YAML 1.1 reads 1e-2 as a text, and verl's own configuration as a number
    job = parse_job("{model: m, overrides: {a.b: 1e-2, c: {d: -3E+4}, e: [1e5], f: 1e, g: '1.5'}}")
    assert job.overrides == {"a.b": 0.01, "c": {"d": -30000.0}, "e": [1e5], "f": "1e", "g": "1.5"}
    assert parse_job(dump_job(job)) == job
