"""undrift's Flower apps beside stock Flower FedAvg: time inside the apps, and whole rounds on real nodes.

    .venv/flower/bin/python -m benchmarks.federation [--rounds 4] [--repeats 3] [--json FILE]

*Inside the apps* is everything that an app does between a message and its reply: data, model, weights from bytes,
training, bytes. Both sides answer by turns in this process; seconds are those of the processor, which other work on the
machine changes little, and imports are left out. Draws are the seconds of it in which undrift computes dropout's random
words, each a function of a key, where torch's come from a global generator.

*Whole rounds* are as the server sees them, by turns on the same two SuperNodes of this machine, with TLS and keys:
messages, a process per message and its imports included. The problem is in `flower_stock.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import undrift.random
from benchmarks.cifar10 import BATCH, LR
from benchmarks.flower_stock import EACH, NODES, network, train, write_stock
from benchmarks.record import Table, head
from undrift.flower.engine import Trouble
from undrift.flower.new import as_toml, write_app
from undrift.flower.node import Node
from undrift.flower.server import serve
from undrift.flower.uncompiled import leave_compiler_out
from undrift.tools import config

Seconds = dict[str, float]


def settings(rounds: int, dropout: bool) -> dict[str, Any]:
    return {
        "model": f"benchmark_cnn(dropout={dropout})", "rounds": rounds, "evaluate_every": 10**6, "device": "cpu",
        "threads": 1, "imports": ["benchmarks.flower_stock"],
        "data": {"name": "benchmark", "partition": "IID()", "clients": NODES},
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR},
    }  # fmt: skip


class Timed:
    """Nodes in this process, and the seconds of each answer."""

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


@contextmanager
def timed_draws() -> Iterator[list[float]]:
    """The seconds of each call of the keyed generator."""
    found, drawn = [], undrift.random.philox

    def timed(counter: Any, key: Any) -> Any:
        start = time.process_time()
        words = drawn(counter, key)
        found.append(time.process_time() - start)
        return words

    undrift.random.philox = timed
    try:
        yield found
    finally:
        undrift.random.philox = drawn


def ours(rounds: int, dropout: bool) -> Seconds:
    """Seconds inside a client app per message, of which draws, and inside the server app per round."""
    with tempfile.TemporaryDirectory() as folder, timed_draws() as draws:
        experiment = config.checked(settings(rounds, dropout), "the benchmark")
        link, ends = Timed(experiment, folder), []

        def on_round(row: dict[str, Any]) -> None:
            ends.append((time.process_time(), link.waited))

        serve(experiment, link, lambda: list(link.nodes), Path(folder) / "out", on_round=on_round)
    server = [(b[0] - a[0]) - (b[1] - a[1]) for a, b in pairwise(ends[:-1])]
    client = statistics.median(link.inside)
    return {"client": client, "draws": sum(draws) / len(link.inside), "server": statistics.median(server)}


def stock(rounds: int, dropout: bool) -> Seconds:
    """The same with Flower's records and aggregation."""
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    inside, server, weights = [], [], network(dropout=dropout).state_dict()
    for _ in range(rounds):
        start = time.process_time()
        sent, replies = ArrayRecord(weights), []
        spent = time.process_time() - start
        for node in range(NODES):
            start = time.process_time()
            replies.append(train(sent, node, dropout))
            inside.append(time.process_time() - start)
        start = time.process_time()
        weights = aggregate_arrayrecords(replies, "num-examples").to_torch_state_dict()
        server.append(spent + time.process_time() - start)
    return {"client": statistics.median(inside), "draws": 0.0, "server": statistics.median(server)}


def whole(folder: Path, rounds: int, repeats: int, dropout: bool) -> dict[str, list[float]]:
    """Seconds of whole rounds by side, without the first of each run, and without undrift's last, which evaluates."""
    from undrift.flower.up import federation

    (folder / "e.toml").write_text(as_toml(settings(rounds, dropout)), encoding="utf-8")
    write_app(folder / "undrift", folder / "e.toml", nodes=NODES)
    server = "from pathlib import Path\n\nfrom benchmarks.flower_stock import undrift_server\n\n"
    server += 'app = undrift_server(Path(__file__).with_name("experiment.toml"))\n'
    (folder / "undrift" / "app" / "server.py").write_text(server, encoding="utf-8")
    apps = {"stock": write_stock(folder / "stock"), "undrift": folder / "undrift"}
    found: dict[str, list[float]] = {side: [] for side in apps}
    with federation(folder / "grounds", NODES) as grounds:
        for turn in range(repeats):
            for side, app in apps.items():
                out = folder / f"{side}-{turn}"
                given = {"rounds": rounds, "dropout": dropout} if side == "stock" else {}
                well, why = grounds.wait(grounds.submit(app, out, **given), out, 3600)
                if not well:
                    raise SystemExit(f"{side}: {why}")
                ends = json.loads((out / "ends.json").read_text("utf-8"))
                took = [after - before for before, after in pairwise(ends)]
                found[side] += took[1:] if side == "stock" else took[:-1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "federation.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    leave_compiler_out()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    shared = {"samples": EACH, "nodes": NODES, "rounds": chosen.rounds, "repeats": chosen.repeats}
    table = Table(chosen.json, head("federation", **shared), "dropout", "side")
    for dropout in (False, True):
        sides: dict[str, list[Seconds]] = {"stock": [], "undrift": []}
        for _ in range(chosen.repeats):
            sides["stock"].append(stock(chosen.rounds, dropout))
            sides["undrift"].append(ours(chosen.rounds, dropout))
        with tempfile.TemporaryDirectory() as folder:
            rounds = whole(Path(folder), chosen.rounds, chosen.repeats, dropout)
        for side, found in sides.items():
            median = {name: statistics.median(turn[name] for turn in found) for name in found[0]}
            inside = NODES * median["client"] + median["server"]
            row = {"dropout": dropout, "side": side, **median, "inside": inside}
            table.add(row | {"round": statistics.median(rounds[side]), "rounds": sorted(rounds[side])})
            print(json.dumps(table.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
