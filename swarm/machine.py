"""What the machine gives this process: how many processors it may compute on, and whether one was killed for memory.

Written against Linux. A process may be bound to some processors (taskset, Slurm, ``--cpuset-cpus``), and its control
group may have the time of fewer (``docker run --cpus``, a limit of Kubernetes, ``CPUQuota`` of systemd); of version 1
of control groups only the former counts. ``/proc/vmstat`` counts the processes that the kernel killed because memory
ran out, those of a container's limit too: how many, not which.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

#: What to do where the trainer needs more memory than there is.
CURE = "make job.batch_size, max_prompt_length or max_response_length smaller, or give it more memory"
#: The same for a GPU's memory.
GPU_CURE = (
    "lower job.gpu_memory_utilization, or actor_rollout_ref.actor.ppo_max_token_len_per_gpu in job.overrides, or end "
    "what else uses the GPU (docs/gpus.md says what takes how much)"
)
_COUNTS = Path("/proc/vmstat")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = "/sys/fs/cgroup"


def oom_kills() -> int:
    """How many processes the kernel has killed for memory since it booted; 0 where it does not tell."""
    try:
        counts = dict(line.split() for line in _COUNTS.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def why_killed(before: int) -> str:
    """Why a process got a SIGKILL that nobody admits; ``before`` is :func:`oom_kills` of an earlier moment."""
    if oom_kills() > before:
        return f"memory ran out, and the kernel killed it: {CURE}"
    return f"if nobody killed it, memory ran out: {CURE}"


def processors() -> int:
    """At least 1; a part of one counts as one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # the quota is "max" where there is none
    with contextlib.suppress(OSError, ValueError):
        own = _OWN_GROUP.read_text().rpartition("::")[2].strip()
        quota, period = map(int, Path(f"{_GROUPS}{own}/cpu.max").read_text().split())
        count = min(count, math.ceil(quota / period))
    return count
