"""Runs in several processes, as torchrun starts them: what one process trains, and the same bits each time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.problems import net, same_bits
from tests.processes import EXPERIMENTS, SHORT, START, kept, left, together
from undrift.engine.ranked import shares
from undrift.files import unseal

NAMES = list(EXPERIMENTS)


def apart(found: dict, wanted: dict, start: dict) -> float:
    """The distance of two runs' weights, relative to the length of the update."""
    flat = [torch.cat([tree[n].double().flatten() for n in wanted]) for tree in (found, wanted, start)]
    return float((flat[0] - flat[1]).norm() / (flat[1] - flat[2]).norm())


def alike(found: object, wanted: object) -> bool:
    """Whether rows of histories agree: whole numbers and words exactly, others to 1e-9 (1e-4 of floats)."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return all(alike(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    if isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-9) or (math.isnan(found) and math.isnan(wanted))
    return found == wanted


def check(name: str, found: list[dict], wanted: dict) -> None:
    first, *others = found
    for other in others:
        assert same_bits(first["params"], other["params"]), f"{name}: processes differ"
        assert alike(other["history"], first["history"])
    bound = 1e-5 if "float32" in name else 1e-10
    if wanted["stopped"] is None:
        start = {n: w.to(wanted["params"][n].dtype) for n, w in START[name].items() if n in wanted["params"]}
        assert apart(first["params"], wanted["params"], start) < bound, name
    assert first["stopped"] == wanted["stopped"]
    for mine, theirs in zip(first["history"], wanted["history"], strict=True):
        told = {n for n in theirs if n != "switched"}
        assert mine.keys() == theirs.keys(), name
        assert all(alike(mine[n], theirs[n]) for n in told), (name, mine, theirs)
    assert first["choices"]["processes"] == len(found)


def test_two_processes_train_what_one_does_and_one_resumes_what_they_leave(tmp_path):
    found, said = together(tmp_path, [*SHORT, "refused", "kept"], 2, UNDRIFT_DIES="1")
    assert found.keys() == {*SHORT, "refused"}, said[-8000:]
    check_refusals(*found["refused"])
    for name in SHORT:
        check(name, found[name], left(EXPERIMENTS[name]()))
    assert (
        "LostError: Another process of this run has ended" in said and "Resume the run from its last checkpoint" in said
    )
    known = unseal(tmp_path / "run" / "run.json")
    assert known["started"]["processes"] == 2 and "processes" not in known["identity"]
    whole, again = left(kept(tmp_path / "whole")), left(kept(tmp_path / "run"))
    assert apart(again["params"], whole["params"], net().state_dict()) < 1e-10
    assert alike(again["history"], whole["history"]) and "processes" not in again["choices"]
    (resumed,) = unseal(tmp_path / "run" / "run.json")["resumed"]
    assert resumed["after_round"] == 3 and "processes" not in resumed


def check_refusals(first: list[str], second: list[str]) -> None:
    """Both processes end in the same error, and go on to the next run."""
    wanted = [
        "UndriftError: The processes that torchrun started differ in their weights. Call torch.manual_seed",
        "UndriftError: The processes that torchrun started differ in rounds; call ud.train with the same",
        "UndriftError: FailsThere.update failed",
        "UndriftError: participation asks for 1000000 clients",
        "UndriftError: ",
        "UndriftError: Under torchrun one run must end before the next begins",
        "KeyError: 'nothing'",
        "UndriftError: undrift would not train this model as PyTorch does: '",
        "UndriftError: undrift would not train this model as PyTorch does: '",
        "nothing",
    ]
    for one, other, begins in zip(first, second, wanted, strict=True):
        if begins.startswith("UndriftError"):
            assert one == other and one.startswith(begins), (one, other)
    assert "Choose a new or an empty folder" in first[4]
    assert first[-1].startswith("UndriftError: The state of client 1 is in process 1") and second[-1] == "nothing"
    assert first[-4] == "KeyError: 'nothing'" and second[-4] == "RuntimeError: 'nothing'"


@pytest.mark.long
@pytest.mark.parametrize("processes", [(2,), (3,), (2, 1)])
def test_so_do_more_on_one_machine_and_on_two_and_they_give_the_same_bits_again(processes, tmp_path):
    (found, said), (again, _) = (together(tmp_path / str(i), NAMES, *processes) for i in range(2))
    assert found.keys() == again.keys() == set(NAMES), said[-8000:]
    for name in NAMES:
        check(name, found[name], left(EXPERIMENTS[name]()))
        assert same_bits(found[name][0]["params"], again[name][0]["params"])
        assert repr(found[name][0]["history"]) == repr(again[name][0]["history"])


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [((2,), (3,)), ((3,), (2,)), ((1, 2), (2,)), ((2,), (1, 1))])
def test_a_run_that_lost_a_process_goes_on_with_any_number(before, after, tmp_path):
    died, said = together(tmp_path, ["kept"], *before, UNDRIFT_DIES=str(sum(before) - 1))
    assert not died and "Another process of this run has ended" in said, said[-8000:]
    found, said = together(tmp_path, ["kept"], *after)
    assert "kept" in found, said[-8000:]
    whole = left(kept(tmp_path / "whole"))
    for one in found["kept"]:
        assert apart(one["params"], whole["params"], net().state_dict()) < 1e-10
        assert alike(one["history"], whole["history"])
    assert apart(left(kept(tmp_path / "run"))["params"], whole["params"], net().state_dict()) < 1e-10  # finished


def test_shares_are_all_clients_once_and_balanced():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, size, width = rng.integers(1, 40), rng.integers(1, 6), rng.integers(1, 5)
        clients, work = np.sort(rng.choice(1000, n, replace=False)), rng.integers(1, 30, n)
        for owned in (False, True):
            found = shares(clients, work, size, width, owned)
            assert sorted(np.concatenate(found).tolist()) == list(range(n)) and len(found) == size
            assert all((np.diff(own) > 0).all() for own in found)
            if owned:
                assert all((clients[own] % size == rank).all() for rank, own in enumerate(found))
        if width == 1 and not owned:
            loads = [work[own].sum() for own in found]
            assert max(loads) - min(loads) <= work.max()
    passes = shares(np.arange(10), np.zeros(10, np.int64), 3, 2, owned=False)
    assert [len(own) for own in passes] == [4, 3, 3]
