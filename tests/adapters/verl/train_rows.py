"""A process of its own, and a fork of it for each data-parallel rank: batches of any shape through verl's real trainer
and engine.

For each case the gradients of all optimizer steps are held against plain torch, which knows no padding and no
micro-batches. Stand-ins are the TransferQueue (a dict of columns) and Ray's dispatch (a slice of rows for each rank).

Reads ``{"model": folder, "examples": n, "ranks": [1, 2]}`` from stdin. Prints by the number of ranks what each of them
did: how many examples there were, and in how many of them padding was added, ``{"examples": n, "padded": m}``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = "adapters.verl.cpu_platform"
# verl wants it in the environment of a worker; the ranks meet at DIST_INIT_METHOD
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import transfer_queue as tq
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch.multiprocessing import start_processes
from transfer_queue import KVBatchMeta
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from adapters.verl import worker as worker_module
from adapters.verl.config import verl_config
from adapters.verl.feed import batch_rows
from adapters.verl.trainer import SwarmTrainer
from adapters.verl.tree import shared_prefix as tree_engine
from adapters.verl.worker import SwarmCpuWorker
from swarm.job import TrainJob
from swarm.tokens import Timeline, TrainBatch, TrainGroup, Trajectory
from tests.adapters.verl.compute_advantages import trainer_of

# nobody is served beside it: at a lower priority the test takes ten times as long on a busy machine
worker_module.NICENESS = 0
ACTOR = "actor_rollout_ref.actor"
#: a small one of each: fixed and packed micro-batches, a mean over tokens and one over rows, verl's rows and tries
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo"},
    "rows": {"advantage": "grpo", "shared_prefixes": "off"},
    "dr_grpo": {"advantage": "dr_grpo"},
    "packed": {"advantage": "dr_grpo", "overrides": {f"{ACTOR}.use_dynamic_bsz": True}},
    # as on GPUs without flash attention: the rows of a micro-batch are one row, with a mask
    "one_row": {
        "advantage": "grpo",
        "shared_prefixes": "off",
        "overrides": {f"{ACTOR}.use_dynamic_bsz": True, "actor_rollout_ref.model.use_remove_padding": True},
    },
}


class Store:
    """The rows of one batch by key, as the TransferQueue would keep them."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> Any:
        rows = [self.rows[key] for key in keys]
        common = set.intersection(*(set(row) for row in rows))
        names = common if select_fields is None else common.intersection(select_fields)
        data = tu.list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])
        for name, column in data.items():
            # the TransferQueue's columns are ragged, also where all rows have one length
            if isinstance(column, torch.Tensor) and not column.is_nested:
                data[name] = torch.nested.as_nested_tensor(list(column.unbind()), layout=torch.jagged)
        return data

    def put(self, keys: list[str], partition_id: str, fields: Any, tags: list[dict[str, Any]] | None = None) -> Any:
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind() if isinstance(column, torch.Tensor) else column, strict=True):
                self.rows.setdefault(key, {})[name] = value
        return KVBatchMeta(keys=keys, tags=tags or [{} for _ in keys], partition_id=partition_id)


class Workers:
    """The worker group of the trainer: this rank's worker, with the rows that Ray would have given it."""

    def __init__(self, worker: SwarmCpuWorker, store: Store) -> None:
        self._dispatch_info = {"actor": list(range(dist.get_world_size()))}
        self._worker, self._store = worker, store

    def _data(self, batch: KVBatchMeta) -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        each = len(batch) // ranks
        assert each * ranks == len(batch), "Ray's dispatch wants equal parts"
        data = self._store.get(batch.keys[rank * each : (rank + 1) * each], "train")
        tu.assign_non_tensor(data, **batch.extra_info)
        return data

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        output = self._worker.actor.infer_batch(self._data(batch))
        mine = [(output["log_probs"][i].clone(), output["entropy"][i].clone()) for i in range(len(output))]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        for key, (log_probs, entropy) in zip(batch.keys, (row for part in parts for row in part), strict=True):
            self._store.rows[key] |= {"log_probs": log_probs, "entropy": entropy}
        return batch

    def update_actor(self, batch: KVBatchMeta) -> Any:
        return self._worker.actor.train_mini_batch(self._data(batch))


def make_job(model: str, **changes: Any) -> TrainJob:
    # with a rate of 0 the weights stay those of the reference
    fixed = {"model": model, "device": "cpu", "max_prompt_length": 128, "max_response_length": 64}
    overrides = {f"{ACTOR}.optim.lr": 0.0, **changes.pop("overrides", {})}
    return TrainJob.model_validate(fixed | changes | {"overrides": overrides})


def make_worker(config: Any) -> SwarmCpuWorker:
    worker = SwarmCpuWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def make_trainer(config: Any, workers: Workers, rewards: dict[str, float]) -> SwarmTrainer:
    """A trainer without a cluster, with what verl's steps ask for; ``rewards`` are of its rows, by their keys."""
    trainer = trainer_of(config, rewards, {})
    trainer.actor_rollout_wg = workers
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=dist.get_world_size)
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    trainer.distillation_config = None
    trainer.use_critic, trainer.global_steps = False, 1
    return trainer


def make_batch(shape: list[list[int]], seed: int) -> TrainBatch:
    """Random rows: ``shape`` has for each group and each of its episodes the number of timelines.

    Most rows of a group begin with its prompt.
    """
    chance = random.Random(seed)

    def prompt() -> list[int]:
        return [chance.randrange(300) for _ in range(chance.randint(1, 20))]

    def timeline(common: list[int]) -> Timeline:
        length = chance.randint(1, 12)
        mask = [1, *(chance.choice([0, 1, 1]) for _ in range(length - 1))]
        return Timeline(
            prompt_ids=prompt() if chance.random() < 0.2 else common + prompt() if chance.random() < 0.3 else common,
            response_ids=[chance.randrange(300) for _ in range(length)],
            response_mask=mask,
            logprobs=[-chance.uniform(4, 7) * bit for bit in mask],
            min_policy_version=0,
            max_policy_version=0,
            num_calls=1,
        )

    return TrainBatch(
        batch_id="b",
        groups=[
            TrainGroup(
                task_id=str(number),
                trajectories=[
                    Trajectory(
                        episode_uuid=f"{number}-{index}",
                        task_id=str(number),
                        reward=chance.random(),
                        timelines=[timeline(common) for _ in range(count)],
                        num_calls=count,
                    )
                    for index, count in enumerate(group)
                ],
            )
            for number, (group, common) in enumerate((group, prompt()) for group in shape)
        ],
    )


def gradients(module: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {n: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone() for n, grad in found.items()}


def expected(reference: Any, rows: list[dict[str, Any]], scale: int | None) -> dict[str, torch.Tensor]:
    """The gradient of one optimizer step on ``rows``: a mean over their sampled tokens, or over rows and ``scale``."""
    reference.zero_grad()
    for row in rows:
        logits = reference(row["input_ids"][None]).logits[0, len(row["prompts"]) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, row["responses"][:, None])[:, 0]
        weight = row["advantages"] * row["rollout_is_weights"] * row["loss_mask"]
        (-(weight * chosen).sum()).backward()
    count = sum(int(row["loss_mask"].sum()) for row in rows) if scale is None else len(rows) * scale
    return {name: grad / count for name, grad in gradients(reference).items()}


def check(worker: SwarmCpuWorker, reference: Any, job: TrainJob, shape: list[list[int]], seed: int) -> int:
    """Train one batch and compare; how many rows were added.

    Raises:
        AssertionError: a row is not trained, or trained with another gradient than by hand.
    """
    store = Store()
    tq.kv_batch_get, tq.kv_batch_put = store.get, store.put
    batch = make_batch(shape, seed)
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    rewards: dict[str, float] = {}
    for group in batch_rows(batch, [f"uid{number}" for number in range(len(shape))], 1):
        store.rows |= dict(zip(group.keys, group.fields, strict=True))
        keys, tags = keys + group.keys, tags + group.tags
        rewards |= dict(zip(group.keys, group.rewards, strict=True))
    config = verl_config(job, job.model, Path(tempfile.gettempdir()), "cpu")
    trainer = make_trainer(config, Workers(worker, store), rewards)
    stepped: list[dict[str, torch.Tensor]] = []
    engine = worker.actor.engine
    step = type(engine).optimizer_step
    engine.optimizer_step = lambda: (stepped.append(gradients(engine.module)), step(engine))[1]

    metrics: dict[str, Any] = {}
    meta = KVBatchMeta(keys=list(keys), tags=tags, partition_id="train")
    meta = trainer._balance_batch(meta, metrics)
    order = list(meta.keys)
    for stage in (trainer._compute_old_log_prob, trainer._compute_advantage, trainer._update_actor):
        meta = stage(KVBatchMeta(keys=order, tags=meta.tags, partition_id="train"), metrics)

    assert sorted(order) == sorted([*keys, *(key for key in order if key.startswith("pad"))])
    ranks = dist.get_world_size()
    added, each = len(order) - len(keys), len(order) // ranks
    assert (metrics["swarm/rows"], metrics["swarm/padding_rows"]) == (len(keys), added)
    steps = len(stepped) // job.ppo_epochs
    assert 1 <= steps <= job.mini_batch_num and steps * job.ppo_epochs == len(stepped)
    size = each // steps
    trained: Counter[str] = Counter()
    for number, found in enumerate(stepped):
        at = number % steps * size
        together = [key for rank in range(ranks) for key in order[rank * each + at : rank * each + at + size]]
        real = [key for key in together if not key.startswith("pad")]
        assert real, "an optimizer step on padding alone"
        trained.update(real)
        scale = None if job.advantage == "grpo" else job.max_response_length
        wanted = expected(reference, [store.rows[key] for key in real], scale)
        for parameter, grad in wanted.items():
            torch.testing.assert_close(found[parameter], grad, rtol=2e-3, atol=1e-6 + 2e-4 * float(grad.abs().max()))
    assert trained == Counter({key: job.ppo_epochs for key in keys})
    tokens = job.ppo_epochs * sum(len(store.rows[key]["input_ids"]) for key in order)
    assert metrics["swarm/tokens"] == tokens >= metrics["swarm/unique_tokens"]
    assert (metrics["swarm/prefix_seconds_saved"] > 0) == (job.shared_prefixes != "off")
    if job.shared_prefixes == "off":
        assert metrics["swarm/unique_tokens"] == tokens
    return added


shapes = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4)


def run(rank: int, ranks: int, asked: dict[str, Any], meeting: str, told: Any) -> None:
    """Be one of ``ranks``, which meet at ``meeting``."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "DIST_INIT_METHOD": f"file://{meeting}"}
    jobs = {name: make_job(asked["model"], **values) for name, values in SETTINGS.items()}
    run_dir = Path(tempfile.gettempdir())
    workers = {name: make_worker(verl_config(job, job.model, run_dir, "cpu")) for name, job in jobs.items()}
    reference = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    done: Counter[str] = Counter()
    # the rows of so small a model are estimated to cost less, but tries are to be trained too
    tree_engine.part_cost = lambda shape, part: 1e-6

    # the ranks must draw the same examples, and a failure of one ends them all
    @settings(
        max_examples=asked["examples"],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    # eleven rows, most of which share a micro-batch
    @example("one_row", [[3, 3, 2], [3]], 1, 1, 9, 0)
    @given(
        st.sampled_from(sorted(jobs)), shapes, st.integers(1, 4), st.integers(1, 2), st.integers(1, 9), st.integers(0)
    )
    def examples(name: str, shape: list[list[int]], minis: int, epochs: int, micro: int, seed: int) -> None:
        engine = workers[name].actor.engine_config
        engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu = micro, micro + 1
        # most rows are longer than the least of these, and padding than the most
        engine.max_token_len_per_gpu, engine.infer_max_token_len_per_gpu = 12 * micro, 10 * micro
        sizes = {"batch_size": minis * 2, "mini_batch_num": minis, "ppo_epochs": epochs}
        more = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro}
        job = jobs[name].model_copy(update=sizes | {"overrides": jobs[name].overrides | more})
        added = check(workers[name], reference, job, shape, seed)
        done.update(examples=1, padded=added > 0)

    examples()
    dist.destroy_process_group()
    told.put(done)


def main() -> None:
    asked, found = json.load(sys.stdin), {}
    for ranks in asked["ranks"]:
        told = multiprocessing.get_context("fork").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"{folder}/ranks"
            # one that fails ends the others
            start_processes(run, (ranks, asked, meeting, told), nprocs=ranks, start_method="fork")
        found[ranks] = [told.get() for _ in range(ranks)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
