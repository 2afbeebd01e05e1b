"""The caller's own module is as it was after undrift has borrowed it."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import undrift as ud
from tests.problems import make_clients, same_bits
from undrift.functional import borrowed as borrowing
from undrift.functional import copying
from undrift.functional.borrowed import ENTRIES, borrowed
from undrift.functional.model import Model
from undrift.training import identity
from undrift.training.identity import describe_deeply

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class FrozenDict(OrderedDict):
    """As diffusers has it for configurations; Hugging Face's ModelOutput refuses the same."""

    def __init__(self, **entries) -> None:
        super().__init__(**entries)
        for name, value in entries.items():
            setattr(self, name, value)

    def refuse(self, *args, **kwargs):
        raise Exception(f"You cannot change a {type(self).__name__} instance.")

    update = setdefault = pop = clear = __delitem__ = refuse


class FrozenList(list):
    def refuse(self, *args, **kwargs):
        raise TypeError("read-only")

    clear = extend = append = __setitem__ = refuse


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.sizes, self.seen = FrozenDict(width=8, depth=2), [8, 4], []

    def forward(self, x):
        self.seen.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_containers_that_refuse_changes_stay_and_cause_no_warnings(engine, caplog):
    module = Configured()
    before = copy.deepcopy(module.state_dict())
    with caplog.at_level(logging.WARNING, logger="undrift"):
        ud.train(module, make_clients([8, 8]), rounds=1, local=ud.Local(steps=1, batch_size=4, lr=0.1), engine=engine)
    assert not [m for m in caplog.messages if "could not be compared" in m or "fails on samples" in m]
    assert dict(module.config) == {"width": 8, "depth": 2} and module.sizes == [8, 4] and module.seen == []
    assert same_bits(module.state_dict(), before)


def test_containers_that_refuse_changes_are_put_back_where_something_changes_them():
    module = Configured()
    module.sizes = FrozenList([8, 4])
    with borrowed(module, CPU, frozen=True) as lent:
        OrderedDict.__setitem__(lent.config, "extra", 1)
        OrderedDict.move_to_end(lent.config, "width")
        lent.config.width = 5
        list.append(lent.sizes, 2)
    assert list(module.config.items()) == [("width", 8), ("depth", 2)] and module.sizes == [8, 4]
    assert module.config.width == 8


def test_what_is_in_containers_of_containers_is_put_back():
    class Messy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.history, self.table = [[], {"n": {1}}], {"a": ([1], defaultdict(int, b=2))}
            self.queue, self.tensors = deque([1, 2], maxlen=2), [torch.zeros(3), {"t": torch.ones(2)}]
            self.array = np.zeros(2)

        def forward(self, x):
            self.history[0].append(len(x))
            self.history[1]["n"].add(2)
            self.table["a"][0][0] = 7
            self.table["a"][1]["c"] += 1
            self.queue.append(len(x))
            self.tensors[0] += 1
            self.tensors[1]["t"].zero_()
            self.array += 1
            return super().forward(x)

    module = Messy()
    inner, ones = module.history[0], module.tensors[1]["t"]
    ud.train(module, make_clients([8, 8]), rounds=1, local=ud.Local(steps=1, batch_size=4, lr=0.1), engine="plain")
    assert module.history == [[], {"n": {1}}] and module.history[0] is inner
    assert module.table == {"a": ([1], {"b": 2})} and module.queue == deque([1, 2])
    assert not module.tensors[0].any() and module.tensors[1]["t"] is ones and ones.all()
    assert not module.array.any()


def test_containers_of_data_are_not_looked_through():
    class Counted(list):
        looked = 0

        def __len__(self):
            type(self).looked += 1
            return super().__len__()

    module = Net()
    module.rows = [Counted([i]) for i in range(2 * ENTRIES)]
    module.few = [Counted([i]) for i in range(ENTRIES // 2)]
    with borrowed(module, CPU, frozen=False):
        pass
    assert 0 < Counted.looked <= ENTRIES
    module.rows.pop()
    with borrowed(module, CPU, frozen=False) as lent:
        lent.rows.append([])
    assert len(module.rows) == 2 * ENTRIES - 1


def test_what_cannot_be_put_back_leaves_the_rest_as_it_was():
    module = Net()
    module.array, module.seen = np.zeros(2), []
    before = copy.deepcopy(module.state_dict())

    def change() -> None:
        with borrowed(module, CPU, frozen=False) as lent, torch.no_grad():
            lent.last.weight.zero_()
            lent.seen.append(1)
            lent.array.resize(3, refcheck=False)

    with pytest.raises(ValueError, match="broadcast"):
        change()
    assert same_bits(module.state_dict(), before) and module.seen == [] and module.training


# ---- several threads with one module -------------------------------------------------------------------------------


class Watched:
    """A lock that says when a thread is about to ask for it."""

    def __init__(self) -> None:
        self.lock, self.asked = threading.RLock(), threading.Event()

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
        return self.lock.__enter__()

    def __exit__(self, *args):
        return self.lock.__exit__(*args)


def copied(module):
    """What another run makes of the module: its weights, and which layers stay in evaluation mode."""
    model = Model(module, CPU)
    return model.start, model.still


def described(module):
    return describe_deeply(module)


@pytest.mark.parametrize("reads", [copied, described], ids=lambda reads: reads.__name__)
def test_another_thread_does_not_see_what_a_borrowed_module_has_meanwhile(reads, monkeypatch):
    lock = Watched()
    for place in (borrowing, copying, identity):
        monkeypatch.setattr(place, "LENT", lock)
    module = Net()
    module.last.eval()
    module.seen = []
    wanted = reads(copy.deepcopy(module))
    with ThreadPoolExecutor(1) as pool:
        with borrowed(module, CPU, frozen=False) as lent, torch.no_grad():
            lent.last.weight.zero_()
            lent.seen.append(1)
            other = pool.submit(reads, module)
            other.add_done_callback(lambda _: lock.asked.set())  # if it does not ask
            assert lock.asked.wait(60)
        found = other.result(60)
    if reads is copied:
        assert same_bits(found[0], wanted[0]) and found[1] == wanted[1] == ["last"]
    else:
        assert found == wanted


# ---- on another device ---------------------------------------------------------------------------------------------


def test_frozen_weights_that_a_copy_has_on_the_device_are_not_moved(monkeypatch):
    """The CPU by another name stands for the device: tensors are copied to it, and say that they are on the CPU."""
    found = borrowing._frozen_on
    monkeypatch.setattr(borrowing, "_frozen_on", lambda device, module, copied: found(CPU, module, copied))
    module = Net()
    module.first.requires_grad_(False)
    own, weights = copy.deepcopy(module.state_dict()), {name: p.data_ptr() for name, p in module.named_parameters()}
    copied = copy.deepcopy(module)
    copied.first.bias.data = copied.first.bias.data.float()  # not the same values
    theirs = copied.first.weight.data_ptr()
    for frozen, given, wanted in ((False, copied, True), (True, copied, False), (False, None, False)):
        with borrowed(module, torch.device("cpu:0"), frozen, given) as lent, torch.no_grad():
            assert (lent.first.weight.data_ptr() == theirs) == wanted
            elsewhere = [lent.first.bias, lent.last.weight, lent.last.bias, *([] if wanted else [lent.first.weight])]
            known = {*weights.values(), *(p.data_ptr() for p in copied.parameters())}
            assert not known & {p.data_ptr() for p in elsewhere} and lent.first.bias.dtype == torch.float64
            lent.last.weight.zero_()
        assert {name: p.data_ptr() for name, p in module.named_parameters()} == weights
        assert same_bits(module.state_dict(), own) and torch.equal(copied.first.weight, own["first.weight"])
