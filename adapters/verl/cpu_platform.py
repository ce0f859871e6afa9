"""verl platform for machines without an accelerator; importing this module makes it the platform of the process.

The driver names it in ``VERL_USE_EXTERNAL_MODULES`` only for jobs that run on the CPU, so that every process of such a
run, and of no other, uses it. Detecting the absence of CUDA instead would be wrong: Ray hides the GPUs from actors that
did not ask for one.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

from adapters.verl.cpu import VLLM_THREADS

#: variables that the vLLM servers need; Ray actors may be started with a clean environment
VLLM_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` with the memory and random-state functions that verl expects of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(_zero)
    empty_cache = ipc_collect = reset_peak_memory_stats = reset_accumulated_memory_stats = staticmethod(_nothing)
    manual_seed = manual_seed_all = set_per_process_memory_fraction = set_device = staticmethod(_nothing)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_device_properties(*_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="cpu", total_memory=psutil.virtual_memory().total)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One CPU "device" per worker, gloo between them."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDeviceModule("swarm_cpu_device")
    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        # verl hands this to Tensor.to() and torch.device(), where an int would mean cuda:N
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        # a stand-in (`ray.init(num_gpus=1)`): Ray reports accelerator ids only for resources whose name it knows
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        variables = {name: os.environ[name] for name in VLLM_VARIABLES if name in os.environ}
        if VLLM_THREADS in os.environ:
            variables["OMP_NUM_THREADS"] = os.environ[VLLM_THREADS]
        return variables


set_platform(CpuPlatform())
