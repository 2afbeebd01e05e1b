"""undrift's Flower apps beside stock Flower FedAvg: time inside the server and client apps, transport excluded.

    .venv/flower/bin/python -m benchmarks.federation [--samples 2000] [--repeats 5] [--dropout]

Two nodes of one client each train pfl-research's CNN (`cifar10.py`) for one epoch, by turns in one process, with
everything that an app does between a message and its reply: data, model, weights from bytes, training, bytes. Seconds
are those of the processor, which other work on the machine changes little. Stock is what Flower's own PyTorch example
does, with its FedAvg's aggregation. Imports are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import undrift as ud
from benchmarks.cifar10 import BATCH, CNN, LR
from undrift.flower.engine import Trouble
from undrift.flower.node import Node
from undrift.flower.server import serve
from undrift.tools import config

NODES = 2


def problem(count: int) -> Callable[[], Any]:
    def made() -> Any:
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (NODES * count, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return (x, torch.randint(0, 10, (NODES * count,), generator=draw)), (x[:10], torch.zeros(10).long())

    return made


class Timed:
    """Nodes in this process; seconds are counted by node."""

    def __init__(self, experiment: config.Experiment, folder: str) -> None:
        places = [{"partition-id": i, "num-partitions": NODES, "state": f"{folder}/{i}"} for i in range(NODES)]
        self.nodes = {f"{i:064x}": Node(experiment, place) for i, place in enumerate(places)}
        self.inside: list[float] = []
        self.waited = 0.0

    def ask(self, kind: str, requests: dict[str, bytes]) -> dict[str, bytes | Trouble]:
        begun, found = time.process_time(), {}
        for key, request in requests.items():
            start = time.process_time()
            found[key] = self.nodes[key].answer(kind, request)
            if kind == "train":
                self.inside.append(time.process_time() - start)
        self.waited += time.process_time() - begun
        return found


def ours(rounds: int) -> tuple[float, float]:
    """Seconds inside a client app per message, and inside the server app per round."""
    settings = {
        "model": "benchmark_cnn", "rounds": rounds, "evaluate_every": 10**6, "device": "cpu",
        "data": {"name": "benchmark", "partition": "IID()", "clients": NODES},
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        experiment = config.checked(settings, "the benchmark")
        link, ends = Timed(experiment, folder), []

        def on_round(row: dict[str, Any]) -> None:
            ends.append((time.process_time(), link.waited))

        serve(experiment, link, lambda: list(link.nodes), Path(folder) / "out", on_round=on_round)
    server = [(b[0] - a[0]) - (b[1] - a[1]) for a, b in pairwise(ends[:-1])]
    return statistics.median(link.inside), statistics.median(server)


def stock(rounds: int, data: Callable[[], Any], count: int, network: Callable[[], CNN]) -> tuple[float, float]:
    """The same with Flower's records and aggregation."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    def client(weights: ArrayRecord, node: int) -> RecordDict:
        (x, y), _ = data()
        rows = torch.arange(node * count, (node + 1) * count)[torch.randperm(count)]
        model = network()
        model.load_state_dict(weights.to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), LR)
        model.train()
        for batch in rows.split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch].float() / 255), y[batch]).backward()
            optimizer.step()
        done = MetricRecord({"num-examples": count})
        return RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": done})

    inside, server, weights = [], [], network().state_dict()
    for _ in range(rounds):
        start = time.process_time()
        sent, replies = ArrayRecord(weights), []
        spent = time.process_time() - start
        for node in range(NODES):
            start = time.process_time()
            replies.append(client(sent, node))
            inside.append(time.process_time() - start)
        start = time.process_time()
        weights = aggregate_arrayrecords(replies, "num-examples").to_torch_state_dict()
        server.append(spent + time.process_time() - start)
    return statistics.median(inside), statistics.median(server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dropout", action="store_true", help="draws by key cost a CPU more than torch's")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    data = problem(chosen.samples)
    ud.register_data("benchmark", data)
    network = partial(CNN, dropout=chosen.dropout)
    ud.register_model("benchmark_cnn", lambda classes, shape: network())
    sides: dict[str, list[tuple[float, float]]] = {"stock": [], "undrift": []}
    for _ in range(chosen.repeats):
        sides["stock"].append(stock(chosen.rounds, data, chosen.samples, network))
        sides["undrift"].append(ours(chosen.rounds))
    best = {name: [min(t) for t in zip(*found, strict=True)] for name, found in sides.items()}
    for name, (client, server) in best.items():
        print(f"{name:8}  client app {client:7.3f} s per message   server app {server:7.3f} s per round")
    sums = {name: NODES * client + server for name, (client, server) in best.items()}
    print(f"inside the apps, undrift ÷ stock: {sums['undrift'] / sums['stock']:.3f}")


if __name__ == "__main__":
    main()
