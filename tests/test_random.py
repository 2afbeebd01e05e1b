"""Draws are a function of their key, the same on every engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

import undrift as ud
from undrift.random import (
    MASK,
    Key,
    bits,
    choose,
    derive,
    keep_mask,
    normal,
    normal_like,
    philox,
    philox_words,
    uniform,
)

# Known answers of Philox4x32-10 from the authors' own test vectors.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert philox(counter, key) == expected
    arrays = philox(tuple(np.array([c]) for c in counter), tuple(np.array([k]) for k in key))
    assert tuple(int(a[0]) for a in arrays) == expected
    tensors = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(t) for t in tensors) == expected


def key(a: int = 1, b: int = 2, step: int = 0) -> Key:
    return Key(torch.tensor([a, b]), torch.tensor(step))


def test_draws_are_the_same_inside_vmap():
    words, steps = torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 9])
    mapped = vmap(lambda w, k: bits(Key(w, k), 7))(words, steps)
    assert torch.equal(mapped, torch.stack([bits(key(1, 2, 0), 7), bits(key(3, 4, 9), 7)]))


def test_the_operation_for_a_gpu_gives_the_same_words_also_in_vmap_and_traced():
    keys, steps = torch.tensor([[1, 2], [MASK, 0], [3, 4]]), torch.tensor([0, 9, MASK])
    wanted = torch.stack([bits(Key(words, step, 7), 6) for words, step in zip(keys, steps, strict=True)])
    assert torch.equal(philox_words(keys, steps, 7, 6), wanted)

    def one(words, step):
        return philox_words(words[None], step[None], 7, 6)[0]

    assert torch.equal(vmap(one)(keys, steps), wanted)
    assert torch.equal(vmap(one, (0, None))(keys, steps[1])[1], wanted[1])
    assert torch.equal(make_fx(vmap(one))(keys.clone(), steps.clone())(keys, steps), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("count", [1, 5, 1024, 300_001])
def test_a_gpu_draws_the_same_words(count):
    keys, steps = torch.tensor([[1, 2], [MASK, 0], [3, 4]]), torch.tensor([0, 9, MASK])

    def one(words, step):
        return bits(Key(words, step, 2**31 + 7), count), normal_like(Key(words, step), torch.zeros(count))

    wanted = vmap(one)(keys, steps)
    moved = [t.cuda() for t in (keys, steps)]
    for function in (vmap(one), torch.compile(vmap(one))):
        words, normals = function(*moved)
        assert torch.equal(words.cpu(), wanted[0])
        assert torch.allclose(normals.cpu(), wanted[1], atol=1e-5)


def test_a_longer_draw_begins_like_a_shorter_one():
    for draw in (
        lambda n: bits(key(), n),
        lambda n: uniform(key(), (n,)),
        lambda n: normal(key(), (n,), torch.float64),
    ):
        assert torch.equal(draw(11)[:6], draw(6))


def test_steps_streams_and_keys_are_independent():
    draws = [bits(k, 8) for k in (key(), key(step=1), key().stream_at(1), key(b=3))]
    assert len({tuple(d.tolist()) for d in draws}) == 4


def test_a_tree_is_one_draw_in_the_order_of_its_tensors():
    tree = {"b": torch.zeros(2, 3), "a": [torch.zeros(()), torch.zeros(0)], "low": torch.zeros(5, dtype=torch.bfloat16)}
    drawn, whole = normal_like(key(), tree), normal(key(), (12,))
    assert [t.dtype for t in (drawn["b"], drawn["a"][0], drawn["low"])] == [torch.float32] * 2 + [torch.bfloat16]
    assert torch.equal(drawn["b"], whole[:6].view(2, 3)) and drawn["a"][0] == whole[6] and not len(drawn["a"][1])
    assert torch.equal(drawn["low"], whole[7:].bfloat16())
    double = normal_like(key(), {"w": torch.zeros(3, dtype=torch.float64)})["w"]
    assert torch.equal(double, normal(key(), (3,), torch.float64))
    assert normal_like(key(), {}) == {}


def test_moments():
    u, z = uniform(key(), (50_000,)), normal(key(5), (50_001,), torch.float64)
    assert 0 < u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.003
    assert abs(z.mean()) < 0.02 and abs(z.var() - 1) < 0.03 and z.shape == (50_001,)
    assert abs(keep_mask(key(), (50_000,), 0.3).float().mean() - 0.7) < 0.01


def test_choose_takes_distinct_clients_and_does_not_look_at_the_rest():
    for population, count in [(1, 1), (5, 5), (10, 7), (1000, 10), (10**15, 1000)]:  # 10¹⁵ could not be listed
        chosen = choose(derive(0, "cohort", 3), population, count)
        assert len(np.unique(chosen)) == count and chosen.min() >= 0 and chosen.max() < population
        assert (np.diff(chosen) > 0).all()


@pytest.mark.parametrize("count", [2, 7])
def test_choose_is_fair(count):
    times = np.zeros(10)
    for t in range(4000):
        times[choose(derive(0, "cohort", t), 10, count)] += 1
    assert np.abs(times / 4000 - count / 10).max() < 0.035


def test_keys_differ_by_seed_purpose_round_and_client():
    keys = [
        derive(0, "a", 1, 2),
        derive(1, "a", 1, 2),
        derive(0, "b", 1, 2),
        derive(0, "a", 2, 2),
        derive(0, "a", 1, 3),
    ]
    assert len(set(keys)) == 5
    low, high = derive(0, "a", 1, np.array([2, 3]))
    assert [(low[0], high[0]), (low[1], high[1])] == [keys[0], keys[4]]


def test_a_negative_seed_is_refused():
    with pytest.raises(ud.UndriftError, match="seed must be a whole number"):
        derive(-1, "a")
