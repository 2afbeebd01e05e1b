"""Assign classes to clients, and samples to clients with given class mixes, for all clients at once.

Classes are assigned with the draws of a loop over clients, in the same order of the generator's stream. `in_blocks` has
draws of its own.
"""

from __future__ import annotations

import math

import numpy as np

from undrift.data.shares import Array, in_order

BLOCK = 1 << 22
"""How many numbers to draw at a time, one per client and class."""


def fewest_first(clients: int, classes: int, each: int, rng: np.random.Generator) -> Array:
    """Return, per client, `each` of the classes: those that the fewest clients before it hold, ties at random.

    After some clients, all classes are held equally often, and a new cycle begins. So clients at the same position of a
    cycle are independent, and are drawn together.
    """
    turn = classes // math.gcd(each, classes)
    per_turn = each * turn // classes
    turns = -(-clients // turn)
    taken = np.empty((turns, turn, each), np.int64)
    step = max(1, BLOCK // (turn * classes))
    for begin in range(0, turns, step):
        number = np.arange(begin, min(turns, begin + step))
        # In the last cycle, only the clients that exist may draw.
        real = min(clients - begin * turn, len(number) * turn)
        draws = np.zeros((len(number), turn, classes))
        draws.reshape(-1)[: real * classes] = rng.random(real * classes)
        load = np.repeat(number[:, None] * per_turn, classes, 1)
        for place in range(turn):
            chosen = np.argsort(load + draws[:, place], 1)[:, :each]
            np.put_along_axis(load, chosen, np.take_along_axis(load, chosen, 1) + 1, 1)
            taken[begin : begin + len(number), place] = chosen
    return taken.reshape(turns * turn, each)[:clients]


def own_and_others(clients: int, classes: int, count: int, rng: np.random.Generator) -> Array:
    """Return, per client i, class i modulo the number of classes and `count − 1` others at random."""
    taken = np.empty((clients, count), np.int64)
    for begin in range(0, clients, step := max(1, BLOCK // classes)):
        own = np.arange(begin, min(clients, begin + step)) % classes
        rest = np.arange(classes - 1)[None] + (np.arange(classes - 1)[None] >= own[:, None])
        taken[begin : begin + len(own), 0] = own
        taken[begin : begin + len(own), 1:] = rng.permuted(rest, axis=1)[:, : count - 1]
    return taken


def holders(taken: Array, classes: int) -> list[Array]:
    """Return, per class, the clients that hold it, ascending, given the classes of each client."""
    each = taken.shape[1]
    counts = np.bincount(taken.reshape(-1), minlength=classes)
    return np.split(in_order(taken.reshape(-1)) // each, np.cumsum(counts)[:-1])


def in_blocks(
    owner: Array, pools: list[Array], clients: Array, sizes: Array, concentration: Array, rng: np.random.Generator
) -> Array:
    """Owners of all samples: clients, in this order, draw as many as their size from mixes of classes of their own.

    A block of clients draws together. Where it asks for more of a class than is left, the first of it get that, and
    what the others lack they draw from the classes that remain.

    Args:
        owner: The array to fill.
        pools: Per class, its samples.
        clients: The clients, in the order of their draws.
        sizes: By client, how many samples it gets.
        concentration: Per class, that of the Dirichlet distribution from which mixes are drawn.
        rng: The generator.
    """
    left = np.array([len(pool) for pool in pools])
    for begin in range(0, len(clients), step := max(1, BLOCK // len(pools))):
        block = clients[begin : begin + step]
        mix, wanted = rng.dirichlet(concentration, len(block)), sizes[block].copy()
        while len(lacking := np.flatnonzero(wanted)):
            share = mix[lacking]
            if (left == 0).any():
                share = np.where(left > 0, share, 0.0)
                share = np.where(share.sum(1, keepdims=True) > 1e-12, share, np.where(left > 0, concentration, 0.0))
                share /= share.sum(1, keepdims=True)
            drawn = rng.multinomial(wanted[lacking], share)
            upto = np.minimum(np.cumsum(drawn, 0), left)
            drawn = np.diff(upto, axis=0, prepend=0)
            for c in np.flatnonzero(upto[-1]):
                owner[pools[c][left[c] - upto[-1, c] : left[c]]] = np.repeat(block[lacking], drawn[:, c])
            left = left - upto[-1]
            wanted[lacking] -= drawn.sum(1)
    return owner
