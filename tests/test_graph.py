"""What a GPU's graphs are made of, as far as it can be tried without one."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.engine import graph
from undrift.engine.graph import _cast_ahead, _mutating, _update_in_place


def test_a_step_changes_its_state_in_place():
    def program(w, v, g):
        return [torch.addcmul(w, v, g, value=-1), v * 2]

    w, v, g = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 0.25)
    step = _mutating(make_fx(program)(w, v, g), 2, compiled=False)
    for _ in range(2):
        step(w, v, g)
    assert w.tolist() == [1 - 0.5 - 1.0] * 3 and v.tolist() == [8.0] * 3


def traced(function) -> set[str]:
    """The operations of a step with two pieces of state, w and v, after weights are updated in place."""
    w, v, r, g = torch.ones(2, 2), torch.ones(2, 2), torch.ones(()), torch.ones(2, 2)
    program = make_fx(function)(w, v, r, g)
    _update_in_place(program, 2)
    return {str(node.target) for node in program.graph.nodes}


def test_a_weight_is_written_over_only_when_nobody_reads_it_later():
    def through_a_view(w, v, r, g):
        turned = w.t()
        return [torch.addcmul(w, r, g, value=-1), v + turned]

    assert "aten.addcmul_.default" in traced(lambda w, v, r, g: [torch.addcmul(w, r, g, value=-1), v + 1])
    for function in (
        lambda w, v, r, g: [torch.addcmul(w, r, g, value=-1), v + w],  # read afterwards
        through_a_view,
        lambda w, v, r, g: [torch.addcmul(g, r, w, value=-1), v + 1],  # of something else
    ):
        assert "aten.addcmul_.default" not in traced(function)


def test_more_than_eight_steps_can_be_compiled_in_one_process(monkeypatch):
    """torch gives up on a function after eight sets of shapes; every step is a function of its own."""
    compile = torch.compile
    monkeypatch.setattr(graph.torch, "compile", lambda f, options, **rest: compile(f, backend="eager", **rest))
    for n in range(1, 12):
        w, g = torch.ones(n), torch.full((n,), 0.25)
        step = _mutating(make_fx(lambda w, g: [w - g])(w, g), 1, compiled=True)
        step(w, g)
        assert w.tolist() == [0.75] * n


def test_weights_are_cast_where_they_are_written():
    def program(w, v, g):
        low = w.to(torch.bfloat16)
        return [w - (low * g.to(torch.bfloat16)).float(), v + low.sum()]

    def start():
        return torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)

    (w, v), g = start(), torch.full((3,), 0.3)
    plain = make_fx(program)(w, v, g)
    for _ in range(3):
        w, v = plain(w, v, g)
    ahead, (w1, v1) = make_fx(program)(*start(), g), start()
    assert _cast_ahead(ahead, 2) == [(0, torch.bfloat16)]
    step, low = _mutating(ahead, 3, compiled=False), w1.to(torch.bfloat16)
    for _ in range(3):
        step(w1, v1, low, g)
    assert torch.equal(w, w1) and torch.equal(v, v1) and torch.equal(low, w1.to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about things of its own
def test_compiled_state_that_moves_on_is_read_before_it_is_overwritten():
    """As carries do: the newest gradient takes the place of the one before, and that of the one before it."""

    def program(w, one, two, old, g):
        return [w - g - one - two, g.clone(), one.clone(), w.clone()]

    start = [torch.full((4, 4), float(i), dtype=torch.float64) for i in range(4)]
    step = _mutating(make_fx(program)(*start, torch.ones(4, 4, dtype=torch.float64)), 4, compiled=True)
    w, one, two, old = start
    for turn in range(1, 4):
        wanted = [w - turn - one - two, torch.full_like(w, turn), one.clone(), w.clone()]
        step(w, one, two, old, torch.full_like(w, turn))
        for found, value in zip((w, one, two, old), wanted, strict=True):
            assert torch.equal(found, value)
