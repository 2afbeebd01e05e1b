"""Partitions as properties: every sample once, sizes and classes as asked, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undrift as ud
from undrift.data.splits import stratified_mask, stratified_mask_by_group, tail_masks

PARTITIONS = [
    ud.IID(),
    ud.Dirichlet(0.1),
    ud.Dirichlet(0.1, capped=True),
    ud.DirichletPrior(1.0),
    ud.Shards(2),
    ud.SortedShards(2),
    ud.QuantitySkew(0.5),
]


def counts(labels: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    table = np.zeros((clients, labels.max() + 1), int)
    np.add.at(table, (owner, labels), 1)
    return table


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(PARTITIONS),
    st.integers(3, 12),
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.integers(0, 2**40),
)
def test_every_sample_goes_to_one_client_the_same_for_the_same_seed(partition, clients, per_class, seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(per_class)), per_class))
    owner = partition(labels, clients, np.random.default_rng(seed), None)
    assert owner.shape == labels.shape and owner.min() >= 0 and owner.max() < clients
    assert (owner == partition(labels, clients, np.random.default_rng(seed), None)).all()


LABELS = np.repeat(np.arange(10), 500)


def split(partition, clients=20, labels=LABELS):
    return counts(labels, partition(labels, clients, np.random.default_rng(0), None), clients)


def test_iid_is_stratified():
    table = split(ud.IID(), clients=7)
    assert np.ptp(table.sum(1)) <= 1 and np.ptp(table, axis=0).max() <= 1


def test_dirichlet_spreads_with_alpha():
    def skew(alpha):  # mean distance of a client's mix from the whole's
        table = split(ud.Dirichlet(alpha))
        mixes = table[table.sum(1) > 0] / table.sum(1, keepdims=True)[table.sum(1) > 0]
        return np.abs(mixes - 0.1).sum(1).mean() / 2

    assert skew(100) < 0.1 < 0.5 < skew(0.05)
    assert np.ptp(split(ud.Dirichlet(0.1)).sum(1)) > 100


def test_capped_dirichlet_is_niid_benchs():
    """Against its algorithm written out: a full client gets nothing more, and a small one means another draw."""
    clients, least, n = 20, 10, len(LABELS)
    rng = np.random.default_rng(0)
    for c in range(10):
        rng.permutation(np.flatnonzero(LABELS == c))
    while True:
        held = np.zeros(clients)
        for _ in range(10):
            p = rng.dirichlet(np.full(clients, 0.1))
            p = np.array([share * (size < n / clients) for share, size in zip(p, held, strict=True)])
            held += 500 * p / p.sum()
        if held.min() >= least:
            break
    table = split(ud.Dirichlet(0.1, capped=True, least=least))
    assert table.sum(1).min() >= least and np.abs(table.sum(1) - held).max() <= 10  # ours are whole numbers
    assert table.sum(1).max() < 250 + 500 and split(ud.Dirichlet(0.1)).sum(1).max() > 700
    assert repr(ud.Dirichlet(0.1)) == "Dirichlet(alpha=0.1)" and eval_repr(ud.Dirichlet(0.1, capped=True, least=10))


def eval_repr(partition) -> bool:
    from undrift.data.partition import parse_partition

    return parse_partition(repr(partition)) == partition


def test_capped_dirichlet_when_a_draw_is_all_for_clients_that_are_full():
    table = split(ud.Dirichlet(1e-9, capped=True), clients=2)
    assert (table.sum(1) == 2500).all()


def test_too_many_samples_asked_for():
    with pytest.raises(ud.UndriftError, match="cannot have 300 samples each: there are 5000"):
        split(ud.Dirichlet(0.1, least=300))
    with pytest.raises(ud.UndriftError, match=r"In 1,000 draws of Dirichlet\(alpha=0.01.*fewer than 240 samples"):
        split(ud.Dirichlet(0.01, least=240))


def test_dirichlet_prior_has_even_sizes():
    near, far = split(ud.DirichletPrior(1000.0)), split(ud.DirichletPrior(0.1))
    assert (near.sum(1) == 250).all() and (far.sum(1) == 250).all()
    # Hsu's prior sums to 1, so γ = 1000 gives each of ten classes a concentration of 100: near the whole's mix.
    assert np.abs(near / 250 - 0.1).mean() < 0.03  # the last client takes what is left, so not the maximum
    assert (far.max(1) / 250).mean() > 0.7


@pytest.mark.parametrize("each", [1, 2, 4, 10])
def test_shards_hold_as_many_classes_as_asked(each):
    table = split(ud.Shards(each))
    assert ((table > 0).sum(1) == each).all()
    holders = (table > 0).sum(0)
    assert np.ptp(holders) <= 1 and holders.sum() == 20 * each
    assert np.ptp(table.sum(1)) > 20  # cut at random points


def test_classes_per_client_are_niid_benchs():
    """Client i holds class i mod 10 and others by chance, and the holders of a class share it evenly."""
    table = split(ud.ClassesPerClient(2))
    assert ((table > 0).sum(1) == 2).all() and all(table[i, i % 10] for i in range(20))
    for column in table.T:
        assert np.ptp(column[column > 0]) <= 1 and column.sum() == 500
    assert np.ptp((table > 0).sum(0)) > 1 and np.ptp(table.sum(1)) > 50  # as many holders as chance gives
    others = [(split_with(seed) > 0).sum(0) for seed in range(300)]
    assert np.abs(np.mean(others, 0) - 4).max() < 0.3 and np.min(others) >= 2
    assert (split(ud.ClassesPerClient(10)) == 25).all()
    with pytest.raises(ud.UndriftError, match="at most 10"):
        split(ud.ClassesPerClient(11))
    with pytest.raises(ud.UndriftError, match=r"use at least 10 clients, or Shards\(2\)"):
        split(ud.ClassesPerClient(2), clients=9)


def split_with(seed: int) -> np.ndarray:
    return counts(LABELS, ud.ClassesPerClient(2)(LABELS, 20, np.random.default_rng(seed), None), 20)


def test_sorted_shards_are_equal_pieces_of_the_sorted_labels():
    table = split(ud.SortedShards(1), clients=12)
    assert np.ptp(table.sum(1)) <= 1 and ((table > 0).sum(1) <= 2).all()
    assert ((split(ud.SortedShards(2), clients=10) > 0).sum(1) <= 2).all()


def test_label_split_is_contiguous():
    table = split(ud.LabelSplit(), clients=2)
    assert (table[0] > 0).tolist() == [True] * 5 + [False] * 5
    assert (split(ud.LabelSplit(), clients=3) > 0).sum(1).tolist() == [4, 3, 3]


def test_quantity_skew_keeps_the_mix():
    table = split(ud.QuantitySkew(0.5))
    big = table[table.sum(1) > 400]
    assert np.abs(big / big.sum(1, keepdims=True) - 0.1).max() < 0.06 and np.ptp(table.sum(1)) > 200


def test_by_key_takes_the_datas_own_clients():
    owner = ud.ByKey()(np.zeros(4), 0, np.random.default_rng(0), np.array(["b", "a", "b", "c"]))
    assert owner.tolist() == [1, 0, 1, 2]


def test_by_key_takes_the_largest_of_the_datas_own_clients():
    keys = np.array(["d", "b", "a", "b", "c", "d", "c", "b", "e"])
    frame = pd.DataFrame({"x": np.arange(9.0), "label": np.arange(9) % 2, "client": keys})
    data = ud.load(frame, ud.ByKey(largest=3))
    assert {data.client_names[c]: data[c][0].flatten().tolist() for c in range(3)} == {
        "d": [0, 5], "b": [1, 3, 7], "c": [4, 6],
    }  # fmt: skip
    two = ud.load(frame, "ByKey(largest=2)")  # c and d are equally large, and d is first in the table
    assert list(two.client_names) == ["d", "b"]
    assert two.origin is None and repr(ud.ByKey(largest=2)) == "ByKey(largest=2)" and repr(ud.ByKey()) == "ByKey()"
    assert len(ud.load(frame, ud.ByKey(largest=9))) == 5
    with pytest.raises(ud.UndriftError, match=r"ByKey\(largest=3\) leaves samples out"):
        ud.ByKey(largest=3)(np.zeros(9), 0, np.random.default_rng(0), keys)


def test_features_are_normalized_by_the_clients_that_train():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"x": rng.normal(size=90), "label": np.arange(90) % 2, "client": np.repeat([0, 1, 2], [40, 40, 10])}
    )
    frame.loc[frame["client"] == 2, "x"] += 1000
    data = ud.load(frame, ud.ByKey(largest=2), normalize=True)
    x = torch.cat([data[c][0] for c in range(2)])
    assert abs(float(x.mean())) < 1e-5 and float(x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert data.scales.count == 80 and data.scales.columns == ["x"]


def test_a_stratified_fraction_takes_every_class_alike():
    labels = np.repeat(np.arange(4), [100, 50, 30, 20])
    mask = stratified_mask(labels, 0.1, np.random.default_rng(0))
    assert np.bincount(labels[mask]).tolist() == [10, 5, 3, 2]


def test_a_fraction_of_each_group_is_class_balanced_also_over_small_groups():
    rng = np.random.default_rng(0)
    groups, labels = np.repeat(np.arange(2000), 5), rng.integers(0, 10, 10_000)
    taken = stratified_mask_by_group(labels, groups, 0.2, rng)
    assert np.bincount(groups[taken], minlength=2000).tolist() == [1] * 2000
    share = np.bincount(labels[taken], minlength=10) / np.bincount(labels)
    assert (np.abs(share - 0.2) < 0.03).all(), share
    big = stratified_mask_by_group(np.arange(1000) % 4, np.arange(1000) // 500, 0.1, rng)
    assert all(abs(n - 12.5) <= 1.5 for n in np.bincount(np.arange(1000)[big] // 500 * 4 + np.arange(1000)[big] % 4))


def test_nobodys_last_row_is_taken():
    groups = np.repeat(np.arange(300), np.arange(300) % 3 + 1)
    for fraction in (0.1, 0.5, 0.95):
        taken = stratified_mask_by_group(np.zeros(len(groups), int), groups, fraction, np.random.default_rng(1))
        assert (np.bincount(groups[~taken], minlength=300) >= 1).all()


def test_tails_leave_a_gap():
    spans = np.repeat([3, 5, 9], [100, 20, 50])
    held, left = tail_masks(spans, 0.2, 10)
    assert [int(held[spans == s].sum()) for s in (3, 5, 9)] == [20, 4, 10]
    assert [int(left[spans == s].sum()) for s in (3, 5, 9)] == [70, 6, 30]
    assert np.flatnonzero(held)[:20].tolist() == list(range(80, 100)) and not (held & left).any()
    held, left = tail_masks(spans, 0.2, 30)  # too short a span gives nothing and keeps all
    assert not held[spans == 5].any() and left[spans == 5].all()


@pytest.mark.parametrize(
    ("partition", "clients", "sentence"),
    [
        (ud.Shards(11), 20, "asks for 11 classes per client, but the data have 10"),
        (ud.Shards(2), 4, "leaves some of the 10 classes without a holder; use at least 5 clients"),
        (ud.LabelSplit(), 11, "enough for at most 10 clients"),
        (ud.ByKey(), None, "needs data with a client column"),
        ("ByKey(largest=0)", None, "ByKey(largest) must be a whole number from 1, not 0"),
        ("Dirichlett(0.1)", 20, "no partition called 'Dirichlett'. Did you mean 'Dirichlet'"),
        ("Dirichlet(alfa=0.1)", 20, "Dirichlet has no argument 'alfa'"),
        (0.1, 20, "partition must be an object such as"),
        (ud.Dirichlet, 20, "partition must be an object such as"),
        (lambda labels, clients, rng, keys: labels + 15, 20, "must return an owner for each of the 1438 samples"),
    ],
)
def test_refusals(partition, clients, sentence):
    with pytest.raises(ud.UndriftError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        ud.load("digits", partition=partition, clients=clients)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ud.Dirichlet(0),
        lambda: ud.Dirichlet(float("nan")),
        lambda: ud.Dirichlet(1, 1),
        lambda: ud.Dirichlet(1, least=-1),
        lambda: ud.Shards(0),
        lambda: ud.Shards(1.5),
    ],
)
def test_bad_numbers_are_refused_when_they_are_written(make):
    with pytest.raises(ud.UndriftError, match="must be"):
        make()
