"""Copies of the caller's module: what they share with it, and what they cost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import undrift as ud
from tests.handloop import everything, own_loop
from tests.problems import distance, make_clients, same_bits

LOCAL = ud.Local(epochs=2, batch_size=4, lr=0.1)
UNEVEN = [10, 7, 4, 1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def made(kind: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def trained(model, **options):
    return ud.train(model, make_clients(UNEVEN), **{"rounds": 2, "local": LOCAL, **options})


# ---- functions that make the model ---------------------------------------------------------------------------------


class Sharing(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 4).double()

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def test_a_function_that_returns_the_same_module_is_refused_and_its_module_stays():
    net, body = made(Net), nn.Linear(6, 8).double()
    frozen = copy.deepcopy(body).requires_grad_(False)
    turns = [made(Net), made(Net)]
    before = copy.deepcopy([everything(x) for x in (net, body, frozen)])
    for function, words in (
        (lambda: net, "returns the same one"),
        (lambda: Sharing(body), "'body.weight' is the same in several"),
        (lambda: Sharing(frozen), "'body.weight' is the same in several"),
        (lambda: turns.append(turns.pop(0)) or turns[-1], "returns the same one"),
    ):
        with pytest.raises(ud.UndriftError, match="must make another module, with weights of its own, at every") as e:
            trained(function)
        assert words in str(e.value) and "cannot be copied" not in str(e.value)
    after = [everything(x) for x in (net, body, frozen)]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))
    assert "__deepcopy__" not in vars(net) and copy.deepcopy(net) is not net
    assert distance(everything(trained(net).model), own_loop(made(Net), make_clients(UNEVEN), LOCAL, 2)) < 1e-12


def test_a_function_may_give_its_modules_one_constant():
    table = torch.ones(4).double()

    class Offset(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", table)

        def forward(self, x):
            return super().forward(x) + self.table

    place = table.data_ptr()
    found = trained(Offset).model
    assert table.data_ptr() == place and (table == 1).all()
    assert found.table is not table


def test_what_a_function_has_made_is_an_ordinary_module_afterwards():
    kept: list[nn.Module] = []

    def function():
        kept.append(Net())
        return kept[-1]

    found = trained(function).model
    assert not [m for m in (found, *kept) if "__deepcopy__" in vars(m)]
    assert copy.deepcopy(found) is not found and trained(found).model is not found
