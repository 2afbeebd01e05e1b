"""Very many clients: what is found piece by piece, or dealt out for all clients at once, is what loops would find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import undrift as ud
from undrift.data import array_ops, partition, partition_summary
from undrift.data.array_ops import lexsort, stable_argsort, unique_inverse
from undrift.data.source import ClientNumbers, client_names
from undrift.engine.client_states import ClientStates
from undrift.method import local
from undrift.method.local import Local


def generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[3, 4]))


def owned(sizes: list[int], labels: np.ndarray | None = None) -> ud.FederatedDataset:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y = np.arange(len(owner)) % 3 if labels is None else labels
    store = {"x": torch.arange(len(owner), dtype=torch.float32)[:, None], "y": torch.from_numpy(y)}
    return ud.FederatedDataset.from_owners(store, np.arange(len(owner)), owner, len(sizes))


@pytest.mark.parametrize(("clients", "classes", "each"), [(1, 4, 4), (9, 10, 2), (50, 7, 3), (33, 12, 8), (200, 5, 1)])
@pytest.mark.parametrize("block", [1, 64, 1 << 22])
def test_classes_are_dealt_out_as_by_a_loop(monkeypatch, clients, classes, each, block):
    monkeypatch.setattr(partition, "BLOCK", block)
    rng, ours = generator(), generator()
    held: list[list[int]] = [[] for _ in range(classes)]
    for client in range(clients):
        load = np.array([len(h) for h in held]) + rng.random(classes)
        for c in np.argsort(load)[:each]:
            held[c].append(client)
    dealt = partition.clients_by_class(partition.least_held_classes(clients, classes, each, ours), classes)
    assert [h.tolist() for h in dealt] == held and rng.random() == ours.random()

    held = [[] for _ in range(classes)]
    for client in range(clients):
        others = rng.permutation(np.delete(np.arange(classes), client % classes))[: each - 1]
        for c in (client % classes, *others):
            held[c].append(client)
    dealt = partition.clients_by_class(partition.own_class_and_others(clients, classes, each, ours), classes)
    assert [h.tolist() for h in dealt] == held and rng.random() == ours.random()


@pytest.mark.parametrize("block", [1, 50, 1 << 22])
@pytest.mark.parametrize(("gamma", "low", "high"), [(1e-3, 0.9, 1.0), (1.0, 0.6, 0.9), (1e6, 0.4, 0.7)])
def test_blocks_of_clients_get_their_samples(monkeypatch, block, gamma, low, high):
    monkeypatch.setattr(partition, "BLOCK", block)
    monkeypatch.setattr(partition, "ONE_BY_ONE", 10)
    labels = generator().choice(5, 1003, p=[0.5, 0.2, 0.2, 0.09, 0.01])
    owner = ud.DirichletPrior(gamma)(labels, 100, generator(), None)
    sizes = np.bincount(owner, minlength=100)
    assert len(owner) == 1003 and sizes.sum() == 1003 and set(sizes) == {10, 11}
    most = [np.bincount(labels[owner == c], minlength=5).max() / sizes[c] for c in range(100)]
    assert low <= np.mean(most) <= high, "a client's most frequent class"


def test_blocks_have_the_mix_of_one_by_one(monkeypatch):
    labels = np.repeat(np.arange(4), 3000)
    monkeypatch.setattr(partition, "BLOCK", 400)

    def spread(one_by_one: int) -> float:
        monkeypatch.setattr(partition, "ONE_BY_ONE", one_by_one)
        owner = ud.DirichletPrior(0.5)(labels, 600, generator(), None)
        shares = np.bincount(owner * 4 + labels, minlength=2400).reshape(600, 4) / 20
        return float(shares.std())

    assert spread(10) == pytest.approx(spread(1000), abs=0.01)


def test_facts_piece_by_piece(monkeypatch):
    monkeypatch.setattr(array_ops, "CHUNK", 7)
    rng = generator()
    for clients in (1, 6, 7, 8, 50, 300):
        sizes = np.where(rng.random(clients) < 0.3, 0, rng.integers(1, 9, clients))
        sizes[-1] = 5
        data = owned(sizes.tolist(), rng.integers(-2, 6, sizes.sum()))
        some = sizes[sizes > 0]
        assert data.population == len(some) and data.largest == sizes.max() and data.sizes.tolist() == sizes.tolist()
        assert [array.tolist() for array in data.size_counts] == [
            a.tolist() for a in np.unique(some, return_counts=True)
        ]
        assert array_ops.median_size(*data.size_counts) == np.median(some)
        places = np.arange(len(some))
        assert data.holders(places).tolist() == data.nonempty.tolist() == np.flatnonzero(sizes).tolist()
        assert data.sizes_of(data.nonempty).tolist() == some.tolist()
        labels = data.store["y"][data.index].numpy()
        assert (
            array_ops.first_occurrences(data.store["y"], data.index).tolist()
            == np.unique(labels, return_index=True)[1].tolist()
        )
        rest = labels[labels != -2]
        assert array_ops.label_range(data.store["y"], data.index, None) == (labels.min(), labels.max())
        assert array_ops.label_range(data.store["y"], data.index, -2) == (
            (rest.min(), rest.max()) if len(rest) else None
        )
        for work in (Local(epochs=3, batch_size=2, lr=1), Local(steps=list(range(1, clients + 1)), lr=1)):
            steps = work.step_counts(0, data.nonempty, some)
            assert work.spread(0, data) == (steps.mean(), steps.max())


def test_listed_clients_are_at_ranks_by_size(monkeypatch):
    monkeypatch.setattr(partition_summary, "MOST", 20)
    sizes = generator().integers(0, 6, 300)
    held = np.flatnonzero(sizes)
    ranks = np.linspace(0, len(held) - 1, 20).round().astype(np.int64)
    found = partition_summary.partition_summary(owned(sizes.tolist()))
    assert found["listed"] == held[np.argsort(-sizes[held], kind="stable")[ranks]].tolist()
    assert found["sizes"] == sizes[found["listed"]].tolist() and found["empty"] == 300 - len(held)
    assert (found["median"], found["samples"]) == (np.median(sizes[held]), sizes.sum())


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint32])
def test_sorting_and_numbering(dtype):
    numbers = generator().integers(0, 90, 1000).astype(dtype)
    numbers.flags.writeable = False
    assert stable_argsort(numbers).tolist() == np.argsort(numbers, kind="stable").tolist()
    chance = generator().random(1000)
    assert lexsort(chance, numbers).tolist() == np.lexsort((chance, numbers)).tolist()
    assert (
        lexsort(chance.round(1), numbers % 3, numbers).tolist()
        == np.lexsort((chance.round(1), numbers % 3, numbers)).tolist()
    )
    for keys in (numbers, numbers.astype(np.int64) * 10**12, -numbers.astype(np.int64), numbers.astype(str)):
        known, place = unique_inverse(keys)
        assert (known[place] == keys).all() and known.tolist() == np.unique(keys).tolist()
    pools = [np.sort(pool).tolist() for pool in partition.shuffled_by_class(numbers, generator())]
    assert pools == [np.flatnonzero(numbers == c).tolist() for c in np.unique(numbers)]


def test_names_of_numbers():
    names = client_names(np.array([3, 5, 70]), None)
    assert (
        isinstance(names, ClientNumbers)
        and names == ["3", "5", "70"]
        and names[1:] == ["5", "70"]
        and names[-1] == "70"
    )
    assert names != ["3", "5"] and list(names) == ["3", "5", "70"]
    assert client_names(np.array([0, 2]), ["a", "b", "c"]) == ["a", "c"]


@pytest.mark.parametrize("method", ["FedAvg()", "Scaffold()"])
def test_training_makes_no_array_of_all_clients(method):
    data = owned([2] * 5000)
    ud.train("mlp", data, method, rounds=2, local=Local(epochs=1, batch_size=2, lr=1e-4), participation=5)
    assert "sizes" not in vars(data) and "nonempty" not in vars(data)


@pytest.mark.parametrize("batch_size", [None, 3, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch, batch_size, drop_last):
    rng = generator()
    for clients in (1, 2, 9):
        sizes, steps = rng.integers(1, 20, clients), rng.integers(1, 9, clients)
        width = int(sizes.max()) if batch_size is None else batch_size
        given = (5, 2, np.arange(clients), sizes, steps, batch_size, width, 2, drop_last)
        whole = local.cohort_batches(*given)
        for piece in (1, 30):
            monkeypatch.setattr(local, "PIECE", piece)
            found = local.cohort_batches(*given)
            for name in ("positions", "counts", "first"):
                assert np.array_equal(getattr(found, name), getattr(whole, name))
        monkeypatch.undo()


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_states_are_fetched_as_clients_start(monkeypatch, engine):
    """Never for more of the cohort than train side by side."""
    fetched, reader = [], ClientStates.reader

    def watched(*args):
        found = reader(*args)
        return lambda where: fetched.append(len(where)) or found(where)

    monkeypatch.setattr(ClientStates, "reader", watched)
    work = Local(epochs=1, batch_size=2, lr=1e-4)
    lanes = 2 if engine == "lanes" else None
    ud.train("mlp", owned([2, 4, 1, 6, 3, 2]), "Scaffold()", rounds=2, local=work, engine=engine, lanes=lanes)
    assert fetched.pop(0) == 1, "before the first round, to find how much a state takes"
    assert max(fetched) == (lanes or 1) and sum(fetched) == 2 * 6
