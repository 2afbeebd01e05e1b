"""What the rehearsal of the model costs: runs with it and without it, by turns.

    python -m benchmarks.rehearsal [--repeats 7] [--only digits] [--json FILE]

One row per model, all of them modules of the user's own:
  digits     the MLP of the README on digits, 30 rounds; the bound is 5% of the run
  resnet18   a ResNet-18 on pictures of 32 × 32, 2 rounds; the bound is a second on a GPU
  bert-tiny  a BERT with two layers, width 128, on sequences of 64 tokens, 2 rounds (needs transformers)
  lora       the same, frozen, with adapters of rank 8 (needs peft)
`seconds` is the median over pairs of the time of a run with its rehearsal less that of the run without, which uses what
the rehearsal has traced; `alone` the time of the rehearsal itself, and `run` that of a run without. The weights of both
runs must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift as ud
from benchmarks import record
from undrift.training import loop

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    module: Callable[[], nn.Module]
    data: Callable[[], ud.FederatedDataset]
    local: ud.Local
    rounds: int
    options: dict[str, Any]


class Block(nn.Module):
    """Two convolutions and a shortcut, as in He et al., Deep residual learning for image recognition, 2016."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(h)) + self.shortcut(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for i, outputs in enumerate((64, 128, 256, 512)):
        for j in range(2):
            layers.append(Block(width, outputs, 2 if i and not j else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def pictures() -> ud.FederatedDataset:
    x, y = torch.randn(4, 16, 3, 32, 32), torch.arange(64).view(4, 16) % 10
    return ud.FederatedDataset.from_clients(list(zip(x, y, strict=True)), test=(x[0], y[0]))


def sequences() -> ud.FederatedDataset:
    tokens, y = torch.randint(0, 1000, (4, 16, 64)), torch.arange(64).view(4, 16) % 4
    clients = [({"input_ids": own}, labels) for own, labels in zip(tokens, y, strict=True)]
    return ud.FederatedDataset.from_clients(clients, test=clients[0])


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=4, **sizes))


def lora() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"])
    model: nn.Module = get_peft_model(bert(), adapters)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


def digits() -> ud.FederatedDataset:
    return ud.load("digits", ud.Dirichlet(0.1), clients=20)


BATCHES = ud.Local(epochs=1, batch_size=8, lr=0.05)
CASES = {
    "digits": Case(mlp, digits, ud.Local(epochs=2, batch_size=10, lr=0.1), 30, {"participation": 0.5}),
    "resnet18": Case(resnet18, pictures, BATCHES, 2, {}),
    "bert-tiny": Case(bert, sequences, BATCHES, 2, {}),
    "lora": Case(lora, sequences, BATCHES, 2, {}),
}


def timed(case: Case, module: nn.Module, data: ud.FederatedDataset, rehearse: bool) -> tuple[float, ud.Result]:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = ud.train(
        module, data, rounds=case.rounds, local=case.local, device=DEVICE, rehearse=rehearse, **case.options
    )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def measured(name: str, repeats: int) -> dict[str, Any]:
    """A row: the first pair warms up."""
    case, alone = CASES[name], []
    torch.manual_seed(0)
    module, data = case.module(), case.data()
    rehearsed = loop.rehearse_model

    def watched(run: Any) -> Any:
        began = time.perf_counter()
        found = rehearsed(run)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if run.own_module is not None:
            alone.append(time.perf_counter() - began)
        return found

    loop.rehearse_model = watched
    pairs = []
    try:
        for i in range(repeats + 1):
            order = (True, False) if i % 2 else (False, True)
            pair = {rehearse: timed(case, module, data, rehearse) for rehearse in order}
            pairs.append((pair[True][0], pair[False][0]))
            (with_it, without) = (pair[rehearse][1].params for rehearse in (True, False))
            assert all(torch.equal(with_it[n], without[n]) for n in without), "the rehearsal has changed the run"
    finally:
        loop.rehearse_model = rehearsed
    more, run = (statistics.median(one) for one in zip(*[(a - b, b) for a, b in pairs[1:]], strict=True))
    return {
        "model": name, "engine": pair[True][1].choices["engine"], "run": run, "seconds": more,
        "share": more / run, "alone": statistics.median(alone[1:]), "repeats": repeats,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = record.Table(arguments.json, record.head("rehearsal"), "model")
    for name in CASES:
        if arguments.only in name:
            row = measured(name, arguments.repeats)
            table.add(row)
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
