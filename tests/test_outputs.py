"""Evaluation by a traced forward pass: the same outputs, and a call of the model where it cannot be traced."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import undrift as ud
from tests import cuda_graphs
from undrift.engine.outputs import Outputs
from undrift.engine.ranks import ALONE
from undrift.functional.model import Model
from undrift.losses import model_loss
from undrift.training import evaluation
from undrift.training.build import prepare
from undrift.training.settings import Settings


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


class Branches(Plain):
    """Looks at values in evaluation mode, which a traced pass cannot."""

    def forward(self, x):
        z = super().forward(x)
        return z if self.training or z.sum() > 0 else -z


class Leaves(Plain):
    """Looks at values in a way that tracing does not notice."""

    def forward(self, x):
        z = super().forward(x)
        return z if self.training else z * float(x.numpy().max())


class Several(Plain):
    """Has outputs that are not tensors."""

    def forward(self, x):
        return {"logits": super().forward(x), "loss": None}


class Counts(Plain):
    """Gives other outputs from the second call in evaluation mode on, which a traced pass does not."""

    calls = 0

    def forward(self, x):
        if self.training:
            return super().forward(x)
        Counts.calls += 1
        return super().forward(x) * Counts.calls


def settings(model):
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 6, generator=generator), torch.arange(n) % 3) for n in (20, 12, 9)]
    test = torch.randn(25, 6, generator=generator), torch.arange(25) % 3
    data = ud.FederatedDataset.from_clients(clients, test=test)
    torch.manual_seed(1)
    local = ud.Local(steps=3, batch_size=4, lr=0.1, drop_last=True)
    return {"model": model(), "data": data, "rounds": 3, "local": local, "engine": "lanes"}


def trained(model, **options):
    return ud.train(**settings(model), **options)


def run_of(model):
    return prepare(Settings(**settings(model), method=ud.FedAvg()), ALONE)


@pytest.fixture
def seen(monkeypatch):
    """Batches of ten, and whether each run ended with a traced pass."""
    monkeypatch.setattr(evaluation, "BATCH", 10)
    found, values = [], evaluation.metric_values
    monkeypatch.setattr(
        evaluation, "metric_values", lambda run, sums: found.append(run.outputs.traced) or values(run, sums)
    )
    return found


@pytest.mark.parametrize("model", [Plain, Branches])
def test_the_same_history(model, seen, monkeypatch):
    wanted = trained(model)
    assert not any(seen)
    cuda_graphs.put_in_place(monkeypatch)
    found = trained(model)
    assert seen[-1] == (model is Plain)
    for row, other in zip(found.history, wanted.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["accuracy"] == other["accuracy"] and row["class_accuracy"] == other["class_accuracy"]


@pytest.mark.parametrize("model", [Counts, Leaves])
def test_outputs_that_tracing_would_change_are_noticed(model, seen, monkeypatch):
    cuda_graphs.put_in_place(monkeypatch)
    trained(model, rehearse=False)  # which would refuse a model that counts its calls
    assert not seen[-1]


def test_every_shape_is_checked():
    """Batches of 6 and 4 by turns: the second of each shape shows that a value has become a constant."""
    model = run_of(Leaves).model
    outputs = Outputs(model, traced=True)
    x = torch.rand(10, 6)
    for i in range(3):
        for own in (x[:6] + i, x[6:] + i):
            outputs(model.start, model.tracked, own)
    assert not outputs.traced


def test_outputs_that_are_not_tensors(seen, monkeypatch):
    def loss(output, target):
        assert output["loss"] is None
        return nn.functional.cross_entropy(output["logits"], target, reduction="none")

    cuda_graphs.put_in_place(monkeypatch)
    run = trained(Several, output="all", loss=loss)
    assert seen[-1] and "loss" in run.history[-1]


class Frozen(Plain):
    """A large output of a layer that does not train, and weights that are larger than that."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.large = nn.Linear(6, 500), nn.Linear(500, 5000)
        for w in self.wide.parameters():
            w.requires_grad = False

    def forward(self, x):
        return super().forward(x) + 1e-6 * self.large(self.wide(x)).sum(1, keepdim=True)


def test_the_memory_of_a_sample():
    plain, frozen = (Outputs(run_of(model).model, traced=False) for model in (Plain, Frozen))
    assert plain.sample_bytes == 4 * 8 and frozen.sample_bytes == 4 * 5000
    low = Outputs(prepare(Settings(**settings(Frozen), method=ud.FedAvg(), precision="bfloat16"), ALONE).model, False)
    assert low.sample_bytes == 2 * 5000, "casts of weights do not count"


@pytest.mark.parametrize(
    ("samples", "runs", "bytes_per_sample", "most", "wanted"),
    [
        (25, 1, 100, None, 25),  # 200 kB, so at most 2,000 samples of 100 bytes
        (5000, 1, 100, None, 1667),
        (2001, 1, 100, None, 1001),
        (1000, 8, 100, None, 250),
        (0, 1, 100, None, 1),
        (1000, 10**6, 100, None, 1),
        (5000, 1, 100, 30, 30),
        (5000, 1, 1, None, 2500),  # 72 kB of samples of 24 bytes
        (5000, 1, None, None, 1000),  # not known
    ],
)
def test_batches_fill_a_gpu(samples, runs, bytes_per_sample, most, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**7))
    monkeypatch.setattr(evaluation, "BATCH_BYTES", 72_000)
    run = SimpleNamespace(
        device=torch.device("cuda"),
        device_data=SimpleNamespace(sample=torch.zeros(1, 6)),
        outputs=SimpleNamespace(sample_bytes=bytes_per_sample, most=most),
        loss=None,
    )
    assert evaluation.batch_size(run, samples, runs) == wanted
    run.loss = model_loss
    assert evaluation.batch_size(run, samples, runs) == min(1000, most or 1000), "it depends on the batch"


@pytest.mark.parametrize("traced", [False, True])
def test_batches_are_halved_where_memory_runs_out(traced, monkeypatch, caplog):
    wanted, seen, called = trained(Plain), [], Outputs._called
    if traced:
        cuda_graphs.put_in_place(monkeypatch)

    def limited(self, params, tracked, x):
        seen.append(len(x))
        if len(x) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return called(self, params, tracked, x)

    monkeypatch.setattr(Outputs, "_called", limited)
    caplog.set_level("DEBUG", "undrift")
    found = trained(Plain)
    assert seen[:3] == [25, 12, 6] and max(seen[3:]) == 6, "larger ones are not tried again"
    assert "without tracing" not in caplog.text
    assert "batches of 6 samples" in caplog.text
    for row, other in zip(found.history, wanted.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-6) and row["accuracy"] == other["accuracy"]


def test_batches_of_clients_own_tests_are_halved_too(monkeypatch):
    clients = [(torch.randn(n, 6), torch.arange(n) % 3) for n in (20, 12)]
    data = replace(ud.FederatedDataset.from_clients(clients, test=clients), test_rows=None)
    options = {"rounds": 1, "local": ud.Local(steps=1, batch_size=4, lr=0.1)}
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    wanted = ud.train(model, data, **options).history[-1]
    call, seen = Model.__call__, []

    def limited(self, params, x):
        seen.append(len(x))
        if len(x) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, params, x)

    monkeypatch.setattr(Model, "__call__", limited)
    found = ud.train(model, data, **options).history[-1]
    assert 32 in seen and found["client_loss"] == pytest.approx(wanted["client_loss"], rel=1e-6)


def test_an_interrupted_evaluation_ends_at_once(monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 5)
    seen = []

    def interrupted(output, target):
        seen.append(len(target))
        if len(target) == 5:
            raise KeyboardInterrupt
        return target.double()

    with pytest.raises(KeyboardInterrupt):
        trained(Plain, metrics={"figure": interrupted})
    assert seen.count(5) == 1


def test_processes_share_samples_whatever_fits_into_their_memory():
    index, found = torch.arange(3300), []
    for rank, most in ((0, None), (1, 7)):
        run = SimpleNamespace(
            device=torch.device("cpu"),
            device_data=SimpleNamespace(sample=torch.zeros(1, 6)),
            outputs=SimpleNamespace(sample_bytes=None, most=most),
            ranks=SimpleNamespace(several=True, rank=rank, size=2),
        )
        found.append(evaluation.rank_share(run, index))
    assert sorted(torch.cat(found).tolist()) == index.tolist() and min(map(len, found)) > 1000
