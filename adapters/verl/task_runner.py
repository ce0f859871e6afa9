"""The Ray actor that hosts verl's trainer: the ``rollout`` process of the engine link."""

from __future__ import annotations

import copy
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray

from adapters.verl.causes import BOOT, deadline, root_cause
from adapters.verl.output import spare_output
from adapters.verl.replicas import has_server, outlives_trainer
from swarm.errors import ConfigError
from swarm.job import ServingMode, TrainJob
from swarm.link.engine import EngineEnd
from swarm.link.imported import ImportedCode, imported
from swarm.link.messages import BootProgress, CodeImported

#: Loggers of verl that are packages of their name.
_PACKAGES = ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")


@ray.remote(num_cpus=1)
class TaskRunner:
    """Runs one training run to its end. Kept alive by its handle, so that its heartbeats outlast an error."""

    def run(
        self,
        config: Any,
        job: TrainJob,
        run_dir: Path,
        serving: ServingMode,
        code: dict[str, ImportedCode],
        address: str,
        token: str,
    ) -> None:
        """Train until ``total_training_steps``, a Stop of the server, or an error.

        Args:
            config: verl's full configuration (a DictConfig).
            serving: when episodes run.
            code: what the driver imports of the synced code, see :class:`~swarm.link.messages.CodeImported`; empty
                without synced code.
            address, token: of the server's end of the link, and of this engine run.
        """
        spare_output()
        with deadline(BOOT, "loading verl", run_dir):
            # TransferQueue's own processes start while this one imports verl, which takes many seconds. The link speaks
            # only then: an import that holds the interpreter would look like a dead process.
            import transfer_queue as tq
            from omegaconf import OmegaConf

            config.transfer_queue.enable = True
            OmegaConf.resolve(config)
            queue = ThreadPoolExecutor(1).submit(tq.init, config.transfer_queue)

            if config.trainer.device == "cpu" and outlives_trainer(config) and not has_server():
                # vLLM takes longest
                from adapters.verl.lasting import start_early

                start_early(config)

            from verl.utils.logging_utils import configure_verl_logging

            from adapters.verl.feed import BatchFeed, StopRequested
            from adapters.verl.trainer import SwarmTrainer

        configure_verl_logging()
        # Ray ends the rest when the driver, which has lost the server too, goes
        self._link = EngineEnd("rollout", address, token, on_lost=partial(os._exit, 1))
        if code:
            driver = next(iter(code.values()))
            here = imported(list(driver.locations), Path(driver.folder))
            self._link.send(CodeImported(processes={**code, "a Ray worker": here}))
        self._link.send(BootProgress(stage="checking the configuration"))
        check(config)
        trainer: Any = None
        succeeded = False
        try:
            feed = BatchFeed(self._link, job.model_name, serving, config.actor_rollout_ref.rollout)
            with deadline(BOOT, "starting the trainer and vLLM", run_dir):
                trainer = SwarmTrainer(config, self._link, feed, run_dir, job.serve_after_training)
                if queue.done():
                    # why it failed is known before everything else has started
                    queue.result()
                trainer.init()
                queue.result()
            trainer.fit(feed)
            succeeded = True
        except StopRequested:
            succeeded = True
        finally:
            tracking = getattr(trainer, "logger", None)
            if tracking is not None:
                tracking.finish(exit_code=0 if succeeded else 1)
            if succeeded:
                # takes seconds; what it started goes with this actor in any case
                tq.close()


def check(config: Any) -> None:
    """Have verl check its full configuration.

    Raises:
        ConfigError: it refuses it, and would each time.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    # verl wants as many rows as ranks, or a multiple: the trainer fills batches up, so tell it of such a number
    checked = copy.deepcopy(config)
    checked.actor_rollout_ref.rollout.n *= config.trainer.n_gpus_per_node * config.trainer.nnodes
    try:
        validate_config(
            config=checked, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        _try_formulas(config)
        _find_loggers(config.trainer.logger)
    except Exception as exc:  # of verl, of hydra, and assertions
        raise ConfigError(f"verl refuses the job's configuration: {root_cause(exc)}") from exc


def _try_formulas(config: Any) -> None:
    """Compute what verl chooses by name within a step, for one token; it raises what would end the first step."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn, kl_penalty
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass

    token, actor, algorithm = torch.ones(1, 1), config.actor_rollout_ref.actor, config.algorithm
    # a library of the user's, which may bring other estimators and losses, is not imported yet
    if not config.actor_rollout_ref.model.external_lib:
        get_adv_estimator_fn(algorithm.adv_estimator)
        loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
        one_token = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), token)
        loss(**one_token, loss_agg_mode=actor.loss_agg_mode, config=omega_conf_to_dataclass(actor))
    for kind, used in (
        (actor.kl_loss_type, actor.use_kl_loss),
        (algorithm.kl_penalty, algorithm.use_kl_in_reward),
    ):
        try:
            if used:
                kl_penalty(token, token, kind)
        except NotImplementedError:
            # it has no words
            raise ValueError(f"there is no KL penalty {kind!r}") from None
    correction = algorithm.rollout_correction
    # with bypass_mode nothing else of it is read
    if correction is not None and not correction.get("bypass_mode"):
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        one_row = DataProto.from_dict(tensors=dict.fromkeys(names, token))
        compute_rollout_correction_and_add_to_batch(one_row, correction)


def _find_loggers(names: Any) -> None:
    """Raise what verl would once all has started: it has no such logger, or its package is not installed."""
    from verl.utils.tracking import Tracking

    for name in [names] if isinstance(names, str) else names:
        if name not in Tracking.supported_backend:
            raise ValueError(f"job.logger: there is no {name!r}; there are {', '.join(Tracking.supported_backend)}")
        if name in _PACKAGES and find_spec(name) is None:
            raise ValueError(f"job.logger: {name} is not installed: pip install {name} for {sys.executable}")
