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
from undrift.data import partition
from undrift.method.parse import parse_method
from undrift.tools import compare
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


class Plain:
    """Not a dataclass: two of them are never equal, and nothing says what they are."""

    def __call__(self, labels, clients, rng, keys):
        return labels % clients


class Distance:
    """Half the squared distance to the right answer, of which less is better, though its name does not say so."""

    higher_is_better = False

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, output, target):
        right = torch.nn.functional.one_hot(target, output.shape[-1])
        self.total += float((output.softmax(-1) - right).square().sum()) / 2
        self.count += len(target)

    def compute(self):
        return torch.tensor(self.total / self.count)

    def reset(self):
        self.total, self.count = 0.0, 0


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
ud.register_metric("brier", Distance())
ud.register_partition("Plain", Plain)
ud.register_partition("halves", lambda classes=10: Halves(classes))
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
    monkeypatch.setattr("undrift.training.config_writer.METRICS", metrics.METRICS)
    monkeypatch.setattr(partition, "REGISTERED", {})
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


@pytest.mark.parametrize("text", ["Plain()", "halves(classes=10)"])
def test_a_partition_is_recorded_as_it_was_written(folder, text):
    command("run", "experiment.toml", "--import", "own_names", "--set", f"data.partition={text}", "--out", "runs/first")
    config = (folder / "runs/first/config.toml").read_text(encoding="utf-8")
    assert f'partition = "{text}"' in config and "of Python" not in config
    command("run", "runs/first", "--trust", "--out", "runs/again")
    module = sys.modules["own_names"]
    assert ud.load("digits", module.Plain(), clients=4).origin is None
    assert ud.load("digits", module.Halves(), clients=4).origin["partition"] == "Halves(classes=10)"


def test_a_metric_that_is_better_lower_is_chosen_by_and_compared_so(folder):
    settings = ["--set", 'metrics=["brier"]', "--set", "data.validation_fraction=0.2", "--set", "rounds=4"]
    said = command(
        "sweep", "experiment.toml", "--import", "own_names", *settings, "--grid", "local.lr=[0.0001, 0.5]", "--out", "s"
    )
    assert "best by validation brier: local.lr=0.5" in said.replace("_", " ")
    metrics.METRICS.pop("brier")  # as in a process that does not know the module
    runs, _ = compare.read_runs([path.parent for path in (folder / "s").glob("*/metrics.jsonl")])
    (best,) = (run for run in runs if run.settings["local.lr"] == 0.5)
    assert compare.leading_metric([best]) == "brier"
    assert best.best("brier") == min(row["brier"] for row in best.rows) < max(row["brier"] for row in best.rows)
    assert best.lower("client_brier_worst") and not best.lower("accuracy")


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
