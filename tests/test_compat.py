"""The suite of foreign models: a subset runs here, it notices what is wrong, and its table is that of its results."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import undrift as ud
from tests import reference
from tests.compat import hand, pool, results, trial
from tests.compat.case import GROUPS, Case, Made
from tests.compat.cases import collect
from tests.compat.samples import vectors

CASES = {case.name: case for case in collect()}
QUICK = [case for case in CASES.values() if case.quick]
FAULTS = {f"S{i}" for i in range(1, 12)} | {f"M{i}" for i in range(1, 10)} | {"MT", "MR"}
"""The faults of two reviews: silently wrong numbers, and tracebacks (MT) and refusals (MR) of what torch trains."""


@pytest.fixture(autouse=True)
def generators():
    """Cases seed the global generators; other tests find them as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def quick():
    for case in QUICK:
        yield pytest.param(case, id=case.name)


@pytest.mark.filterwarnings("ignore")  # older forms of modules
@pytest.mark.parametrize("case", list(quick()))
def test_a_model_trains_right_or_is_refused_as_it_must(case):
    found = trial.carry_out(case)
    assert not found.problems, found.detail


def test_there_are_enough_cases_and_every_fault_has_one():
    assert len(CASES) >= 150 and sum(case.by_hand for case in CASES.values()) >= 60
    for chosen in (CASES.values(), QUICK):
        assert {fault for case in chosen for fault in case.review} == FAULTS
        assert {case.group for case in chosen} | {"vision", "language"} == set(GROUPS)
    assert not [case.name for case in QUICK if case.needs]
    assert all(case.note for case in CASES.values() if case.refused)


# What the suite must notice.
def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


PLAIN = Case(group="odd", name="small", build=small, samples=vectors(8))


def altered(change):
    """`ud.train` with a fault."""
    train = ud.train

    def wrong(module, *args, engine, **options):
        result = train(module, *args, engine=engine, **options)
        change(module, result, engine, options)
        return result

    return wrong


def off(engine):
    """Weights that are off by twice the bound, for one engine or for all."""

    def change(module, result, asked, options):
        if engine in (asked, "all"):
            with torch.no_grad():
                next(result.model.parameters()).flatten()[0] += 2e-8

    return change


def unlike(module, result, asked, options):
    with torch.no_grad():
        next(result.model.parameters()).flatten()[0] += 1e-12 * random.random()


def touching(module, result, asked, options):
    next(module.parameters()).data.flatten()[0] += 1


def unlearned(module, result, asked, options):
    layer = result.model[0]
    values = layer._parameters.pop("weight").detach()
    layer.weight = nn.Parameter(values, requires_grad=False)


def says_otherwise(module, result, asked, options):
    result.history[-1]["loss"] = 0.5


FOUND = {
    "auto: result.model has other parameters than the module": unlearned,
    "plain: the history's loss is 0.5, that of result.model 1.265": says_otherwise,
    "lanes and plain differ by 2.0e-08": off("lanes"),
    "plain differs from the hand loop by 2.0e-08": off("plain"),
    "auto differs from the hand loop by 2.0e-08": off("all"),
    "two runs with one seed differ": unlike,
    "lanes changes the caller's module (0.weight)": touching,
    "auto changes the caller's module (the mode of the module, the mode of 0, the mode of 1)": (
        lambda module, result, asked, options: module.eval()
    ),
}


@pytest.mark.parametrize("problem", FOUND)
def test_a_wrong_run_is_noticed(monkeypatch, problem):
    monkeypatch.setattr(ud, "train", altered(FOUND[problem]))
    found = trial.carry_out(PLAIN)
    assert found.outcome == "wrong" and problem in found.problems


def test_a_right_run_has_its_figures():
    found = trial.carry_out(PLAIN)
    assert found.outcome == "lanes" and found.lanes == 3 and found.repeats and not found.problems
    assert 0 <= found.lanes_plain < 1e-14 and 0 < found.hand < 1e-14 and found.moved > 1e-3 and found.bound == 1e-8


def test_what_does_not_train_or_draw_is_noticed():
    still = dataclasses.replace(PLAIN, local={"lr": 1e-12})
    assert "hardly trains" in trial.carry_out(still).problems[0]
    found = trial.carry_out(dataclasses.replace(PLAIN, draws=True))
    assert found.problems == ["nothing was drawn: two seeds agree on full batches"] and found.hand is None


def test_refusals_and_tracebacks_are_told_apart():
    sizes = dataclasses.replace(PLAIN, samples=vectors(9))
    found = trial.carry_out(sizes)
    assert found.outcome == "refused" and found.problems[0].startswith("should not be refused: The model does not take")
    assert not trial.carry_out(dataclasses.replace(sizes, refused="does not take the clients' samples")).problems
    other = trial.carry_out(dataclasses.replace(sizes, refused="something else"))
    assert other.problems == ["refused without 'something else'"]
    assert trial.carry_out(dataclasses.replace(PLAIN, refused="whatever")).problems == ["should be refused"]
    unknown = trial.carry_out(dataclasses.replace(PLAIN, options={"nonsense": 1}))
    assert unknown.outcome == "traceback" and "auto: TypeError" in unknown.problems[0]
    broken = trial.carry_out(dataclasses.replace(PLAIN, build=lambda: 1 / 0))
    assert broken.outcome == "traceback" and broken.problems[0].startswith("cannot be built: ZeroDivisionError")


def test_what_auto_refuses_and_plain_trains_is_a_problem(monkeypatch):
    train = ud.train

    def refuses(*args, engine, **options):
        if engine != "plain":
            raise ud.UndriftError("no")
        return train(*args, engine=engine, **options)

    monkeypatch.setattr(ud, "train", refuses)
    found = trial.carry_out(PLAIN)
    assert found.outcome == "refused" and "plain trains what auto refuses" in found.problems


def test_the_hand_written_loop_is_the_reference_of_the_equations():
    """Two implementations that share nothing but the batches."""
    case = dataclasses.replace(PLAIN, local={"momentum": 0.9, "weight_decay": 0.1, "lr": 0.3})
    wanted = reference.simulate(case.module(), case.data(), case.work(), [[0, 1, 2]] * 2, [], seed=0)
    assert trial.apart(hand.simulate(case), wanted) < 1e-14


def test_the_hand_written_loop_averages_what_training_changes():
    def forward(m, x):
        if m.training:
            m.count += len(x)
            m.largest.copy_(x.max())
        return m.net(x)

    def build():
        return Made(
            forward, net=small(), count=torch.zeros((), dtype=torch.int64), largest=torch.zeros(()), fixed=torch.ones(2)
        )

    case = dataclasses.replace(PLAIN, build=build)
    data, local, state = case.data(), case.work(), {"count": 0.0, "largest": 0.0}
    for t in range(2):
        ends = []
        for i in range(3):
            batches = ud.batches(data, local, client=i, round=t, seed=0)
            ends.append((state["count"] + sum(map(len, batches)), float(data[i][0][batches[-1]].max())))
        weights = [size / sum(data.sizes) for size in data.sizes]
        counts, largest = (
            sum(w * e for w, e in zip(weights, column, strict=True)) for column in zip(*ends, strict=True)
        )
        state = {"count": float(round(counts)), "largest": largest}
    found = hand.simulate(case)
    assert float(found["count"]) == state["count"] and float(found["largest"]) == pytest.approx(state["largest"])
    assert torch.equal(found["fixed"], torch.ones(2).double())


# Worker processes.
def crash() -> nn.Module:
    print("noise that must not get between the answers")
    os._exit(3)


def hang() -> nn.Module:
    time.sleep(60)
    raise AssertionError


def noise() -> nn.Module:
    print("noise")
    return small()


def trouble() -> list[Case]:
    """What the pool must live with; its workers find it by name."""
    builds = {"is fine": noise, "hangs": hang, "crashes": crash}
    return [dataclasses.replace(PLAIN, name=name, build=build) for name, build in builds.items()]


def test_a_crash_or_a_hang_costs_one_case(monkeypatch):
    monkeypatch.setattr(pool, "LONGEST", 10.0)
    reported = []
    pool.run(trouble(), "tests.test_compat:trouble", 1, lambda case, found: reported.append((case.name, found)))
    assert [name for name, _ in reported] == ["is fine", "hangs", "crashes"]
    found = dict(reported)
    assert found["crashes"].problems == ["the process ended"] and "noise" in found["crashes"].detail
    assert found["hangs"].outcome == "traceback" and found["hangs"].problems == ["did not end within 10 s"]
    assert not found["is fine"].problems and found["is fine"].outcome == "lanes"


# The results and their table.
def stored():
    return json.loads(results.FILE.read_text(encoding="utf-8"))


def test_the_results_are_of_all_cases_there_are():
    assert [case["name"] for case in stored()["cases"]] == list(CASES), "run make compat"


def test_the_table_in_the_documentation_is_that_of_the_results(tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text(results.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    results.write_table(copy, stored())
    assert copy.read_text(encoding="utf-8") == results.PAGE.read_text(encoding="utf-8"), (
        "python -m tests.compat --table"
    )


def test_a_changed_figure_changes_the_table():
    found = stored()
    before = results.table(found)
    found["cases"][0]["hand"] = 0.25
    after = results.table(found)
    assert after != before and "| 2e-01 |" in after
    found["cases"][0] |= {"outcome": "wrong", "problems": ["differs | by __a__ <lot*"]}
    assert "train wrongly" in results.table(found) and r"differs ∣ by \_\_a\_\_ &lt;lot\*" in results.table(found)


def test_the_results_have_no_paths_of_the_machine_that_made_them():
    packages = "/home/me/.venv/lib/python3.11/site-packages"
    text = f"failed ({packages}/timm/layers.py:3) in {results.ROOT}/tests/compat/cases/odd.py, {json.__file__}"
    assert results.portable(text) == "failed (timm/layers.py:3) in tests/compat/cases/odd.py, json/__init__.py"
    held = results.FILE.read_text(encoding="utf-8") + results.PAGE.read_text(encoding="utf-8")
    assert "site-packages" not in held and str(results.ROOT) not in held


def test_a_cases_entry_has_what_the_table_shows():
    entry = results.entry(PLAIN, trial.Finding("lanes", "busy", 3, 1.23e-9, float("inf"), seconds=1.0))
    assert entry["lanes_plain"] == 1.2e-9 and entry["hand"] == "inf" and json.dumps(entry, allow_nan=False)
    assert results.row(entry) == "| small | lanes\u00a0×\u00a03 | 1e-09 | inf |  |"
    entry["outcome"] = "plain"
    assert results.row(entry) == "| small | plain | 1e-09 | inf | busy |"
