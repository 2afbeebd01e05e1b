"""How many CPUs a process uses: those of its affinity and its container's quota, unless the user says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.experiments import GOOD
from undrift import cpus
from undrift.errors import UndriftError
from undrift.tools import parallel, sweep


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 64 CPUs without limits, on which nobody has set a number of threads."""
    for name in cpus.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cpus, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cpus, "OLDER_QUOTA", [tmp_path / "quota", tmp_path / "period"])
    return tmp_path


def test_cpus_that_a_process_may_use(machine, monkeypatch):
    assert cpus.usable_cpus() == 64
    for text, count in (("max 100000\n", 64), ("250000 100000\n", 3), ("1000 100000\n", 1), ("", 64)):
        (machine / "cpu.max").write_text(text)
        assert cpus.usable_cpus() == count
    (machine / "quota").write_text("-1\n")
    (machine / "period").write_text("100000\n")
    assert cpus.usable_cpus() == 64
    (machine / "quota").write_text("400000\n")
    assert cpus.usable_cpus() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 9})
    assert cpus.usable_cpus() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cpus.usable_cpus() == 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_the_affinity_counts():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpus.usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


def given(how: parallel.Parallel, out: Path, monkeypatch) -> tuple[int, int | None]:
    """How many processes eight runs have, and how many threads each is to have."""
    seen = []

    def finished(tasks, places):
        seen.append((len(places), *{run[3] for (runs,) in tasks.values() for run in runs}))
        return iter(())

    monkeypatch.setattr(parallel, "_train_bundles", finished)
    points = sweep.grid_points(GOOD, {"seed": list(range(8))}, "test")
    parallel.run_points(points, out, "test", how, lambda point, message: None)
    return seen[0]


def test_a_sweep_uses_the_cpus_that_it_may(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert given(parallel.Parallel(), tmp_path / "s", monkeypatch) == (4, 1)
    assert given(parallel.Parallel(workers=2), tmp_path / "s", monkeypatch) == (2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert given(parallel.Parallel(), tmp_path / "s", monkeypatch) == (4, None)
    assert given(parallel.Parallel(workers=1), tmp_path / "s", monkeypatch) == (1, None)


@pytest.mark.parametrize("name", cpus.THREADS)
def test_a_sweep_of_one_process_has_the_threads_that_the_environment_says(machine, monkeypatch, tmp_path, name):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setenv(name, "3")
    torch.set_num_threads(3)  # as torch does when it is loaded

    def run(*_, **__):
        seen.append(torch.get_num_threads())
        raise UndriftError("of this test")

    monkeypatch.setattr(parallel, "run", run)
    try:
        parallel.run_points(
            sweep.grid_points(GOOD, {"seed": [0]}, "test"),
            tmp_path,
            "test",
            parallel.Parallel(workers=1),
            lambda *_: None,
        )
    finally:
        torch.set_num_threads(before)
    assert seen == [3]
