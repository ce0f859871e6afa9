"""verl's synchronous PPO trainer, driven by the swarm: same algorithm, batches from the link, results to the link.

Invariant: ``StepDone`` is sent only after vLLM has the step's weights.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from adapters.verl.advantage import GRPO, RLOO, episode_factors, put_right
from adapters.verl.causes import TRAINING, WEIGHT_SYNC, deadline
from adapters.verl.checkpoints import Checkpoints
from adapters.verl.feed import BatchFeed
from adapters.verl.lora import allowed_difference, check_agreement, sampling_difference, syncs_adapter
from adapters.verl.output import SparingLoggers
from adapters.verl.replicas import VllmServers, has_server, outlives_trainer
from adapters.verl.steps import mini_batch_rows, plain_metrics, spread_groups
from swarm.link.engine import EngineEnd
from swarm.link.messages import BootProgress, Warned, WeightSync
from swarm.measures import REWARD

VLLM_MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"


class SwarmTrainer(PPOTrainerSync):
    """One training run by verl's full configuration; ``serves_on``: whether vLLM goes on after the last step."""

    def __init__(self, config: Any, link: EngineEnd, feed: BatchFeed, run_dir: Path, serves_on: bool) -> None:
        self._serves_on = serves_on
        self._link = link
        self._feed = feed
        self._run_dir = run_dir
        # optimizer steps per training step
        actor = config.actor_rollout_ref.actor
        self._mini_batches = config.data.train_batch_size // actor.ppo_mini_batch_size
        self._micro_batch = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
        self._shares_prefixes = config.actor_rollout_ref.shared_prefixes
        # verl sizes mini-batches in groups of n rows; a batch of the swarm has any number of rows, so we count rows
        config.actor_rollout_ref.rollout.n = 1
        trainer, model = config.trainer, config.actor_rollout_ref.model
        self._checkpoints = Checkpoints(
            Path(trainer.default_local_dir),
            trainer.keep_checkpoints,
            Path(model.path),
            trainer.keep_gb,
            with_adapter=model.lora_rank > 0,
            ranks=trainer.nnodes * trainer.n_gpus_per_node,
        )
        self._checkpoints.set_aside(resumes=trainer.resume_mode != "disable")
        self._tolerance = allowed_difference(config)
        # up to this version, tokens of weights that were lost have the numbers of ours
        self._lost = -1
        self._syncs_adapter = syncs_adapter(config)
        # what ends with the computing of a step: its deadline
        self._computing = ExitStack()
        # verl's RLOO would count every timeline as an answer; its GRPO counts episodes
        self._leave_one_out = config.algorithm.adv_estimator == RLOO
        if self._leave_one_out:
            # an override may name it beside a job whose advantage is over the deviation
            config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo = GRPO, False
        super().__init__(config=config)

    @property
    def logger(self) -> SparingLoggers:
        """What verl logs to; it makes it at the start of the loop."""
        return self._loggers

    @logger.setter
    def logger(self, tracking: Any) -> None:
        self._loggers = SparingLoggers(tracking)

    def stage(self, stage: str, detail: str = "") -> None:
        """Tell people what the boot is doing."""
        self._link.send(BootProgress(stage=stage, detail=detail))

    def _build_replay_buffer(self) -> ReplayBuffer:
        """verl's, which asks the feed for a batch, of any number of groups, instead of polling for one."""
        replay_buffer = super()._build_replay_buffer()
        sample = replay_buffer.sample

        def sample_next(global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
            return sample(global_steps=global_steps, partition_id=partition_id, batch_size=self._feed.collect())

        replay_buffer.sample = sample_next
        return replay_buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        from adapters.verl.worker import SwarmCpuWorker, SwarmWorker

        worker = SwarmCpuWorker if self.config.trainer.device == "cpu" else SwarmWorker
        self.role_worker_mapping = dict.fromkeys(self.role_worker_mapping, ray.remote(worker))
        RolloutReplicaRegistry.register("vllm", self._replica_class)
        step = self._checkpoints.latest() if self.config.trainer.resume_mode == "auto" else 0
        what = f"checkpoint of step {step}" if step else str(self.config.actor_rollout_ref.model.path)
        self.stage("loading the model into the trainer", what)
        # verl imports vLLM only when the model is loaded, which is in another process: do it meanwhile
        threading.Thread(target=importlib.import_module, args=(VLLM_MODULE,), daemon=True).start()

    def _replica_class(self) -> type[RolloutReplica]:
        """Of vLLM; verl asks for it when the trainer has its model."""
        # it imports vLLM
        from adapters.verl.lasting import LastingReplica, SwarmReplica

        lasts = outlives_trainer(self.config)
        if LastingReplica.early or not (lasts and has_server()):
            self.stage("starting vLLM")
        return LastingReplica if lasts else SwarmReplica

    def on_init_end(self) -> None:
        self._replicas = VllmServers(self.llm_server_manager, self._run_dir)
        self._feed.attach(
            self._replicas, lambda metrics, step: self.logger.log(data=dict(metrics), step=step), self._limit_step
        )
        self.stage("first weight sync", "trainer to vLLM")
        taken_over = any(getattr(replica, "taken_over", False) for replica in self.llm_server_manager.get_replicas())
        paused = self._requests_held({}) if taken_over else nullcontext()
        with deadline(WEIGHT_SYNC, "the first weight sync", self._run_dir), paused:
            super().on_init_end()
            if self._syncs_adapter:
                self._replicas.weights_synced()
        self.stage("first token", "one of each replica")
        self._feed.sample_tokens()

    def fit(self, agent_loop_manager: Any) -> None:
        # killed between its checkpoint and its report, the last step would be trained twice
        self._feed.requests.begin_after(self._checkpoints.batch_of(self.global_steps))
        if self.global_steps >= self.total_training_steps:
            self._feed.requests.report_last(self.global_steps)
        with self._computing:
            super().fit(agent_loop_manager)
        if self._serves_on:
            self._feed.serve_on(self.global_steps)

    def _limit_step(self) -> None:
        self._computing.enter_context(deadline(TRAINING, "a training step", self._run_dir))

    def on_sample_end(self) -> None:
        self._checkpoints.reward(self._feed.metrics[REWARD])
        # vLLM sleeps while the trainer computes only where it has to free memory of a device that both share
        if not self._feed.stays_awake:
            super().on_sample_end()
        elif self.curr_step_profile:
            # verl does so beside
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        if self._checkpoints.overdue(self.global_steps):
            self._save_checkpoint()
        self._computing.close()
        with deadline(WEIGHT_SYNC, "the weight sync", self._run_dir), self._serving_paused():
            super().on_step_end()
            if self._syncs_adapter:
                self._replicas.weights_synced()

    @contextmanager
    def _serving_paused(self) -> Iterator[None]:
        """While replicas that are awake change weights, nothing is sampled: every token has one policy version.

        Where episodes run on, vLLM keeps their requests. Elsewhere the server has ended all episodes by now, but vLLM
        may still compute for callers that went away or came past the server: these requests end with ``finish_reason:
        "abort"``, later ones wait in vLLM's queue. A sleeping replica has done all this already.
        """
        if self._feed.serves_always:
            with self._requests_held(self.timing_raw):
                yield
        elif self._feed.stays_awake:
            self._link.send(WeightSync())
            with marked_timer("abort", self.timing_raw):
                self.checkpoint_manager.abort_replicas()
            yield
            self.checkpoint_manager.resume_generation_replicas()
        else:
            yield

    @contextmanager
    def _requests_held(self, timing: dict[str, float]) -> Iterator[None]:
        """vLLM keeps its requests while it gets new weights, and goes on once the server knows the version."""
        self._link.send(WeightSync())
        with marked_timer("pause", timing):
            self._replicas.pause()
        yield
        self._feed.weights_changed(self._replicas.policy_version(), self._replicas.sampled())
        self._replicas.resume()

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # verl cuts a batch into mini-batches of a fixed number of rows and pads the rest: adapt their size to the batch
        # at hand, so that its timelines decide neither the number of optimizer steps nor how much padding there is
        rows = len(batch.keys)
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = mini_batch_rows(
            rows,
            self._mini_batches,
            data_parallel=self.resource_pool_manager.get_n_gpus(),
            micro_batch=self._micro_batch,
        )
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        if (ranks := self.resource_pool_manager.get_n_gpus()) > 1 and self._shares_prefixes:
            # verl balances ranks by the lengths of rows, and scatters groups over them
            groups = [key.rsplit("_", 2)[0] for key in batch.keys]
            prompts, answers = ([tag[name] for tag in batch.tags] for name in ("prompt_len", "response_len"))
            parts = spread_groups(groups, prompts, answers, ranks)
            lengths = [tag["seq_len"] for tag in batch.tags]
            metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=parts, prefix="global_seqlen"))
            batch.reorder([row for part in parts for row in part])
        metrics["swarm/rows"] = rows
        metrics["swarm/padding_rows"] = len(batch.keys) - rows
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        computed = super()._compute_old_log_prob(batch, metrics)
        if self._tolerance is not None:
            self._compare_log_probs(batch, metrics, self._tolerance)
        return computed

    def _compare_log_probs(self, batch: Any, metrics: dict[str, Any], allowed: float) -> None:
        version = self._replicas.policy_version()
        if self._feed.newest_step > version:
            # the run went back to a checkpoint
            self._lost = self._feed.newest_step
        if version <= self._lost:
            return
        names = ["old_log_probs", "rollout_log_probs", "response_mask", "policy_versions"]
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)
        columns = [np.concatenate([row.cpu().numpy() for row in data[name].unbind()]) for name in names]
        if (far := sampling_difference(*columns, version)) is not None:
            metrics["swarm/adapter_difference"] = far
            check_agreement(far, allowed, version)

    def _compute_advantage(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super()._compute_advantage(batch, *args, **kwargs)
        # rows that verl pads with have neither
        rewards, credits = ([of.get(key, 0.0) for key in batch.keys] for of in (self._feed.rewards, self._feed.credits))
        if self.config.algorithm.adv_estimator == GRPO:
            trained = None if self.config.algorithm.use_kl_in_reward else rewards
            factors = episode_factors(batch.keys, trained, leave_one_out=self._leave_one_out)
        else:
            # an override names the estimator: its baseline need not be the group's
            factors = [1.0] * len(batch.keys)
        return put_right(batch, factors, credits)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._update_actor(batch, metrics)
        # verl names all metrics of its workers after the actor
        for name in [name for name in metrics if name.startswith("actor/swarm/")]:
            metrics[name.removeprefix("actor/")] = metrics.pop(name)
        return batch

    def _save_checkpoint(self) -> None:
        trainer = self.config.trainer
        folder, save = trainer.default_local_dir, super()._save_checkpoint

        def write(aside: Path) -> None:
            trainer.default_local_dir = str(aside)
            try:
                save()
            finally:
                trainer.default_local_dir = folder

        if warning := self._checkpoints.save(self.global_steps, self._feed.requests.batch_id, write):
            self._link.send(Warned(text=warning))

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        # for verl's loggers
        metrics |= self._feed.metrics
        metrics |= self._replicas.take_histories()
        self._feed.requests.report(self.global_steps, plain_metrics(metrics))
