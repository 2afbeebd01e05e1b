"""Every GPU benchmark, in order of value, within a budget.

    python -m benchmarks.gpu_all --data cifar10.npz --out FOLDER [--budget 600] [--workers 16] [STEP …]

First everything is compiled, many programs at a time, so that later processes find it in the compilers' caches. Then
one benchmark runs after another, alone on the GPU, and writes its rows to FOLDER as it goes. A step that is unlikely to
fit into what is left of the budget is skipped, one that takes too long is ended, and one whose check fails has no row
for what failed; each is reported, and the exit status is 1 unless every step is complete.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cohort, methods, pfl, pfl_accuracy
from benchmarks.warm import Job, warm

COMPILING = 60.0
"""Seconds of one core that a program takes to compile, at most."""


@dataclass(frozen=True)
class Step:
    command: Job
    estimate: float
    """Seconds that it takes on an H200 once everything is compiled; without that much left it is not begun."""
    jobs: list[Job]
    """What compiles it ahead of time."""


def steps(data: Path, out: Path) -> dict[str, Step]:
    """By name, the most valuable first."""

    def step(name: str, estimate: float, jobs: list[Job], *arguments: str) -> Step:
        return Step([f"benchmarks.{name}", *arguments, "--json", str(out / f"{name}.json")], estimate, jobs)

    return {
        "pfl": step("pfl", 100, pfl.jobs(), "--rounds", "10", "--repeats", "2"),
        "pfl_accuracy": step(
            "pfl_accuracy", 90, pfl_accuracy.jobs(data, "tf32"), "--raw", "--data", str(data), "--precision", "tf32"
        ),
        "cohort": step("cohort", 150, cohort.jobs()),
        "methods": step("methods", 160, methods.jobs(), "--compile"),
        "convolutions": step("convolutions", 30, []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="by default all of them")
    parser.add_argument("--data", type=Path, default=Path("cifar10.npz"), help="what benchmarks.arrays made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--workers", type=int, default=16, help="programs to compile at a time; 0: none ahead")
    chosen = parser.parse_args()
    known = steps(chosen.data.resolve(), chosen.out.resolve())
    if unknown := set(chosen.steps) - set(known):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    began = time.monotonic()

    def left() -> float:
        return chosen.budget - (time.monotonic() - began)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    # What cannot fit need not be compiled.
    wanted, room = [], left()
    for name in chosen.steps or known:
        needs = known[name].estimate + COMPILING * len(known[name].jobs) / max(1, chosen.workers)
        if needs <= room:
            wanted.append(name)
            room -= needs
        else:
            say(f"{name}: skipped, it needs about {needs:.0f} s and the steps before it leave {room:.0f}")
    missing = set(chosen.steps or known) - set(wanted)
    jobs = [job for name in wanted for job in known[name].jobs]
    if jobs and chosen.workers:
        # Half the budget at most: a step that finds its code uncompiled still runs, only later.
        lost = warm(jobs, chosen.workers, seconds=left() / 2)
        say(f"compiled {len(jobs) - len(lost)} of {len(jobs)} programs ahead")
        for job in lost:
            say(f"not compiled ahead: {' '.join(job)}")
    for name in wanted:
        step = known[name]
        if left() < step.estimate:
            say(f"{name}: skipped, {left():.0f} s are left and it needs about {step.estimate:.0f}")
            missing.add(name)
            continue
        say(f"{name}: python -m {' '.join(step.command)}")
        try:
            limit = min(2 * step.estimate, left())
            done = subprocess.run([sys.executable, "-m", *step.command], timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            say(f"{name}: ended, it took too long; its file has the rows that were done")
            missing.add(name)
            continue
        if done.returncode:
            say(f"{name}: failed with {done.returncode}; its file has the rows before that")
            missing.add(name)
    say(f"not complete: {', '.join(sorted(missing))}" if missing else "everything is done")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
