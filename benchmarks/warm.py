"""Compile ahead of time: many programs at once, each in a process of its own, before anything is timed.

A compiled step takes about half a minute of one core. Inductor and Triton keep what they compile on disk, so a process
that comes later finds it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

Job = list[str]
"""A module and its arguments: one that trains a round with compile=True, and prints no figures."""


def warm(jobs: Sequence[Job], at_once: int, seconds: float = 600.0) -> list[Job]:
    """Run the jobs, `at_once` at a time. Returns those that failed or were not done after so many seconds."""
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # the jobs share the cores
    end, waiting, running, lost = time.monotonic() + seconds, list(jobs), [], []
    while (waiting and time.monotonic() < end) or running:
        while waiting and len(running) < at_once and time.monotonic() < end:
            job = waiting.pop(0)
            running.append((job, subprocess.Popen([sys.executable, "-m", *job], env=env, stdout=subprocess.DEVNULL)))
        time.sleep(0.05)
        late = time.monotonic() >= end
        for job, process in list(running):
            if late and process.poll() is None:
                process.kill()
                process.wait()
            if process.poll() is not None:
                running.remove((job, process))
                lost += [job] if process.returncode else []
    return lost + waiting
