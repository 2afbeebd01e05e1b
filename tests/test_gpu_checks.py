"""The checks of `make gpu` are right where there is no GPU, and they notice an engine that is wrong."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch

import undrift as ud
from tests import cuda_graphs, field_reference
from tests.gpu import bits, draws, engines, gradients, runner
from tests.gpu.catalogue import GROUPS, collect
from tests.gpu.checks import Absent, Check, Finding, update_distance, within
from tests.gpu.cohorts import COHORTS, GIANT
from tests.gpu.real import RUNS, judged
from undrift.engine.graph import StepGraph

CHECKS = {check.key: check for check in collect()}
SOME = [
    "a  Scaffold, mini-batches",
    "a  FedDyn + FedNLR, schedules",
    "b  linear, float32, one step",
    "b  GRU, float32, a later segment is one longer",
    "b  convolution, strided, float64, steps grow by one",
    "b  attention, float32, FedCurv",
    "c  LeNet-5, 12 × 100, 14², 6 → 16, tf32",
    "c  LeNet-5, 12 × 100, 84 → 10, bfloat16",
    "c  LSTM, 12 × 100, 64 steps, 128, bfloat16",
    "c  gradient of lenet5, tf32",
    "g  Ditto",
    "g  Poisson + Median",
    "g  FedSAM, compiled",
    "k  noise, linear, float64",
    "k  Scaffold, which keeps state, convolution, float32, compiled",
]


@pytest.mark.parametrize("key", SOME)
def test_a_check_passes_on_the_cpu(key):
    found = CHECKS[key].run("cpu")
    assert found.status == "ok", found.says


def test_every_group_has_checks_and_nothing_of_the_reference_is_left_out():
    from tests.equations import cases

    counts = {group: sum(check.group == group for check in CHECKS.values()) for group in GROUPS}
    assert min(counts.values()) > 0 and counts["a"] == len(list(cases()))
    uncompiled = {key[3:] for key in CHECKS if key[0] == "g" and "compiled" not in key}
    assert {name for name in uncompiled if not name.startswith("a carry: ")} == field_reference.METHODS.keys()
    assert not any(check.full for check in CHECKS.values() if check.group in "abcegt" and "compiled" not in check.name
                   and "steps grow" not in check.name)  # fmt: skip
    compiled = [check.name for check in CHECKS.values() if "compiled" in check.name and not check.full]
    for what in (*engines.MODELS, *COHORTS, *engines.METHODS):
        assert any(what in name for name in compiled), what


@pytest.mark.parametrize("name", COHORTS)
def test_a_cohort_is_what_its_name_says(name):
    cohort = COHORTS[name]
    assert cohort.holds(cohort.lengths()), cohort.lengths()


def test_the_giant_is_larger_than_all_others_together():
    assert max(GIANT.sizes) > sum(GIANT.sizes) / 2


def test_draws_repeat_and_differ():
    first, again, other = (draws.draw(seed)[3] for seed in (1, 1, 2))
    assert first.sizes == again.sizes != other.sizes


@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_wrong_weights_are_noticed(monkeypatch, factor):
    train = ud.train

    def wrong(*args, engine, **settings):
        run = train(*args, engine=engine, **settings)
        if engine == "lanes":
            next(iter(run.params.values())).mul_(factor)
        return run

    monkeypatch.setattr(ud, "train", wrong)
    for key in ("a  FedAvg, mini-batches", "b  linear, float32, two lanes", "c  gradient of mlp, tf32", "g  Mime"):
        assert CHECKS[key].run("cpu").status == "FAIL", key


def test_nan_is_within_no_bound():
    assert within(math.nan, 1.0).status == within(math.inf, 1.0).status == "FAIL"
    assert gradients.worst({"output": 0.0, "input": math.nan, "weight": 0.1}, 1.0).status == "FAIL"
    still = {"w": torch.ones(2)}
    assert math.isnan(update_distance(still, still, still))  # two engines that do nothing do not agree
    figures = {"loss": 0.5, "accuracy": 0.9, "seconds": 1.0}
    assert judged(figures, figures, RUNS["lenet5"]).status == "ok"
    for wrong in ({"loss": 0.52}, {"loss": math.nan}, {"accuracy": 0.88}):
        assert judged(figures | wrong, figures, RUNS["lenet5"]).status == "FAIL"
    chance = {"loss": 2.3, "accuracy": 0.1, "seconds": 1.0}
    assert judged(chance, chance, RUNS["lenet5"]).status == "FAIL"


def test_steps_that_are_not_replayed_are_noticed(monkeypatch):
    cuda_graphs.put_in_place(monkeypatch)
    cohort = COHORTS["a later segment is longer"]
    assert engines.compare("linear", torch.float64, cohort, "cpu").status == "ok"
    run = StepGraph.run

    def skips_one(self, state, rest, batches):
        return run(self, state, rest, tuple(b[1:] if len(b) > 3 else b for b in batches))

    monkeypatch.setattr(StepGraph, "run", skips_one)
    found = engines.compare("linear", torch.float64, cohort, "cpu")
    assert found.status == "FAIL" and "replays" in found.says


def test_a_warm_up_on_live_state_is_noticed(monkeypatch):
    """What went wrong once: a segment longer than any before captured again, and warmed up on a client in training."""
    cuda_graphs.put_in_place(monkeypatch)
    run = StepGraph.run

    def warms_up(self, state, rest, batches):
        longest = getattr(self, "longest", len(batches[0]))
        self.longest = max(longest, len(batches[0]))
        state = run(self, state, rest, batches)
        if self.longest > longest:
            self.turn.zero_()
            self._once()
        return state

    monkeypatch.setattr(StepGraph, "run", warms_up)
    grow = ["a later segment is longer", "a later segment is one longer", "steps grow by one", "all lanes"]
    for name, status in {**dict.fromkeys(grow, "FAIL"), "two lanes": "ok"}.items():
        assert engines.compare("linear", torch.float64, COHORTS[name], "cpu").status == status, name


@pytest.mark.long
def test_bits_of_two_processes():
    assert bits.same("float32", False, "cpu").status == "ok"


def crash(device: str) -> Finding:
    print("noise that must not get between the replies")
    os._exit(3)


def absent(device: str) -> Finding:
    raise Absent("no data")


def hang(device: str) -> Finding:
    time.sleep(60)
    return within(0.0, 1.0)


def noise(device: str) -> Finding:
    print("noise")
    return within(0.0, 1.0)


def trouble() -> list[Check]:
    """What the runner must live with; its workers find it by name."""
    functions = {
        "crashes": (crash, 9), "is fine": (noise, 8), "is too much": (lambda device: within(2.0, 1.0), 7),
        "is no number": (lambda device: within(math.nan, 1.0), 6), "raises": (lambda device: 1 / 0, 5),
        "is absent": (absent, 4), "finds nothing": (lambda device: [], 3), "hangs": (hang, 0),
    }  # fmt: skip
    return [Check("z", name, run, seconds) for name, (run, seconds) in functions.items()]


def carry_out(capsys, names: list[str], limit: float = 60.0) -> tuple[bool, dict[str, str], str]:
    """Whether all passed; by check, its line; and the last line."""
    checks = [check for check in trouble() if check.name in names]
    passed = runner.run(checks, "tests.test_gpu_checks:trouble", "cpu", 1, limit)
    *lines, _, last = capsys.readouterr().out.strip().splitlines()
    return passed, {line[10:].split(":")[0]: line for line in lines}, last


def test_a_crash_costs_one_check_and_nothing_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(runner, "LONGEST", 3.0)
    names = [check.name for check in trouble()]
    passed, lines, last = carry_out(capsys, names)
    assert not passed and list(lines) == names and last == "1 passed, 5 failed, 2 absent"
    words = {"crashes": "status 3", "raises": "ZeroDivisionError", "is too much": "2.0e+00 > 1e+00", "hangs": "3 s",
             "is no number": "nan > 1e+00", "is absent": "no data", "finds nothing": "found nothing"}  # fmt: skip
    for name, word in words.items():
        assert word in lines[name] and not lines[name].startswith("ok"), lines[name]


def test_all_that_pass_is_a_success_and_what_is_not_run_is_none(capsys):
    passed, lines, last = carry_out(capsys, ["is fine"])
    assert passed and lines["is fine"].startswith("ok     z  is fine: 0.0e+00 ≤ 1e+00") and last == "1 passed, 0 failed"
    passed, lines, last = carry_out(capsys, ["is fine"], limit=0.0)
    assert not passed and lines["is fine"].startswith("absent") and last == "0 passed, 0 failed, 1 absent"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_never_ran_is_no_success(capsys, monkeypatch):
    monkeypatch.setattr(runner, "Worker", lambda source, device: (_ for _ in ()).throw(OSError))
    passed, lines, last = carry_out(capsys, ["is fine", "raises"])
    assert not passed and "never ran" in lines["raises"] and last == "0 passed, 0 failed, 2 absent"
