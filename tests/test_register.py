"""Losses, metrics and partitions of users, by name in files and on the command line; names of the literature."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import undrift as ud
from undrift import losses, metrics
from undrift.data import partition_names
from undrift.method.parse import parse_method
from undrift.tools.cli import app

MODULE = '''
from dataclasses import dataclass

import torch
import undrift as ud


@dataclass(frozen=True)
class Halves:
    """The first half of the classes to the first half of the clients, and so on."""

    classes: int = 10

    def __call__(self, labels, clients, rng, keys):
        half = clients // 2
        return (labels >= self.classes // 2) * half + rng.integers(0, half, len(labels))


class Count:
    """The number of samples, as an object that sees every batch."""

    higher_is_better = True

    def __init__(self):
        self.seen = 0

    def update(self, output, target):
        self.seen += len(target)

    def compute(self):
        return torch.tensor(float(self.seen))

    def reset(self):
        self.seen = 0


ud.register_partition("Halves", Halves)
ud.register_loss("twice", lambda z, y: 2 * torch.nn.functional.cross_entropy(z, y, reduction="none"))
ud.register_metric("certain", lambda output, target: (output.softmax(-1).amax(-1) > 0.2).float())
ud.register_metric("count", Count())
'''
FILE = """
model = "logistic"
rounds = 2
loss = "twice"
metrics = ["accuracy", "certain", "count"]
[data]
name = "digits"
partition = "Halves(classes=10)"
clients = 4
[local]
steps = 2
batch_size = 16
lr = 0.1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the module and the experiment; what the module registers is forgotten again."""
    (tmp_path / "own_names.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "experiment.toml").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(losses, "LOSSES", dict(losses.LOSSES))
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    monkeypatch.setattr("undrift.training.record.METRICS", metrics.METRICS)
    monkeypatch.setattr(partition_names, "OWN", {})
    yield tmp_path
    sys.modules.pop("own_names", None)


def command(*arguments: str) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == 0, found.output
    return found.output


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def test_a_file_may_name_what_a_module_registers(folder):
    command("run", "experiment.toml", "--import", "own_names", "--out", "runs/first")
    rows = [json.loads(line) for line in (folder / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["count"] == 359 and 0 <= rows[-1]["certain"] <= 1
    config = (folder / "runs/first/config.toml").read_text(encoding="utf-8")
    assert 'loss = "twice"' in config and 'metrics = ["accuracy", "certain", "count"]' in config
    assert 'partition = "Halves(classes=10)"' in config and "of Python" not in config
    command("run", "runs/first", "--trust", "--out", "runs/again")
    first, again = (weights(folder / "runs" / name) for name in ("first", "again"))
    assert all(torch.equal(first[name], w) for name, w in again.items())


def test_what_is_registered_is_what_is_used(folder):
    command("run", "experiment.toml", "--import", "own_names", "--out", "runs/first")
    module = sys.modules["own_names"]
    data = ud.load("digits", module.Halves(), clients=4)
    assert {len(set(data[i][1].tolist())) for i in range(4)} == {5}
    local = ud.Local(steps=2, batch_size=16, lr=0.1)

    def loss(output, target):
        return 2 * torch.nn.functional.cross_entropy(output, target, reduction="none")

    run = ud.train("logistic", data, rounds=2, local=local, loss=loss)
    found = weights(folder / "runs/first")
    assert all(torch.equal(run.params[name], w) for name, w in found.items())


@pytest.mark.parametrize(
    ("register", "sentence"),
    [
        (lambda: ud.register_loss("mse", len), "cannot be called 'mse', which is one of undrift's"),
        (lambda: ud.register_loss("mine", 3), "loss must be a name or a function"),
        (lambda: ud.register_metric("accuracy", len), "cannot be called 'accuracy'"),
        (lambda: ud.register_metric("loss", len), "cannot be called 'loss', which is a column of the history"),
        (lambda: ud.register_metric("mine", "accuracy of mine"), "There is no metric called 'accuracy of mine'"),
        (lambda: ud.register_partition("IID", len), "cannot be called 'IID'"),
        (lambda: ud.register_partition("by size", len), "cannot be called 'by size'"),
    ],
)
def test_names_and_things_that_cannot_be_registered(folder, register, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        register()


@pytest.mark.parametrize("name", ud.IN_THE_LITERATURE)
def test_names_of_the_literature_lead_to_ours(name):
    ours = ud.IN_THE_LITERATURE[name]
    with pytest.raises(ud.UndriftError) as error:
        parse_method(f"{name}(lr=0.1)")
    assert str(error.value) == f"There is no method called {name!r}. Here it is {ours}."
    with pytest.raises(AttributeError, match="here it is"):
        getattr(ud, name)
    if name != "FedOpt":
        parse_method(ours)
