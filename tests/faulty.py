"""A run with every kind of fault."""

from __future__ import annotations

import undrift as ud
from tests.problems import make_clients, net

SEED, ROUNDS = 171, 6
SIZES = [23, 5, 0, 41, 10, 17, 1]


DATA = make_clients(SIZES)


LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.05)


ALL = ud.Faults(dropout=0.25, stragglers=0.4, nan=0.15, explode=0.15, explode_factor=1e4)


def train(method, faults=None, engine="lanes", rounds=ROUNDS, data=None, model=None, **more):
    more = {"lanes": 3} | more if engine == "lanes" else more
    settings = {"rounds": rounds, "local": LOCAL, "seed": SEED, "engine": engine, "faults": faults} | more
    return ud.train(model or net(), DATA if data is None else data, method, **settings)
