"""Whole rounds through captured graphs, with a stand-in for CUDA's: the plain engine's results, for every cohort."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undrift as ud
from tests import cuda_graphs
from tests.carries import CARRIES
from tests.parts import METHOD
from tests.problems import distance, make_clients, net
from undrift.engine import graph
from undrift.engine.graph import StepGraph
from undrift.engine.packing import pack, segments

Table = tuple[tuple[int, ...], ...]


@pytest.fixture
def graphs(monkeypatch) -> list[cuda_graphs.Graph]:
    return cuda_graphs.put_in_place(monkeypatch)


@dataclass(frozen=True)
class Steps(ud.Part):
    """Step counts by round and client."""

    table: Table

    def plan(self, plan, state, server):
        return replace(plan, steps=np.array(self.table[plan.round])[plan.clients]), state


Sizes = tuple[int, ...]


@functools.cache
def by_the_plain_engine(sizes: Sizes, method: ud.Part | ud.Method, local: ud.Local, rounds: int):
    """What every number of lanes, compiled or not, is compared with."""
    arguments = {"rounds": rounds, "local": local, "device": "cpu", "evaluate_every": rounds}
    return ud.train(net(), make_clients(list(sizes)), method, engine="plain", **arguments).params


def compare(
    sizes: Sizes, method: ud.Part | ud.Method, local: ud.Local, rounds: int, lanes: int, compile: bool = False
) -> None:
    """Lanes against plain, relative to the update."""
    plain = by_the_plain_engine(sizes, method, local, rounds)
    arguments = {"rounds": rounds, "local": local, "device": "cpu", "evaluate_every": rounds, "rehearse": False}
    data = make_clients(list(sizes))
    found = ud.train(net(), data, method, engine="lanes", lanes=lanes, compile=compile, **arguments)
    assert found.choices["engine"] == "lanes" and found.choices["compile"] == compile
    start = dict(net().named_parameters())
    moves = [{name: w - start[name].detach() for name, w in params.items()} for params in (found.params, plain)]
    assert distance(*moves) < 1e-12


def compare_steps(table: Table, lanes: int, compile: bool = False) -> None:
    local = ud.Local(steps=1, batch_size=4, lr=0.05, momentum=0.9)
    compare((9, 4, 13, 1, 6, 11)[: len(table[0])], Steps(table), local, len(table), lanes, compile)


TABLES = {
    "one step": ((1, 1, 1),),
    "a later segment is longer": ((2, 3, 9, 9),),
    "a later segment is longer by one": ((2, 5, 5, 5),),
    "steps grow by one from round to round": ((1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)),
    "steps grow": ((1, 2, 1), (5, 9, 2), (20, 3, 7)),
    "steps shrink": ((20, 3, 7), (5, 9, 2), (1, 2, 1)),
    "one client has more than all others": ((2, 40, 3, 1, 4),),
    "longer than the buffers": ((2, 70, 3), (140, 64, 65)),
}


COMPILED = ("one step", "a later segment is longer by one", "longer than the buffers")
"""Those whose rounds are compiled in `make test`: the compiler sees one step, whatever the lengths of segments."""

UNEVEN = (23, 5, 0, 41, 10, 17, 1)


def lengths(table: Table, lanes: int) -> list[int]:
    """The lengths of all segments of steps between changes of client, in order."""
    rows = [np.array(row) for row in table]
    return [len(segment.steps) for row in rows for segment in segments(row, pack(row, min(lanes, len(row))))]


def test_the_tables_are_what_they_are_called():
    assert lengths(TABLES["one step"], 3) == [1]
    assert lengths(TABLES["a later segment is longer"], 4) == [2, 1, 6]
    assert lengths(TABLES["a later segment is longer by one"], 4) == [2, 3]
    assert lengths(TABLES["steps grow by one from round to round"], 3) == [1, 2, 3, 4]
    grown = lengths(TABLES["steps grow"], 2)
    assert max(grown[1:]) > grown[0]
    assert max(lengths(TABLES["longer than the buffers"], 3)) > graph.PIECE_STEPS


def tables():
    """With a lane for every client, and with fewer: one of three numbers in `make test`, all of them in `make soak`."""
    for turn, name in enumerate(TABLES):
        for lanes in (1, 2, 3, 6):
            yield pytest.param(name, lanes, marks=[pytest.mark.long] * (lanes not in (6, 1 + turn % 3)))


@pytest.mark.parametrize(("name", "lanes"), list(tables()))
def test_rounds_through_graphs_are_the_plain_engines(graphs, name, lanes):
    compare_steps(TABLES[name], lanes)
    assert len(graphs) == 1 and graphs[0].replays == sum(lengths(TABLES[name], lanes))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about things of its own
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n not in COMPILED)) for n in TABLES])
def test_compiled_rounds_are_the_plain_engines(graphs, name):
    compare_steps(TABLES[name], 3, compile=True)


HOOKS = {
    "every hook": METHOD,
    "Scaffold": ud.Scaffold(),
    "FedDyn + FedNLR": ud.FedDyn(0.1) + ud.FedNLR(),
    "FedCurv": ud.FedCurv(0.5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "compile"),
    [
        *((name, False) for name in HOOKS),
        *(pytest.param(name, True, marks=[pytest.mark.long] * (name != "every hook")) for name in HOOKS),
    ],
)
def test_every_hook_goes_through_graphs(graphs, name, compile):
    """A lane per client: segments of 2, 2, 2 and 6 steps, so the last outgrows those before, in mid-training."""
    compare(UNEVEN, HOOKS[name], ud.Local(epochs=2, batch_size=8, lr=0.05), 2, 6, compile)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("lanes", "compile"), [(6, False), (2, False), (1, False), (6, True)])
@pytest.mark.parametrize("method", CARRIES, ids=lambda part: type(part).__name__)
def test_carries_that_hand_on_tensors_go_through_graphs(graphs, method, lanes, compile):
    compare(UNEVEN, method, ud.Local(epochs=2, batch_size=8, lr=0.05), 2, lanes, compile)


@settings(max_examples=15, deadline=None)
@given(
    table=st.integers(1, 5).flatmap(
        lambda clients: st.lists(st.tuples(*[st.integers(1, 12)] * clients), min_size=1, max_size=3).map(tuple)
    ),
    lanes=st.integers(1, 5),
    piece=st.integers(1, 6),
)
def test_any_step_counts_go_through_graphs(table, lanes, piece):
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda_graphs.put_in_place(monkeypatch)
        monkeypatch.setattr(graph, "PIECE_STEPS", piece)
        compare_steps(table, lanes)


def doubling(state: torch.Tensor, rest: torch.Tensor, batch: torch.Tensor) -> StepGraph:
    return StepGraph(lambda s, r, b: [2 * s + r + b], [state], [rest], (batch,))


def test_building_and_running_leave_live_state_alone(graphs):
    """What one segment returned is the next one's state; a graph built meanwhile does not touch it."""
    rest, batch = torch.ones(()), torch.ones(2)
    one = doubling(torch.zeros(()), rest, batch)
    live = one.run([torch.zeros(())], [rest], (batch,))
    assert live[0].item() == 6  # 0 → 2 → 6
    other = doubling(live[0], rest, torch.ones(9))
    assert live[0].item() == 6
    assert one.run(live, [rest], (torch.ones(1),))[0].item() == 14
    assert other.run([torch.zeros(())], [rest], (torch.ones(3),))[0].item() == 14 and live[0].item() == 14


def test_batches_that_are_large_have_small_buffers(graphs, monkeypatch):
    monkeypatch.setattr(graph, "PIECE_BYTES", 10)
    wide = doubling(torch.zeros(()), torch.zeros(()), torch.ones(5))
    assert len(wide.batches[0]) == 2
    assert wide.run([torch.zeros(())], [torch.zeros(())], (torch.arange(5.0),))[0].item() == 26


def test_the_stand_in_sees_a_buffer_that_was_replaced(graphs):
    """As a CUDA graph does not: it keeps to the memory that it was captured with."""
    step = doubling(torch.zeros(()), torch.zeros(()), torch.ones(3))
    step.batches = [torch.zeros(3)]
    assert step.run([torch.zeros(())], [torch.zeros(())], (torch.ones(3),))[0].item() != 7


def test_the_stand_in_runs_nothing_while_capturing(graphs):
    captured, x = cuda_graphs.Graph(), torch.zeros(2)
    with cuda_graphs.Capture(captured):
        y = x + 1
        x.add_(y)
    assert x.tolist() == [0, 0] and y.isnan().all()
    captured.replay()
    assert y.tolist() == [1, 1] and x.tolist() == [1, 1]
    with cuda_graphs.Capture(captured), pytest.raises(RuntimeError, match="not permitted"):
        x.sum().item()


def test_steps_run_with_the_runs_device_current(graphs):
    """With device="cuda:1", capturing and launching on cuda:0 would fail, or worse, run there."""
    compare_steps(TABLES["steps grow"], 2)
    assert graphs[0].devices == {torch.device("cpu")}
    assert cuda_graphs.DEVICES == [torch.device("cuda:0")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("factor", [2.0, float("nan")])
@pytest.mark.parametrize("broken", ["step", "conclude"])
def test_what_the_compiler_gets_wrong_is_not_used(monkeypatch, caplog, broken, factor):
    """A compiler that spoils a result of one of two programs: the run says so, and its result is right."""
    graphs = cuda_graphs.put_in_place(monkeypatch)

    def wrong(function, options, fullgraph=False, **rest):
        def made(*leaves):
            if fullgraph:  # a step, which changes its first arguments in place
                before = leaves[0].clone()
                function(*leaves)
                leaves[0].copy_(factor * before - leaves[0] if broken == "step" else leaves[0])
                return None
            found = function(*leaves)
            return [factor * found[0], *found[1:]] if broken == "conclude" else found

        return made

    monkeypatch.setattr(torch, "compile", wrong)
    compare(UNEVEN, ud.FedAvg(), ud.Local(epochs=2, batch_size=8, lr=0.05), 2, 6, compile=True)
    warnings = [record.getMessage() for record in caplog.records if "compiler made a program" in record.getMessage()]
    assert len(warnings) == len({*warnings}) >= 1 and len(graphs) == (2 if broken == "step" else 1)
