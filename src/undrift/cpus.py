"""How many CPUs this process may use, which may be fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables by which users set torch's number of CPU threads."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The CPU time that a container may use and the period that it is of, in microseconds, on Linux."""
OLDER_QUOTA = [Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]


def usable_cpus() -> int:
    """Return the number of CPUs that the process may use: those of its affinity, and of its container's quota."""
    limits = [os.cpu_count() or 1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else math.inf]
    return max(1, math.ceil(min(*limits, quota())))


def quota() -> float:
    """Return the quota of CPU time of the process's container, in CPUs; infinity if there is none."""
    for files in ([QUOTA], OLDER_QUOTA):
        try:
            time, period = map(float, " ".join(file.read_text(encoding="utf-8") for file in files).split())
        except (OSError, ValueError):  # "max" instead of a number, or a system without such files
            continue
        if time > 0 and period > 0:  # an older file says -1 if there is none
            return time / period
    return math.inf
