"""``AgentJetJob``: keywords, files and the tree of keys, which of them wins, and what is refused or warned about."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm.agentjet.job import KEYWORDS, AgentJetJob
from swarm.agentjet.yaml_job import convert
from swarm.errors import ConfigError
from swarm.job import LoraSettings, TrainJob, layered, parse_job


def written(folder: Path, **content: Any) -> str:
    path = folder / "some_job.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_agentjets_defaults_are_sent() -> None:
    job = AgentJetJob(model="m").train_job()
    assert job == TrainJob(
        model="m",
        project="ajet_default_project",
        n_gpu=8,
        batch_size=32,
        num_repeat=4,
        max_parallel_episodes=128,
        max_prompt_length=3000,
        max_response_length=15000,
        max_turn_length=4096,
        dialect="agentjet",
        gpu_memory_utilization=0.85,
        # what decides what is learned is AgentJet's, too
        temperature=0.9,
        kl_coef=0.002,
        save_freq=20,
        overrides={
            "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
            "actor_rollout_ref.actor.optim.weight_decay": 0.01,
            "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
            "actor_rollout_ref.actor.optim.clip_grad": 20.0,
        },
    )


def test_the_keywords_of_scripts_are_carried() -> None:
    job = AgentJetJob(
        model="org/model",
        project_name="p",
        experiment_name="e",
        algorithm="grpo",
        logging="tensorboard",
        n_gpu=4,
        nnodes=2,
        batch_size=6,
        grpo_n=3,
        swarm_mode=True,
        swarm_mode_sample_collection_method="rollout_until_all_clients_agree_sync_weight",
        max_env_worker=9,
        backbone="verl",
        max_prompt_length=100,
        max_response_length=200,
        max_model_len=400,
        mini_batch_num=2,
        tensor_model_parallel_size=2,
        max_num_seqs=64,
        ppo_max_token_len_per_gpu=5000,
        lora_rank=8,
        lora_alpha=32,
        lora_target_modules="all-linear",
        lora_load_format="safetensors",
        layered_summon=True,
        gpu_memory_utilization=0.5,
        lr=3e-5,
        ppo_epochs=2,
        total_training_steps=7,
        use_kl_loss=False,
    )
    job.config.ajet.trainer_common.save_freq = -1
    assert (job.num_repeat, job.batch_size, job.max_env_worker) == (3, 6, 9)
    assert job.train_job() == TrainJob(
        model="org/model",
        project="p",
        experiment="e",
        logger=["console", "tensorboard"],
        n_gpu=4,
        nnodes=2,
        batch_size=6,
        num_repeat=3,
        collection="all_clients_agree_sync_weight",
        max_parallel_episodes=9,
        max_prompt_length=100,
        max_response_length=200,
        max_turn_length=200,
        save_freq=-1,
        dialect="agentjet",
        mini_batch_num=2,
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
        lr=3e-5,
        ppo_epochs=2,
        total_training_steps=7,
        kl_coef=0.0,
        temperature=0.9,
        lora=LoraSettings(rank=8, alpha=32, targets="all-linear"),
        overrides={
            **AgentJetJob(model="m").train_job().overrides,
            "actor_rollout_ref.rollout.max_num_seqs": 64,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 5000,
            "actor_rollout_ref.rollout.load_format": "safetensors",
            "actor_rollout_ref.rollout.layered_summon": True,
            "actor_rollout_ref.rollout.max_model_len": 400,
        },
    )


def test_values_that_were_not_given_can_be_read_too() -> None:
    job = AgentJetJob(model="m", max_prompt_length=10, max_response_length=20)
    assert (job.max_model_len, job.max_response_length_in_one_turn, job.lora_rank) == (30, 20, 0)
    assert (AgentJetJob().max_response_length_in_one_turn, AgentJetJob().model) == (4096, None)
    job.batch_size = 3
    assert job.train_job().batch_size == 3
    for wrong in ("batchsize", "tune_it"):
        with pytest.raises(AttributeError, match=wrong):
            getattr(job, wrong)
        with pytest.raises(AttributeError, match=wrong):
            setattr(job, wrong, 1)


def test_scripts_find_the_keywords_in_the_signature() -> None:
    names = set(inspect.signature(AgentJetJob.__init__).parameters)
    assert names == {"self", "base_yaml_config", "ensure_new_experiment", *KEYWORDS}


def test_keys_are_set_in_the_tree_until_the_job_is_synced() -> None:
    job = AgentJetJob(model="m")
    job.config.ajet.trainer_common.save_freq = 5
    job.config.ajet.rollout.vllm_tool_parser = "qwen3_coder"
    done = job.train_job()
    assert (done.save_freq, done.tool_call_parser) == (5, "qwen3_coder")
    assert job.config.to_dict()["ajet"]["trainer_common"]["save_freq"] == 5
    with pytest.raises(AttributeError, match="has no 'safe_freq' here"):
        print(job.config.ajet.trainer_common.safe_freq)
    job.config.ajet.teacher_model.teacher_opd_enabled = True
    with pytest.raises(ConfigError, match="nothing is distilled from a teacher here"):
        job.train_job()


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"backbone": "trinity"}, "ajet.backbone cannot be 'trinity': the only trainer here is verl"),
        ({"swarm_mode": False}, "ajet.enable_swarm_mode cannot be False"),
        ({"use_kl_in_reward": True}, "use kl_loss_coef"),
        ({"loss_weight_normalization_episode_level": True}, "loss_weight_normalization_episode_level cannot be True"),
        ({"algorithm": "gae"}, "adv_estimator"),
        ({"max_model_len": 100}, "max_model_len cannot be 100"),
        ({"n_gpu_for_infer": 2}, "samples on the GPUs that it trains on"),
        ({"batchsize": 2}, "no keyword 'batchsize'; did you mean 'batch_size'"),
        ({"wandb_key": "x"}, r"no keyword 'wandb_key'; AgentJet's other keys are set in config.ajet"),
        ({"grpo_n": 4, "num_repeat": 8}, "the same field"),
        ({"base_yaml_config": "nothing.yaml"}, "cannot read the job nothing.yaml"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(keywords: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        AgentJetJob(**{"model": "m", **keywords})


def test_what_has_no_effect_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    AgentJetJob(model="m").train_job()
    assert not caplog.records
    job = AgentJetJob(model="m", compute_madness_checklist=["nonsense"], experiment_dir="./out", lora_alpha=32)
    job.train_job()
    job.train_job()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "the job's ajet.experiment_dir has no effect: the operator's run folder is used" in told
    assert "the job's ajet.lora.* has no effect: lora_rank is 0" in told


def test_a_workflow_is_not_this_jobs() -> None:
    for name in ("set_workflow", "set_data", "tune"):
        with pytest.raises(ConfigError, match="swarm-gateway train"):
            getattr(AgentJetJob(), name)("x")


# ---------------------------------------------------------------------- files


def test_a_keyword_wins_over_the_yaml_and_the_yaml_over_the_defaults(tmp_path: Path) -> None:
    base = written(
        tmp_path,
        ajet={
            "model": {"path": "m"},
            "data": {"train_batch_size": 16},
            "rollout": {"num_repeat": 2},
            "trainer_common": {"optim": {"lr": 1e-5}},
        },
        hydra={"searchpath": []},
    )
    job = AgentJetJob(base_yaml_config=base, batch_size=8, lr=None).train_job()
    assert (job.batch_size, job.num_repeat, job.lr, job.n_gpu, job.experiment) == (8, 2, 1e-5, 8, "some_job")
    # and the server's defaults fill what is left
    filled = layered(job.model_dump(exclude_unset=True), server={"seed": 5, "batch_size": 99}).job
    assert (filled.seed, filled.batch_size) == (5, 8)


def test_a_file_that_is_read_later_overrides_what_the_constructor_was_given(tmp_path: Path) -> None:
    job = AgentJetJob(model="m", batch_size=8, lr=2e-5)
    config = job.build_job_from_yaml(written(tmp_path, ajet={"trainer_common": {"optim": {"lr": 1e-4}}}), num_repeat=2)
    assert config["ajet"]["trainer_common"]["optim"]["lr"] == 1e-4
    done = job.train_job()
    assert (done.model, done.batch_size, done.lr, done.num_repeat) == ("m", 8, 1e-4, 2)


def test_a_file_of_overrides_alone_is_read(tmp_path: Path) -> None:
    job = AgentJetJob(model="m")
    job.build_job_from_yaml(written(tmp_path, overrides={"actor_rollout_ref.actor.clip_ratio": 0.3}))
    job.build_job_from_yaml(written(tmp_path, overrides={"trainer.val_before_train": False}))
    done = job.train_job()
    assert done.overrides["actor_rollout_ref.actor.clip_ratio"] == 0.3
    assert done.overrides["trainer.val_before_train"] is False


def test_a_file_in_our_words_is_read(tmp_path: Path) -> None:
    ours = written(
        tmp_path,
        model="m",
        lr=0.5,
        project="p",
        collection="finish_enough_episodes",
        serving="always",
        kl_coef=0.1,
        save_freq=3,
    )
    job = AgentJetJob(ours, lr=0.25).train_job()
    assert (job.kl_coef, job.save_freq, job.temperature) == (0.1, 3, 0.9)
    assert (job.model, job.lr, job.project) == ("m", 0.25, "p")
    assert (job.collection, job.serving) == ("finish_enough_episodes", "always")


def test_a_keyword_wins_over_a_file_in_our_words_too(tmp_path: Path) -> None:
    ours = written(tmp_path, model="m", max_turn_length=512, lora={"rank": 8, "alpha": 32})
    job = AgentJetJob(ours, max_response_length_in_one_turn=1024, lora_rank=16)
    done = job.train_job()
    assert (done.max_turn_length, done.lora) == (1024, LoraSettings(rank=16, alpha=32))
    assert (job.max_response_length_in_one_turn, job.lora_rank, job.lora_alpha) == (1024, 16, 32)
    whole = AgentJetJob(ours).train_job()
    assert (whole.max_turn_length, whole.lora) == (512, LoraSettings(rank=8, alpha=32))
    with pytest.raises(ConfigError, match=r"lora.*rnak"):
        AgentJetJob(written(tmp_path, model="m", lora={"rnak": 8}))


def test_a_section_may_be_set_as_a_mapping() -> None:
    job = AgentJetJob(model="m")
    job.config.ajet.rollout = {"num_repeat": 2, "max_env_worker": 6, "val_kwargs": {"temperature": 0.5}}
    for _ in range(2):  # to sync it is to look at it twice
        done = job.train_job()
        assert (job.num_repeat, done.num_repeat, done.slots) == (2, 2, 6)
        assert done.eval_sampling.temperature == 0.5


def test_a_section_without_keys_leaves_the_defaults(tmp_path: Path) -> None:
    # all of its keys are commented out
    file = written(tmp_path, ajet={"rollout": None, "data": None, "trainer_common": {"optim": None}})
    done, usual = AgentJetJob(file, model="m").train_job(), AgentJetJob(model="m").train_job()
    assert done.model_dump(exclude={"experiment"}) == usual.model_dump(exclude={"experiment"})


def test_a_file_with_wrong_values_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for content, why in (
        ({"ajet": [1]}, "ajet must be a mapping"),
        ({"ajet": {"rollout": {"num_repeat": "many"}}}, "ajet.rollout.num_repeat"),
        ({"ajet": {"trainer_common": {"optim": 5}}}, "ajet.trainer_common.optim must be a mapping, got int"),
        ({"serving": "sometimes"}, "serving"),
    ):
        with pytest.raises(ConfigError, match=why):
            AgentJetJob(model="m").build_job_from_yaml(written(tmp_path, **content))
    AgentJetJob(model="m").build_job_from_yaml(written(tmp_path, actor_rollout_ref={"actor": {"clip_ratio": 1}}))
    assert "actor_rollout_ref has no effect: set verl's keys in `overrides`" in caplog.text


def test_a_job_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    job = AgentJetJob(model="m", batch_size=2, lora_rank=8, lora_load_format="safetensors")
    job.build_job_from_yaml(written(tmp_path, overrides={"trainer.val_before_train": False}))
    path = job.dump_job_as_yaml(str(tmp_path / "made/config.yaml"))
    assert AgentJetJob(path, experiment_name=job.experiment_name).train_job() == job.train_job().model_copy(
        update={"experiment": "config"}
    )
    with pytest.raises(ConfigError, match="cannot write the job"):
        job.dump_job_as_yaml(str(tmp_path / "some_job.yaml/config.yaml"))
    # what is synced is AgentJet's form
    assert convert(yaml.safe_load(job.to_yaml())).job.batch_size == 2


def test_an_experiment_may_be_new_each_time() -> None:
    name = AgentJetJob(model="m", experiment_name="e", ensure_new_experiment=True).train_job().experiment
    assert name.startswith("e_2")


def test_our_own_job_is_read_by_a_function() -> None:
    assert not hasattr(parse_job("model: m"), "build_job_from_yaml")


def test_the_placeholder_for_the_files_name_is_that_name(tmp_path: Path) -> None:
    path = tmp_path / "my_run.yaml"
    path.write_text("ajet: {experiment_name: read_yaml_name, model: {path: tiny}}")
    assert AgentJetJob(base_yaml_config=str(path)).train_job().experiment == "my_run"
    assert AgentJetJob(str(path), ensure_new_experiment=True).experiment_name.startswith("my_run_2")
    assert AgentJetJob(str(path), experiment_name="mine").train_job().experiment == "mine"
