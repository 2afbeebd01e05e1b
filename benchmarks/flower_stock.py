"""The federation that `federation.py` times, for both sides: data and network, and stock Flower's apps for it.

Two nodes of one client each train pfl-research's CNN (`cifar10.py`) for one epoch. The stock side is what Flower's own
PyTorch example does, with Flower's FedAvg.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import undrift as ud
from benchmarks.cifar10 import BATCH, CNN, LR

NODES, EACH = 2, 2000

Split = tuple[Tensor, Tensor]


def samples() -> tuple[Split, Split]:
    """All nodes' training data, and some to hold out."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (NODES * EACH, 3, 32, 32), generator=draw, dtype=torch.uint8)
    return (x, torch.randint(0, 10, (NODES * EACH,), generator=draw)), (x[:10], torch.zeros(10).long())


def network(classes: int = 10, shape: Any = None, dropout: bool = False) -> CNN:
    return CNN(dropout=dropout)


def train(weights: Any, node: int, dropout: bool) -> Any:
    """What a stock client app does between a message and its reply: Flower's records in and out."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict

    (x, y), _ = samples()
    indices = torch.arange(node * EACH, (node + 1) * EACH)[torch.randperm(EACH)]
    model = network(dropout=dropout)
    model.load_state_dict(weights.to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    model.train()
    for batch in indices.split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch].float() / 255), y[batch]).backward()
        optimizer.step()
    done = MetricRecord({"num-examples": EACH})
    return RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": done})


def client_app() -> Any:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        node, dropout = int(context.node_config["partition-id"]), bool(context.run_config["dropout"])
        return Message(train(message.content["arrays"], node, dropout), reply_to=message)

    return app


def server_app() -> Any:
    """Flower's FedAvg, which notes when its rounds end, and when the first begins."""
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config, ends = context.run_config, Ends(Path(str(context.run_config["out"])))
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
        strategy.start(
            grid, ArrayRecord(network(dropout=bool(config["dropout"])).state_dict()), int(config["rounds"]),
            evaluate_fn=ends.note,
        )  # fmt: skip
        (ends.out / "status.json").write_text(json.dumps({"status": "finished"}), encoding="utf-8")

    return app


class Ends:
    """When rounds ended, in `ends.json`."""

    def __init__(self, out: Path) -> None:
        self.out, self.times = out, list[float]()

    def note(self, *_: Any) -> None:
        self.times.append(time.monotonic())
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "ends.json").write_text(json.dumps(self.times), encoding="utf-8")


def undrift_server(experiment: Path) -> Any:
    """undrift's server app, which notes when its rounds end."""
    from undrift.flower import apps

    serve = apps.run_server

    def run_server(read: Any, grid: Any, given: Any) -> Any:
        apps.tell = Ends(Path(str(given["out"]))).note
        return serve(read, grid, given)

    apps.run_server = run_server
    return apps.server_app(experiment)


PROJECT = """\
[project]
name = "stock"
version = "1.0.0"
description = "Stock Flower FedAvg"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "undrift"

[tool.flwr.app.components]
serverapp = "stock.server:app"
clientapp = "stock.client:app"

[tool.flwr.app.config]
out = ""
rounds = 1
dropout = false
"""


def write_stock(folder: Path) -> Path:
    """The stock apps in a folder that `flwr run` starts."""
    (folder / "stock").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "stock" / "__init__.py").write_text("", encoding="utf-8")
    for side in ("server", "client"):
        text = f"from benchmarks.flower_stock import {side}_app\n\napp = {side}_app()\n"
        (folder / "stock" / f"{side}.py").write_text(text, encoding="utf-8")
    return folder


ud.register_data("benchmark", samples)
ud.register_model("benchmark_cnn", network)
