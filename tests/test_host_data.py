"""Data that stay on the host give the bits of data on the device: batches, padding, passes and evaluations."""

from __future__ import annotations

import copy
import gc
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import undrift as ud
from tests import cuda_graphs
from tests.carries import CARRIES
from tests.parts import METHOD
from tests.problems import distance, make_clients, net, same_bits, split
from undrift.data.cache import is_mapped
from undrift.data.images import standardised
from undrift.data.samples import take
from undrift.data.text import Bags, Windows, sequences
from undrift.engine import feed, graph
from undrift.engine.host_samples import HostSamples
from undrift.engine.placement import Placement, store_bytes

UNEVEN = [23, 5, 0, 41, 10, 17, 1]
LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Own(ud.Part):
    """Every client has a last layer of its own."""

    personal = ("3.*",)


def both(make, data, method="FedAvg()", **settings):
    settings = {"rounds": 2, "local": LOCAL, "device": "cpu"} | settings
    found = [ud.train(make(), data, method, data_on=where, **settings) for where in ("device", "host")]
    assert [result.choices["data"] for result in found] == ["device", "host"]
    assert same_bits(found[0].params, found[1].params)
    timeless = [
        [{name: value for name, value in row.items() if "seconds" not in name} for row in result.history]
        for result in found
    ]
    assert repr(timeless[0]) == repr(timeless[1])
    return found[1]


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of at most three steps, so that segments have several."""
    monkeypatch.setattr(graph, "PIECE_STEPS", 3)


@pytest.mark.parametrize(
    "engine", [{"engine": "plain"}, {"lanes": 2}, pytest.param({"lanes": 6}, marks=pytest.mark.long)]
)
def test_every_hook_and_engine(short_pieces, engine):
    both(net, make_clients(UNEVEN), METHOD, **engine)


@pytest.mark.parametrize("method", CARRIES, ids=lambda part: type(part).__name__)
def test_what_a_client_keeps_of_a_batch_is_its_own(short_pieces, method):
    both(net, make_clients(UNEVEN), method, lanes=3)


def test_through_graphs(monkeypatch, short_pieces):
    cuda_graphs.put_in_place(monkeypatch)
    both(net, make_clients(UNEVEN), ud.Scaffold(correction="after"), lanes=6)
    both(net, make_clients(UNEVEN), ud.FedCurv(0.5), lanes=2)


def test_pictures_normalised_and_augmented(short_pieces, tmp_path, monkeypatch):
    x = torch.arange(60 * 3 * 6 * 6, dtype=torch.int64).mul(7919).remainder(251).to(torch.uint8).reshape(60, 3, 6, 6)
    data = ud.load((x, torch.arange(60) % 3), ud.Dirichlet(0.5), clients=4, augment=ud.CropFlip(), test_fraction=0.2)
    data = with_mean(data)

    def conv():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))

    for lanes in (1, 3):
        both(conv, data, lanes=lanes)


def with_mean(data: ud.FederatedDataset) -> ud.FederatedDataset:
    """As `normalize=True` makes it of images in files."""
    more = {"mean": torch.tensor([0.3, 0.4, 0.5])[:, None, None], "std": torch.tensor([0.9, 1.1, 0.7])[:, None, None]}
    store = data.store | more
    test = replace(data.test_rows, store=store, take=standardised)
    return replace(data, store=store, take=standardised, test_rows=test)


def test_windows_of_text():
    text = torch.arange(400).mul(31).remainder(7).to(torch.uint8)
    store = {"x": text, "y": text[5:]}
    rows = np.arange(380)
    data = ud.FederatedDataset.from_owners(
        store, rows, rows // 100, 4, take=Windows(5), task=ud.Task(classes=7, vocabulary=7)
    )
    make = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(20, 7)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = make()
    both(lambda: copy.deepcopy(first), data, lanes=2)


def test_bags_and_sequences_in_halves():
    store = {"x": torch.arange(40, dtype=torch.int32).reshape(10, 4) % 6, "y": torch.arange(20).reshape(10, 2) % 4}
    rows = torch.tensor([3, 3, 0, 9])
    for each in (Bags(6, 4), sequences):
        x, y = each(store, rows)
        found = HostSamples(store, each, torch.device("cpu"))
        a, b = found.finish(found.rows(rows.numpy().reshape(2, 2)), 2)
        assert torch.equal(a.flatten(0, 1), x) and torch.equal(b.flatten(0, 1), y) and a.dtype == x.dtype


def test_several_inputs_passes_and_clients_own_data(short_pieces):
    both(net, split(), ud.FedCurv(0.5), personalize_every=1, lanes=2)
    both(net, split(), Own(), personalize_every=1, lanes=2)
    data = make_clients(UNEVEN)
    clients = [((x[:, :2], x[:, 2:]), y) for x, y in (data[i] for i in range(len(data)))]

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, a, b):
            return self.inner(torch.cat([a, b], 1))

    for engine in ("plain", "lanes"):
        both(Pair, ud.FederatedDataset.from_clients(clients), engine=engine)


def test_ones_own_take_runs_on_the_host_also_in_lanes():
    files = make_clients(UNEVEN)

    def from_files(store, rows):
        assert threading.current_thread() is not None
        return 2 * torch.stack([files.store["x"][i] for i in rows.tolist()]), store["y"][rows]

    data = replace(files, take=from_files, test_rows=None, server_rows=None)
    plain = ud.train(net(), data, rounds=2, local=LOCAL, engine="plain")
    host = ud.train(net(), data, rounds=2, local=LOCAL, data_on="host")
    assert host.choices["engine"] == "lanes" and distance(host.params, plain.params) < 1e-12


def test_an_error_in_the_background_is_raised_where_the_data_are_needed():
    files, calls = make_clients([40, 40]), []

    def broken(store, rows):
        calls.append(len(rows))
        if len(calls) > 12:
            raise OSError(5, "gone", "/the/disk")
        return take(store, rows)

    data = replace(files, take=broken, test_rows=None, server_rows=None)
    before = threading.active_count()
    with pytest.raises(OSError, match="gone"):
        ud.train(net(), data, rounds=9, local=LOCAL, data_on="host", engine="lanes")
    assert threading.active_count() == before


def test_a_feed_stays_a_few_pieces_ahead():
    gathered, used = [], 0

    def gather(indices):
        gathered.append(len(indices))
        return torch.from_numpy(indices)

    items = [(np.arange(10).reshape(10, 1), np.arange(10))] * 3
    with feed.Feed(items, gather, feed.CPU_PIECE_BYTES // 2, torch.device("cpu")) as fed:
        for item in fed:
            steps = 0
            for rows, numbers in item:
                assert torch.equal(rows[:, 0], numbers) and len(rows) == 2
                steps, used = steps + len(rows), used + 1
                time.sleep(0.005)
                assert used <= len(gathered) < used + feed.CPU_AHEAD
            assert steps == 10
    assert gathered == [2] * 15
    with feed.Feed(items, gather, feed.CPU_PIECE_BYTES, torch.device("cpu")) as fed:
        next(next(fed))
        time.sleep(0.05)
    assert len(gathered) <= 15 + feed.CPU_AHEAD + 1  # one was used, and the rest was not read


def test_where_data_lie_is_checked_and_shown():
    data = make_clients([4, 4])
    assert ud.train(net(), data, rounds=1, local=LOCAL).choices["data"] == "device"
    with pytest.raises(ud.UndriftError, match='data_on must be "auto"'):
        ud.train(net(), data, rounds=1, local=LOCAL, data_on="gpu")


def test_what_is_too_large_for_a_gpu_stays(monkeypatch):
    free = 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    data = make_clients([4, 4])
    taken, place = store_bytes(data.store), Placement(torch.device("cuda"), "auto")
    free = 2 * taken
    assert place.reason(data.store)[0] == "device"
    free = 2 * taken - 1
    assert place.reason(data.store)[0] == "host" and place.stays(data.store)
    views = {"x": data.store["x"], "y": data.store["x"][1:]}
    assert store_bytes(views) == data.store["x"].nbytes


def test_data_from_the_cache_are_on_disk(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("a,b,label\n" + "".join(f"{i},{i % 5},{i % 2}\n" for i in range(40)))
    data = ud.load(table, ud.IID(), clients=4, test_fraction=0.2)
    assert Placement(torch.device("cpu"), "host").reason(data.store)[0] == "disk"
    del data
    gc.collect()
    assert not any(is_mapped(torch.zeros(n)) for n in range(1, 50))
