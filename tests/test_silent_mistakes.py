"""Mistakes that once went through without a word, each an error now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests.problems import make_clients, net

OPTIONS = {"rounds": 2, "local": ud.Local(steps=1, batch_size=4, lr=0.1)}


def ce(output, target):
    return F.cross_entropy(output, target, reduction="none")


LOSSES = {
    "detached": lambda o, y: ce(o, y).detach(),
    "whole": lambda o, y: (ce(o, y) > 1).to(o.dtype),
    "constant": lambda o, y: torch.ones(len(o), dtype=o.dtype),
}


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_without_a_gradient_is_refused(loss, engine):
    """A12: lanes trained nothing, and plain raised a RuntimeError."""
    with pytest.raises(ud.UndriftError, match="The loss has no gradient with respect to the model's parameters"):
        ud.train(net(), make_clients([10, 7]), loss=loss, engine=engine, **OPTIONS)


def test_a_model_without_a_gradient_is_refused():
    class Cut(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(ud.UndriftError, match="The model has no gradient with respect to"):
        ud.train(Cut(6, 4).double(), make_clients([10, 7]), **OPTIONS)


class Counting(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Unseeded(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + np.random.default_rng().random()


class OwnGenerator(torch.nn.Linear):
    def forward(self, x):
        self.generator = vars(self).get("generator") or torch.Generator().manual_seed(0)
        return super().forward(x) + torch.poisson(x[:, :1].abs() * 100, self.generator)


CHANCE = {
    "numpy": lambda: Unseeded(6, 4, dtype=torch.float64),
    "torch": lambda: OwnGenerator(6, 4, dtype=torch.float64),
    "counter": lambda: Counting(6, 4, dtype=torch.float64),
}


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize("make", CHANCE.values(), ids=CHANCE)
def test_chance_that_nothing_governs_is_refused(make, engine):
    """A15: a trace froze it, and the two engines differed without a word. Global generators, though, can be seeded."""
    with pytest.raises(ud.UndriftError, match="different outputs for the same samples and the same draws"):
        ud.train(make(), make_clients([10, 7]), engine=engine, **OPTIONS)


def test_statistics_that_outputs_depend_on_are_no_chance():
    """A buffer may change from call to call, and outputs with it: it is tracked."""

    class Momentous(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 4, dtype=torch.float64)
            self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

        def forward(self, x):
            if self.training:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return super().forward(x - self.mean)

    result = ud.train(Momentous(), make_clients([10, 7]), engine="plain", **OPTIONS)
    assert result.model.mean.abs().sum() > 0


@pytest.mark.parametrize("name", ["round", "clients", "class_accuracy", "loss", "validation_loss", "client_loss"])
def test_columns_of_the_history_are_taken(name):
    """A16."""

    @dataclass(frozen=True)
    class Says(ud.Part):
        def history(self, state):
            return {name: -1}

    with pytest.raises(ud.UndriftError, match=f"A metric cannot be called {name!r}"):
        ud.train(net(), make_clients([10, 7]), metrics={name: lambda o, y: o.sum(1)}, **OPTIONS)
    with pytest.raises(ud.UndriftError, match=f"A part's history has a column {name!r}"):
        ud.train(net(), make_clients([10, 7]), ud.FedAvg() + Says(), **OPTIONS)


def test_a_part_does_not_overwrite_a_metric():
    @dataclass(frozen=True)
    class Says(ud.Part):
        def history(self, state):
            return {"accuracy": 1.0}

    with pytest.raises(ud.UndriftError, match="A part's history has a column 'accuracy'"):
        ud.train(net(), make_clients([10, 7]), Says(), **OPTIONS)


@pytest.mark.parametrize("seed", [2**64, 2**70, -1, 1.0, True])
def test_a_seed_has_64_bits(seed):
    """A17: seed 2**64 was seed 0."""
    with pytest.raises(ud.UndriftError, match="seed must be a whole number from 0 to"):
        ud.train(net(), make_clients([10, 7]), seed=seed, **OPTIONS)
    assert ud.train(net(), make_clients([10, 7]), seed=2**64 - 1, **OPTIONS).history


def test_absurdly_many_rounds_start_at_once():
    """A21: every schedule was tried for every round first."""

    class StopError(Exception):
        pass

    def stop(row):
        raise StopError

    local = ud.Local(steps=1, lr=0.1, momentum=ud.inverse(0.1, 3), weight_decay=ud.inverse(0.1, 3))
    with pytest.raises(StopError):
        ud.train(net(), make_clients([10, 7]), rounds=10**12, local=local, on_round=stop)


def test_on_round_must_be_a_function():
    with pytest.raises(ud.UndriftError, match="on_round must be a function"):
        ud.train(net(), make_clients([10, 7]), on_round=5, **OPTIONS)
