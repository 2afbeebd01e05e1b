"""Copies of the caller's module: what they share with it, and what they cost."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import undrift as ud
from tests.handloop import everything, own_loop
from tests.problems import distance, make_clients, same_bits
from undrift.functional import copying
from undrift.functional.copying import copy_of

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


# ---- hooks that close over the module ------------------------------------------------------------------------------


class Decay(Net):
    """Hooks that read other weights of the module than those whose gradients they get."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda g: g + 0.01 * self.last.weight.detach())
        self.last.bias.register_hook(self.pulled)
        self.first.bias.register_hook(functools.partial(pulled_to, self.last.weight))

    def pulled(self, g):
        return g + 0.1 * self.first.weight.detach().mean()


def pulled_to(w, g):
    return g + 0.1 * w.detach().mean()


class Accumulating(Net):
    def __init__(self) -> None:
        super().__init__()

        def add(p):
            p.grad += 0.1 * self.first.weight.detach().mean()

        self.last.weight.register_post_accumulate_grad_hook(add)


class OfAnObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(Pull(self))


class Pull:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, g):
        return pulled_to(self.module.first.weight, g)


class ModuleHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_hook(lambda layer, args, z: z + self.first.weight.mean())
        self.first.register_forward_pre_hook(lambda layer, args: (args[0] * self.last.bias.exp().mean(),))
        self.last.register_full_backward_pre_hook(lambda layer, g: (g[0] + 0.1 * self.first.bias.detach().mean(),))


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("kind", [Decay, Accumulating, OfAnObject, ModuleHooks])
def test_hooks_that_close_over_the_module_read_its_copy(kind, engine):
    module = made(kind)
    before = copy.deepcopy(everything(module))
    found = trained(module, engine=engine)
    assert distance(everything(found.model), own_loop(made(kind), make_clients(UNEVEN), LOCAL, 2)) < 1e-12
    assert same_bits(everything(module), before)


def test_hooks_that_do_not_lead_to_the_module_are_the_callers():
    module, seen = made(Net), []
    module.last.weight.register_hook(seen.append)
    (hook,) = copy_of(module, torch.device("cpu")).last.weight._backward_hooks.values()
    assert hook is seen.append or hook.__self__ is seen


# ---- what a copy costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_containers_of_data_are_not_walked_entry_by_entry(nested, monkeypatch):
    module = made(Net)
    module.data = (
        {i: {j: [j] * 8 for j in range(1000)} for i in range(300)}
        if nested
        else {i: [*range(200)] for i in range(5000)}
    )
    looked = []

    def content(x: Any) -> list[Any]:
        looked.append(x)
        return whole(x)

    whole = copying._content
    monkeypatch.setattr(copying, "_content", content)
    assert len(copying._reached(module)) < copying.MANY
    assert len(looked) < copying.MANY and sum(len(x) for x in looked if isinstance(x, dict | list)) < 2 * copying.MANY
    assert not any(isinstance(x, int) for x in looked)


def test_functions_in_containers_are_found_beside_data():
    class Heads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.heads = [{"name": "tanh", "of": [lambda x: torch.tanh(self.first(x))]}]
            self.data = {i: [[j] for j in range(900)] for i in range(150)}
            self.deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(8, 8).double())))
            self.deep[0][0].head = lambda x: 2 * self.last(x)

        def forward(self, x):
            return self.deep[0][0].head(self.deep(self.heads[0]["of"][0](x)))

    found = trained(made(Heads)).model
    assert distance(everything(found), own_loop(made(Heads), make_clients(UNEVEN), LOCAL, 2)) < 1e-12
