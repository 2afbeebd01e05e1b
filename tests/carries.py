"""Parts whose carries hand on tensors of the step before, which engines must not mix up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import undrift as ud


@dataclass(frozen=True)
class Previous(ud.Part):
    """Remembers the weights and the last two gradients of the steps before: the same tensors, a step later."""

    def carry(self, params, client):
        zeros = ud.tree_map(torch.zeros_like, params)
        return {"w": params, "one": zeros, "two": zeros}

    def step(self, g, carry, params, client):
        mixed = ud.tree_map(
            lambda g, w, old, a, b: g + 0.1 * (w - old) + 0.2 * a + 0.1 * b,
            g, params, carry["w"], carry["one"], carry["two"],
        )  # fmt: skip
        return mixed, {"w": params, "one": g, "two": carry["one"]}


@dataclass(frozen=True)
class Twice(ud.Part):
    """Carries the same gradient in two places, which differ at first."""

    def carry(self, params, client):
        return {"a": ud.tree_map(torch.zeros_like, params), "b": ud.tree_map(torch.ones_like, params)}

    def step(self, g, carry, params, client):
        return ud.tree_map(lambda g, a, b: g + 0.1 * a - 0.01 * b, g, carry["a"], carry["b"]), {"a": g, "b": g}


@dataclass(frozen=True)
class Prepared(ud.Part):
    """Carries what it has prepared, a tensor of the lane's own."""

    def prepare(self, client):
        return ud.tree_map(lambda w: w * client.n, client.start)

    def carry(self, params, client):
        return ud.tree_map(torch.zeros_like, params)

    def step(self, g, carry, params, client):
        mixed = ud.tree_map(lambda g, c, p: g + 0.01 * c + 0.001 * p, g, carry, client.prepared)
        return mixed, client.prepared


CARRIES = [Previous(), Twice(), Prepared()]
