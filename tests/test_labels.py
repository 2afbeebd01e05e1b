"""Labels that are missing (-100), and targets with a class at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift as ud
from tests.handloop import hand_loop
from tests.problems import distance, net
from undrift.data.partition_summary import heterogeneity, partition_summary
from undrift.losses import accuracy, cross_entropy

SIZES = [7, 1, 4, 10]
LOCAL = ud.Local(epochs=2, batch_size=3, lr=0.3)


def torchs(z: Tensor, y: Tensor) -> Tensor:
    """torch's cross-entropy, one sample at a time: the mean over its labels that are not ignored, 0 without any."""
    found = [F.cross_entropy(a[None], b[None], ignore_index=-100) for a, b in zip(z, y, strict=True)]
    return torch.stack(found).nan_to_num(0.0)


# ---- samples without a label ----------------------------------------------------------------------------------
def partly(sizes=SIZES, missing=-100, seed=0) -> ud.FederatedDataset:
    rng = np.random.default_rng(seed)

    def make(n: int) -> tuple[Tensor, Tensor]:
        y = torch.tensor(rng.integers(0, 4, n))
        return torch.tensor(rng.normal(size=(n, 6))), torch.where(torch.tensor(rng.random(n) < 0.4), missing, y)

    return ud.FederatedDataset.from_clients([make(n) for n in sizes], test=make(30))


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_unlabelled_samples_have_no_loss_and_do_not_count_as_right_or_wrong(engine):
    data = partly()
    result = ud.train(net(), data, rounds=3, local=LOCAL, engine=engine)
    want = hand_loop(net(), data, LOCAL, 3, lambda z, y: torchs(z, y).mean())
    assert distance(dict(result.model.named_parameters()), want) < 1e-12
    model = net()
    model.load_state_dict(want)
    x, y = data.test
    with torch.no_grad():
        z = model(x)
    kept, right = y >= 0, z.argmax(1) == y
    assert 0 < int(kept.sum()) < len(y)
    row = result.history[-1]
    assert row["accuracy"] == pytest.approx(float(right[kept].double().mean()))
    assert row["loss"] == pytest.approx(float(torchs(z, y).mean()))
    assert row["class_accuracy"] == pytest.approx([float(right[y == c].double().mean()) for c in range(4)])


@pytest.mark.parametrize("missing", [-100, -1])
def test_counts_leave_them_out(missing):
    data = partly(missing=missing)
    for i, counts in enumerate(data.label_counts()):
        assert counts.tolist() == [int((data[i][1] == c).sum()) for c in range(4)]
    assert data.classes == data.outputs == 4
    assert heterogeneity(data)["classes"] == 4 and len(partition_summary(data)["counts"]) == len(SIZES)


def test_own_losses_may_use_any_label_below_0():
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, ignore_index=-1, reduction="none")

    data = partly(missing=-1)
    found = [
        ud.train(net(), data, rounds=2, local=LOCAL, loss=loss, metrics="accuracy", engine=engine)
        for engine in ("plain", "lanes")
    ]
    assert distance(*(run.model.state_dict() for run in found)) < 1e-12
    kept = data.test[1] >= 0
    with torch.no_grad():
        z = found[0].model(data.test[0])
    right = (z.argmax(1) == data.test[1])[kept]
    assert found[0].history[-1]["accuracy"] == pytest.approx(float(right.double().mean()))
    with pytest.raises(ud.UndriftError, match=r"labels run from -1 to 3.*-100 for no label"):
        ud.train(net(), data, rounds=1, local=LOCAL)


def test_data_without_any_label():
    x, none = torch.zeros(3, 6, dtype=torch.float64), torch.full((3,), -100)
    data = ud.FederatedDataset.from_clients([(x, none)])
    assert data.classes == 0 and data.label_counts().shape == (1, 0) and "classes" not in heterogeneity(data)
    with pytest.raises(ud.UndriftError, match="labels are all -100"):
        ud.train(net(), data, rounds=1, local=LOCAL)
    ud.train(net(), data, rounds=1, local=LOCAL, loss=lambda z, y: z.square().mean(1))


def test_one_output_counts_labels_of_minus_one():
    """Labels may be ±1 where the model has one output: only -100 stands for none."""
    z, y = torch.tensor([[0.5], [-0.5], [0.5], [0.5]]), torch.tensor([1, -1, -1, -100])
    right, counted = accuracy(z, y)
    assert right.tolist() == [True, True, False, False] and counted.tolist() == [True, True, True, False]


# ---- a class at every position --------------------------------------------------------------------------------
def positions(shape: tuple[int, ...], classes: int, sizes=SIZES) -> ud.FederatedDataset:
    """Samples of this shape with a class at every position, 30% of which are missing, and some samples' entirely."""
    rng = np.random.default_rng(1)

    def make(n: int) -> tuple[Tensor, Tensor]:
        y = torch.tensor(rng.integers(0, classes, (n, *shape)))
        y = torch.where(torch.tensor(rng.random(y.shape) < 0.3), -100, y)
        y[n // 2 :: 4] = -100
        return torch.tensor(rng.normal(size=(n, 2, *shape))), y

    return ud.FederatedDataset.from_clients([make(n) for n in sizes], test=make(11))


class Tagger(nn.Module):
    """Outputs N×T×C."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.head = nn.Linear(2, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.transpose(-1, -2))


def segmenter() -> nn.Module:
    """Outputs N×C×H×W."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Conv2d(2, 5, 3, padding=1).double()


CASES = {"last": (Tagger, (7,), lambda z, y: torchs(z.transpose(1, 2), y)), "second": (segmenter, (4, 3), torchs)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_a_sample_counts_once_whatever_it_has_of_labels(case, engine):
    make, shape, loss = CASES[case]
    data = positions(shape, 5)
    result = ud.train(make(), data, rounds=2, local=LOCAL, engine=engine)
    want = hand_loop(make(), data, LOCAL, 2, lambda z, y: loss(z, y).mean())
    assert distance(dict(result.model.named_parameters()), want) < 1e-12
    model = make()
    model.load_state_dict(want)
    x, y = data.test
    with torch.no_grad():
        z = model(x)
    best = z.argmax(2 if case == "last" else 1)
    assert result.history[-1]["loss"] == pytest.approx(float(loss(z, y).mean()))
    assert result.history[-1]["accuracy"] == pytest.approx(float((best == y)[y >= 0].double().mean()))
    assert "class_accuracy" not in result.history[-1]


def test_the_gradient_of_an_unlabelled_sample_is_zero():
    z = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0, -100, 2], [-100, -100, -100]])
    losses = cross_entropy(z, y)
    assert losses.tolist() == pytest.approx(torchs(z.transpose(1, 2), y).tolist()) and losses[1] == 0
    (g,) = torch.autograd.grad(losses.sum(), z)
    assert not g[1].any() and not g[0, 1].any() and g[0, 0].any()


@pytest.mark.parametrize(
    ("output", "target", "sentence"),
    [
        ((5, 5), (5,), r"\(5,\) per sample and the outputs \(5, 5\): the classes may be the last axis or the second"),
        ((4, 3, 3), (3, 4), "labels need one axis less than outputs"),
        ((4,), (4,), 'choose loss="binary_cross_entropy"'),
    ],
)
def test_shapes_that_do_not_tell_the_classes_are_refused(output, target, sentence):
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(output))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.expand(len(x), *output)

    data = ud.FederatedDataset.from_clients([(torch.zeros(3, 2), torch.zeros(3, *target, dtype=torch.int64))])
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(Fixed(), data, rounds=1, local=LOCAL)


@pytest.mark.parametrize("wrong", [5, -1])
def test_a_class_that_the_model_does_not_have_is_refused_at_any_position(wrong):
    data = positions((4, 3), 5)
    data.store["y"][-1, -1, -1] = wrong
    with pytest.raises(ud.UndriftError, match=r"clients' labels run from .* but the model has 5 outputs"):
        ud.train(segmenter(), data, rounds=1, local=LOCAL)


def test_squared_hinge_takes_one_label_per_sample():
    with pytest.raises(ud.UndriftError, match="this loss needs one per sample"):
        ud.train(segmenter(), positions((4, 3), 5), rounds=1, local=LOCAL, loss="squared_hinge")


def test_the_run_folder_names_the_loss(tmp_path):
    ud.train(net(), partly(), rounds=1, local=LOCAL, out=tmp_path / "run")
    assert 'loss = "cross_entropy"' in (tmp_path / "run" / "config.toml").read_text()
