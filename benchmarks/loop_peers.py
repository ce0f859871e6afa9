"""Training loops of others, one run each in a process of its own: verl's ``main_ppo`` and TRL's ``GRPOTrainer``.

``python -m benchmarks.loop_peers verl|trl FOLDER``, started by :mod:`benchmarks.loop`: ``FOLDER/settings.json`` says
what to train, and each step becomes a line of the file that ``VERL_FILE_LOGGER_PATH`` names, as verl's logger writes
it. TRL runs in an environment that verl's part is not asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def letters(text: str) -> float:
    """The reward of all loops: the share of letters, which is only there to differ."""
    return sum(map(str.isalpha, text)) / max(1, len(text))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """verl's custom reward function."""
    return letters(solution_str)


def run_verl(folder: Path, settings: dict[str, Any]) -> None:
    """verl's task runner, trainer, agent loop, dataset and reward workers; of ours only what a CPU needs.

    That is the platform, the worker with rows as verl's, and the values of :mod:`adapters.verl.cpu`. One process for
    agent loops and one for rewards instead of eight: each would load torch on the same cores.
    """
    import pyarrow
    import pyarrow.parquet

    from adapters.verl.cluster import RayFolder, init_arguments, kill_processes, remove_leftovers, start_ray
    from adapters.verl.config import apply_overrides, verl_config
    from adapters.verl.driver import run_environment
    from swarm.job import TrainJob

    job = TrainJob(**settings["job"], shared_prefixes="off")
    config = verl_config(job, job.model, folder, "cpu")
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "data_source": "letters",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, prompt in enumerate(settings["prompts"])
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    own = {
        "data.train_files": [str(folder / "prompts.parquet")],
        "data.val_files": [str(folder / "prompts.parquet")],
        "data.custom_cls.path": None,
        "data.custom_cls.name": None,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": __file__,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
    }
    apply_overrides(config, own)
    environment = run_environment(folder, job, job.model, "cpu", "between_steps")
    os.environ.update(environment)
    began = (folder / "settings.json").stat().st_mtime
    ray_folder = RayFolder(folder)
    try:
        start_ray(init_arguments(job, "cpu", ray_folder.path, environment, {}), ray_folder.path)
        # Ray's own handler leaves its processes behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        import ray
        from verl.trainer import main_ppo

        class OnCpu(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
            def run(self, config: Any) -> None:
                from verl.trainer.ppo.v1 import trainer_base

                from adapters.verl.worker import SwarmCpuWorker

                trainer_base.ActorRolloutRefWorker = SwarmCpuWorker
                super().run(config)

        main_ppo.run_ppo(config, ray.remote(num_cpus=1)(OnCpu))
    finally:
        import ray

        ray.shutdown()
        kill_processes()
        remove_leftovers(ray_folder, began)


def run_trl(folder: Path, settings: dict[str, Any]) -> None:
    """TRL with transformers' generation; the micro-batch of four rows is verl's."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = settings["job"]
    rows, micro_batch = job["batch_size"] * job["num_repeat"], 4
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": torch.float32},
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=job["num_repeat"],
        max_completion_length=job["max_response_length"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_steps=job["total_training_steps"],
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lines = Path(os.environ["VERL_FILE_LOGGER_PATH"])

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "train_runtime" not in logs:
                with lines.open("a") as file:
                    file.write(json.dumps({"step": state.global_step, "data": logs}) + "\n")

    def reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [letters(completion[0]["content"]) for completion in completions]

    prompts = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in settings["prompts"]]
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Lines()],
    )
    trainer.train()


if __name__ == "__main__":
    place = Path(sys.argv[2])
    {"verl": run_verl, "trl": run_trl}[sys.argv[1]](place, json.loads((place / "settings.json").read_text()))
