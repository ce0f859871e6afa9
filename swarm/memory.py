"""Whether a process was killed for memory, in words for people.

Written against Linux: ``/proc/vmstat`` counts the processes that the kernel killed because memory ran out, those of a
container's limit too. It tells how many, not which.
"""

from __future__ import annotations

from pathlib import Path

#: What to do where the trainer needs more memory than there is.
CURE = "make job.batch_size, max_prompt_length or max_response_length smaller, or give it more memory"
#: The same for a GPU's memory.
GPU_CURE = (
    "lower job.gpu_memory_utilization, or actor_rollout_ref.actor.ppo_max_token_len_per_gpu in job.overrides, or end "
    "what else uses the GPU (docs/gpus.md says what takes how much)"
)
_COUNTS = Path("/proc/vmstat")


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
