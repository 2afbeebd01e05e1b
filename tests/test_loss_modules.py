"""torch's loss modules, which reduce a batch, as losses with one value per sample; and losses that models compute."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift as ud
from tests.handloop import hand_loop
from tests.problems import distance, make_clients, net
from undrift.losses import get_loss, model_loss
from undrift.training.identity import describe

SIZES = [7, 1, 4, 10]
LOCAL = ud.Local(epochs=2, batch_size=3, lr=0.3)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)


def with_targets(make) -> ud.FederatedDataset:
    """The clients of `make_clients`, with other targets."""
    rng, plain = np.random.default_rng(5), make_clients(SIZES)
    return ud.FederatedDataset.from_clients([(plain[i][0], make(rng, n)) for i, n in enumerate(SIZES)])


def numbers(rng: np.random.Generator, n: int) -> Tensor:
    return torch.tensor(rng.normal(size=(n, 4)))


def marks(rng: np.random.Generator, n: int) -> Tensor:
    return torch.tensor(rng.integers(0, 2, (n, 4))).double()


def shares(rng: np.random.Generator, n: int) -> Tensor:
    return torch.tensor(rng.dirichlet(np.ones(4), n))


ALIKE = {
    "cross-entropy": (nn.CrossEntropyLoss(), None),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), None),
    "shares": (nn.CrossEntropyLoss(), shares),
    "mse": (nn.MSELoss(), numbers),
    "l1": (nn.L1Loss(), numbers),
    "huber": (nn.HuberLoss(delta=0.5), numbers),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), marks),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), shares),
}


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_the_mean_over_a_batch_is_torchs(case, engine):
    module, targets = ALIKE[case]
    data = with_targets(targets) if targets else make_clients(SIZES)
    found = ud.train(net(), data, rounds=2, local=LOCAL, loss=module, engine=engine).model
    assert distance(dict(found.named_parameters()), hand_loop(net(), data, LOCAL, 2, module)) < 1e-12
    assert module.reduction == ALIKE[case][0].reduction != "none", "the caller's module is left alone"


@pytest.mark.parametrize(
    "module",
    [nn.CrossEntropyLoss(WEIGHT), nn.CrossEntropyLoss(WEIGHT, ignore_index=1), nn.CrossEntropyLoss(ignore_index=2)],
)
def test_class_weights_are_torchs(module):
    """torch divides by the sum of the weights over the batch, so padding would count where a batch is short."""
    for sizes, engine in ((SIZES, "plain"), ([9, 3, 12], "lanes")):
        data = make_clients(sizes)
        found = ud.train(net(), data, rounds=2, local=LOCAL, loss=module)
        assert found.choices["engine"] == engine
        assert distance(dict(found.model.named_parameters()), hand_loop(net(), data, LOCAL, 2, module)) < 1e-12


def test_a_samples_own_values_are_averaged_or_summed(caplog):
    z, y = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.allclose(get_loss(nn.MSELoss(reduction="none"))(z, y), (z - y).square().mean((1, 2)))
    with caplog.at_level(logging.WARNING, "undrift"):
        assert torch.allclose(get_loss(nn.MSELoss(reduction="sum"))(z, y), (z - y).square().sum((1, 2)))
    assert "over the samples of a batch, undrift takes the mean" in caplog.text


@pytest.mark.parametrize("ignored", [-100, 2])
def test_positions_that_are_ignored_do_not_count(ignored):
    z = torch.randn(3, 4, 6, dtype=torch.float64)
    y = torch.randint(0, 4, (3, 6), generator=torch.Generator().manual_seed(0))
    y[0, :2], y[2] = ignored, ignored
    found = get_loss(nn.CrossEntropyLoss(ignore_index=ignored))(z, y)
    assert torch.allclose(found.mean(), F.cross_entropy(z, y, ignore_index=ignored)) and found[2] == 0


class Sum(nn.modules.loss._Loss):
    """A loss made of two, as monai's DiceCELoss is: their values without reduction do not go together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.MSELoss(), nn.CrossEntropyLoss()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.a(z.softmax(1).mean((2, 3)), torch.full_like(z[:, :, 0, 0], 0.25)) + self.b(z, y)


def test_a_loss_made_of_others_is_called_on_one_sample_at_a_time():
    z, y = torch.randn(4, 4, 3, 2, dtype=torch.float64), torch.randint(0, 4, (4, 3, 2))
    found = get_loss(Sum())(z, y)
    assert found.shape == (4,) and torch.allclose(found.mean(), Sum()(z, y))
    assert torch.allclose(torch.func.vmap(get_loss(Sum()))(z[None], y[None])[0], found)


@pytest.mark.parametrize(
    ("loss", "targets", "sentence"),
    [
        (nn.MSELoss(), lambda rng, n: torch.zeros(n, 1), "would be broadcast; give both one shape"),
        (lambda z, y: z.square(), None, r"append .flatten\(1\).mean\(1\)"),
        (nn.CosineEmbeddingLoss(), None, "The loss does not take outputs"),
    ],
)
def test_what_has_no_value_per_sample_gets_a_sentence(loss, targets, sentence):
    data = with_targets(targets) if targets else make_clients(SIZES)
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(net(), data, rounds=1, local=LOCAL, loss=loss)


def test_modules_that_cannot_be_taken_apart_are_refused():
    learned = nn.MSELoss()
    learned.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ud.UndriftError, match="parameters of its own"):
        get_loss(learned)
    across = nn.MSELoss()
    across.batch = True
    with pytest.raises(ud.UndriftError, match="looks across a batch"):
        get_loss(across)


def test_the_identity_of_a_run_has_all_of_a_modules_settings():
    losses = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(WEIGHT)]
    assert len({describe(get_loss(loss)) for loss in losses}) == 3
    assert describe(get_loss(nn.HuberLoss(delta=2.0))) == describe(get_loss(nn.HuberLoss(delta=2.0)))


def test_a_run_with_a_module_resumes(tmp_path):
    data, loss = make_clients(SIZES), nn.CrossEntropyLoss(label_smoothing=0.1)
    whole = ud.train(net(), data, rounds=3, local=LOCAL, loss=loss)
    ud.train(net(), data, rounds=2, local=LOCAL, loss=loss, out=tmp_path / "run")
    rest = ud.train(net(), data, rounds=3, local=LOCAL, loss=loss, out=tmp_path / "run", resume=True)
    assert distance(rest.model.state_dict(), whole.model.state_dict()) == 0


# ---- the model's own loss -------------------------------------------------------------------------------------
def test_the_models_own_loss():
    assert get_loss("model") is model_loss
    y, each = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    assert model_loss({"loss": torch.tensor(2.0), "logits": y}, y).tolist() == [2.0] * 3
    assert model_loss(SimpleNamespace(loss=each), y).tolist() == [1, 2, 3]
    assert model_loss({"loss": torch.stack([each, each + 2], 1)}, y).tolist() == [2, 3, 4]
    for nothing in ({"logits": y}, SimpleNamespace(loss=None), y):
        with pytest.raises(ud.UndriftError, match='a model whose output has a "loss"'):
            model_loss(nothing, y)


class Wrapping(nn.Module):
    """Its mean over one sample loses the class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction, self.inner = "mean", nn.CrossEntropyLoss(WEIGHT)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.inner(z, y)


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"
        self.register_buffer("w", WEIGHT)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, self.w, reduction=self.reduction)


@pytest.mark.parametrize("module", [Wrapping(), Weighing()])
def test_a_mean_that_is_not_that_of_the_samples_is_the_modules(module):
    data = make_clients(SIZES)
    found = ud.train(net(), data, rounds=2, local=LOCAL, loss=module)
    assert found.choices["engine"] == "plain"
    assert distance(dict(found.model.named_parameters()), hand_loop(net(), data, LOCAL, 2, module)) < 1e-12


def test_an_ignored_label_may_be_no_class():
    z, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 255, 3, 1, 255])
    module = nn.CrossEntropyLoss(WEIGHT, ignore_index=255)
    assert torch.allclose(get_loss(module)(z, y).mean(), module(z, y))


def test_a_weighted_loss_over_more_than_one_batch_is_that_of_all():
    data = make_clients([40])
    x = torch.randn(1500, 6, dtype=torch.float64)
    y = torch.randint(0, 4, (1500,))
    y[1000:] = 0
    data = ud.FederatedDataset.from_clients([data[0]], test=(x, y))
    found = ud.train(net(), data, rounds=1, local=LOCAL, loss=nn.CrossEntropyLoss(WEIGHT))
    assert found.history[-1]["loss"] == pytest.approx(F.cross_entropy(found.model(x), y, WEIGHT).item())


def test_weighted_losses_are_not_measured_on_padded_batches():
    local = ud.Local(epochs=2, batch_size=3, lr=0.1, drop_last=True)
    runs = [
        ud.train(
            net(),
            make_clients([11, 7, 9]),
            ud.FedCurv(0.5),
            rounds=3,
            local=local,
            loss=nn.CrossEntropyLoss(WEIGHT),
            engine=e,
        )
        for e in ("auto", "plain")
    ]
    assert distance(runs[0].params, runs[1].params) == 0
