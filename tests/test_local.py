from __future__ import annotations

import numpy as np
import pytest
import torch

import undrift as ud
from undrift.method.local import cohort_batches


def test_batches_are_successive_permutations_with_a_short_last_batch(uneven):
    steps = ud.batches(uneven, ud.Local(epochs=3, batch_size=10, lr=0.1), client=0, round=2, seed=0)
    assert [len(s) for s in steps] == [10, 10, 3] * 3
    epochs = [torch.cat(steps[i : i + 3]) for i in (0, 3, 6)]
    assert all(e.sort().values.tolist() == list(range(23)) for e in epochs)
    assert len({tuple(e.tolist()) for e in epochs}) == 3


def test_epochs_and_steps_are_the_same_batches(uneven):
    epochs = ud.batches(uneven, ud.Local(epochs=2, batch_size=10, lr=0.1), client=0, round=0, seed=3)
    steps = ud.batches(uneven, ud.Local(steps=6, batch_size=10, lr=0.1), client=0, round=0, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(epochs, steps, strict=True))
    longer = ud.batches(uneven, ud.Local(steps=7, batch_size=10, lr=0.1), client=0, round=0, seed=3)
    assert len(longer) == 7 and torch.equal(longer[5], steps[5])


def test_small_clients_and_full_batches_use_all_they_have(uneven):
    small = ud.batches(uneven, ud.Local(steps=3, batch_size=10, lr=0.1), client=1, round=0, seed=0)
    assert [s.sort().values.tolist() for s in small] == [list(range(5))] * 3
    whole = ud.batches(uneven, ud.Local(steps=2, batch_size=None, lr=0.1), client=3, round=0, seed=0)
    assert [s.tolist() for s in whole] == [list(range(41))] * 2
    assert ud.batches(uneven, ud.Local(steps=2, lr=0.1), client=2, round=0, seed=0) == []


def test_batches_depend_on_nothing_but_seed_round_and_client(uneven):
    """Not on who else is in the cohort, nor on its order, nor on the others' step counts."""
    sizes = uneven.sizes
    alone = cohort_batches(0, 4, np.array([3]), sizes[[3]], np.array([6]), 10, 10)
    many = cohort_batches(0, 4, np.array([5, 3, 0]), sizes[[5, 3, 0]], np.array([2, 6, 9]), 10, 10)
    assert (many.positions[2:8] == alone.positions).all() and (many.counts[2:8] == alone.counts).all()
    other = [
        ud.batches(uneven, ud.Local(steps=1, batch_size=10, lr=0.1), client=3, round=r, seed=s)[0]
        for r, s in ((0, 0), (1, 0), (0, 1))
    ]
    assert len({tuple(o.tolist()) for o in other}) == 3


def test_step_counts(uneven):
    ids = np.array([0, 1, 3])
    sizes = uneven.sizes[ids]
    assert ud.Local(epochs=2, batch_size=10, lr=1).step_counts(0, ids, sizes).tolist() == [6, 2, 10]
    assert ud.Local(steps=ud.decay(50, 0.8), lr=1).step_counts(2, ids, sizes).tolist() == [32] * 3
    assert ud.Local(steps=[1, 2, 3, 4, 5, 6, 7], lr=1).step_counts(0, ids, sizes).tolist() == [1, 2, 4]
    assert ud.Local(epochs=lambda t: 1 if t else 3, batch_size=10, lr=1).step_counts(1, ids, sizes).tolist() == [
        3,
        1,
        5,
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lr": 1}, "either steps or epochs"),
        ({"lr": 1, "steps": 1, "epochs": 1}, "either steps or epochs, and not both"),
        ({"lr": 1, "steps": 1, "batch_size": 0}, "batch_size. must be a whole number from 1"),
        ({"lr": -0.1, "steps": 1}, r"Local\(lr\) is -0.1"),
        ({"lr": ud.decay(-1, 1), "steps": 1}, r"Local\(lr\) is -1 in round 0"),
        ({"lr": 1, "steps": 1, "momentum": 1}, r"Local\(momentum\) is 1; it must be in \[0, 1\)"),
        ({"lr": 1, "steps": 0}, r"Local\(steps\) is 0"),
        ({"lr": 1, "steps": [1, 2]}, "one whole number from 1 for each of the 7 clients"),
        ({"lr": 1, "steps": "many"}, r"Local\(steps\) must be a number"),
        ({"lr": 1, "epochs": -1}, r"Local\(epochs\) is -1"),
        ({"lr": 1, "steps": 1, "weight_decay": float("nan")}, r"Local\(weight_decay\) is nan"),
    ],
)
def test_refusals(uneven, arguments, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.Local(**arguments).check(uneven, 3)
