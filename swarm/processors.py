"""How many processors this process may compute on, of those that the machine has.

Written against Linux: a process may be bound to some (taskset, Slurm, ``--cpuset-cpus``), and its control group may
have the time of fewer (``docker run --cpus``, a limit of Kubernetes, ``CPUQuota`` of systemd). Of version 1 of control
groups only the former counts.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = "/sys/fs/cgroup"


def processors() -> int:
    """At least 1; a part of one counts as one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # the quota is "max" where there is none
    with contextlib.suppress(OSError, ValueError):
        own = _OWN_GROUP.read_text().rpartition("::")[2].strip()
        quota, period = map(int, Path(f"{_GROUPS}{own}/cpu.max").read_text().split())
        count = min(count, math.ceil(quota / period))
    return count
