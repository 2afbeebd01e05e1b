from __future__ import annotations

import numpy as np
import pytest
import torch

import undrift as ud


def test_from_clients_keeps_rows_in_order(uneven):
    assert len(uneven) == 7 and uneven.sizes.tolist() == [23, 5, 0, 41, 10, 17, 1]
    x, y = uneven[3]
    assert x.shape == (41, 6) and y.shape == (41,) and torch.equal(uneven[-1][0], uneven[6][0])
    assert len(uneven[2][0]) == 0 and 2 not in uneven.nonempty
    again = ud.FederatedDataset.from_clients([uneven[i] for i in range(7)])
    assert all(torch.equal(again[i][0], uneven[i][0]) for i in range(7))
    with pytest.raises(IndexError, match="7 clients"):
        uneven[7]


def test_label_counts(uneven):
    table = uneven.label_counts()
    assert table.shape == (7, 4)
    for i in range(7):
        assert table[i].tolist() == torch.bincount(uneven[i][1], minlength=4).tolist()
    assert torch.equal(uneven._count(np.array([5, 0, 2])), table[[5, 0, 2]])


def test_lists_and_arrays_will_do():
    data = ud.FederatedDataset.from_clients(
        [([[1.0], [2.0]], [0, 1]), (np.zeros((1, 1)), np.array([1], np.uint8)), ([], [])]
    )
    assert len(data) == 3 and data.classes == 2 and data.sizes.tolist() == [2, 1, 0]


def test_bytes_of_pictures_become_floats():
    data = ud.FederatedDataset.from_clients([(torch.tensor([[[0, 255]]], dtype=torch.uint8), [0])])
    assert data.store["x"].dtype == torch.uint8 and data[0][0].tolist() == [[[0.0, 1.0]]]


def test_digits():
    data = ud.load("digits", partition=ud.Dirichlet(alpha=0.1), clients=20, seed=0)
    assert len(data) == 20 and data.sizes.sum() == 1438 and len(data.test[0]) == 359 and data.classes == 10
    assert data.test[0].shape == (359, 1, 8, 8) and 0 <= data.test[0].min() and data.test[0].max() == 1
    other = ud.load("digits", partition="Dirichlet(0.1)", clients=20, seed=1)
    assert other.sizes.tolist() != data.sizes.tolist() and torch.equal(other.test[0], data.test[0])


def test_fractions_are_disjoint_balanced_and_taken_out_of_training():
    data = ud.load(
        "digits", ud.IID(), clients=4, server_fraction=0.05, validation_fraction=0.1, client_test_fraction=0.2
    )
    own = data.client_test
    parts = [data.index, own.index, data.server_rows.index, data.validation_rows.index]
    assert torch.cat(parts).sort().values.tolist() == list(range(1438))
    assert len(data.server[0]) == 71 and len(data.validation[0]) == 143
    assert np.ptp(np.bincount(data.server[1])) <= 2 and np.ptp(np.bincount(data.validation[1])) <= 3
    assert np.abs(own.sizes / (own.sizes + data.sizes) - 0.2).max() < 0.01


X, Y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
NAN = torch.tensor([[0.0, 0.0], [0.0, float("nan")], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ud.FederatedDataset.from_clients([(X, Y), (NAN, Y)]), "Client 1, sample 1 has NaN in its x"),
        (lambda: ud.FederatedDataset.from_clients([(X, Y), (X / 0 + 1 / X, Y)]), "Client 1, sample 0 has"),
        (lambda: ud.FederatedDataset.from_clients([(X, Y)], test=(NAN, Y)), "Sample 1 of the test data has NaN"),
        (lambda: ud.FederatedDataset.from_clients([(X, Y[:2])]), "as many x as y"),
        (lambda: ud.FederatedDataset.from_clients([(X, Y), (X[:, :1], Y)]), "Client 1's samples are .1,."),
        (lambda: ud.FederatedDataset.from_clients([X]), "client 0 must be a pair"),
        (lambda: ud.FederatedDataset.from_clients(None), "a list with one .x, y. per client"),
        (lambda: ud.FederatedDataset.from_clients([([], [])]), "No client has any data"),
        (lambda: ud.FederatedDataset.from_clients([(X, X[:, 0])]).label_counts(), "targets that are classes"),
        (lambda: ud.load("digit", ud.IID(), clients=2), "no data set called 'digit'. Did you mean 'digits'"),
        (lambda: ud.load("digits", ud.IID()), "clients must be a whole number from 1"),
        (lambda: ud.load("digits", ud.ByKey(), clients=3), "leave `clients` out"),
        (lambda: ud.load("digits", ud.IID(), clients=3, server_fraction=1.0), "server_fraction must be in"),
        (lambda: ud.load("digits", ud.IID(), clients=3, server_fraction=0.6, validation_fraction=0.4), "leave nothing"),
    ],
)
def test_bad_data_get_a_sentence(make, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        make()
