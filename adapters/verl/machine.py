"""What a job needs of the machine that it is to run on: found before anything is started."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from adapters.models import resolve_model, weight_bytes
from adapters.verl.config import Device
from adapters.verl.cpu import CPU_BUILD, WEIGHT_BUCKET, version_of, weight_bucket_mib
from swarm.errors import ConfigError
from swarm.files import SHARED_MEMORY
from swarm.job import TrainJob

#: Devices of GPUs that ``/dev/nvidia*`` does not show: of AMD, and of Windows below a Linux.
_OTHER_GPUS = ("/dev/kfd", "/dev/dxg")


def check_machine(job: TrainJob, device: Device) -> None:
    """Refuse what this machine cannot run.

    Raises:
        ConfigError: names the field and what to do.
    """
    if job.nnodes > 1:
        cluster_address()
    elif device == "cpu" and job.n_gpu > 1:
        raise ConfigError(
            f"n_gpu is {job.n_gpu}, and the job runs on the CPU, where it is 1: leave it out, or set device: cuda "
            "where there are GPUs",
            param="n_gpu",
        )
    elif device == "cuda" and (gpus := _gpus()) is not None and gpus < job.n_gpu:
        if gpus == 0:
            raise ConfigError(
                "device is cuda, and this machine shows no GPU: leave device out to train on the CPU, or run this "
                "where `nvidia-smi` lists one",
                param="device",
            )
        raise ConfigError(f"n_gpu is {job.n_gpu}, and this machine shows {gpus} of them", param="n_gpu")
    elif device == "cuda" and version_of(CPU_BUILD) is not None:
        raise ConfigError(
            "device is cuda, and vLLM's build for CPUs is installed here: leave device out to train on the CPU, or "
            "install the versions for GPUs in an environment of their own (docs/gpus.md)",
            param="device",
        )
    elif device == "cpu" and job.lora is None and WEIGHT_BUCKET not in job.flat_overrides:
        _check_shared_memory(resolve_model(job.model))


def _check_shared_memory(model: str) -> None:
    """Refuse a machine whose shared memory is too small for the pieces in which weights go to vLLM on a CPU.

    The trainer would write beyond its end and be killed by SIGBUS. A user would then read that memory ran out, and that
    smaller batches help, which they do not.
    """
    try:
        there = shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        return
    needed = min(weight_bucket_mib(Path(model)) * 2**20, weight_bytes(model))
    # one without a limit has 0
    if 0 < there <= needed:
        raise ConfigError(
            f"{SHARED_MEMORY} holds {there / 1e6:.0f} MB, and the weights go to vLLM through it in pieces of "
            f"{needed / 1e6:.0f} MB: give it more (docker run --shm-size 1g; in Kubernetes a volume of medium Memory)"
        )


def cluster_address() -> str:
    """The address of the Ray cluster that several nodes need.

    Raises:
        ConfigError: the environment names none.
    """
    if address := os.environ.get("RAY_ADDRESS", ""):
        return address
    raise ConfigError(
        "nnodes > 1 needs a running Ray cluster: start it with `ray start` on each node and set RAY_ADDRESS",
        param="nnodes",
    )


def _gpus() -> int | None:
    """How many GPUs there are for this process; ``None``: that cannot be told without torch."""
    if any(Path(device).exists() for device in _OTHER_GPUS):
        return None
    gpus = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return min(gpus, sum(1 for name in visible.split(",") if name.strip() not in ("", "-1")))
