"""Losses that return one number for a batch, such as Cox's partial likelihood, against loops by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift as ud
from tests.handloop import hand_loop
from tests.problems import distance, make_clients, net

FULL = ud.Local(epochs=2, batch_size=4, lr=0.1, drop_last=True)
SHORT = ud.Local(epochs=2, batch_size=4, lr=0.1)
SIZES = [9, 6, 14]


def cox(output: Tensor, target: Tensor) -> Tensor:
    """The negative logarithm of Cox's partial likelihood, per event."""
    time, event = target.unbind(1)
    order = time.argsort(descending=True)
    risk, event = output[order, 0], event[order]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """A supervised contrastive loss: samples of one class attract each other."""
    z = F.normalize(output, dim=1)
    alone = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / 0.5).masked_fill(alone, -torch.inf)
    same = (target[:, None] == target) & ~alone
    shares = -torch.where(same, torch.log_softmax(logits, 1), 0.0).sum(1) / same.sum(1).clamp(min=1)
    return shares.mean()


def patients(sizes: list[int]) -> ud.FederatedDataset:
    rng = np.random.default_rng(3)

    def some(n: int) -> tuple[Tensor, Tensor]:
        target = np.stack([rng.exponential(size=n), rng.random(n) < 0.7], 1)
        return torch.tensor(rng.normal(size=(n, 5))), torch.tensor(target)

    return ud.FederatedDataset.from_clients([some(n) for n in sizes], test=some(11))


class Seeded(nn.Sequential):
    def __init__(self, outputs: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))
        self.double()


@pytest.mark.parametrize(("local", "engine"), [(FULL, "lanes"), (SHORT, "plain")])
@pytest.mark.parametrize("loss", [cox, contrastive])
def test_training_is_that_of_a_loop_by_hand(loss, local, engine):
    data = patients(SIZES) if loss is cox else make_clients(SIZES)
    model = Seeded(1) if loss is cox else net()
    result = ud.train(model, data, rounds=2, local=local, loss=loss, engine="auto")
    assert result.choices["engine"] == engine
    assert ("the loss returns one number for a batch" in result.choices["why"]) == (engine == "plain")
    want = hand_loop(model, data, local, 2, loss)
    assert distance(dict(result.model.named_parameters()), want) < 1e-12
    if data.test:
        x, y = data.test
        with torch.no_grad():
            assert result.history[-1]["loss"] == pytest.approx(float(loss(result.model(x), y)))


def test_lanes_are_refused_where_batches_are_short():
    with pytest.raises(ud.UndriftError, match="the loss returns one number for a batch"):
        ud.train(Seeded(1), patients(SIZES), rounds=1, local=SHORT, loss=cox, engine="lanes")


@pytest.mark.parametrize("method", ["FedProx(0.1)", "Scaffold()", "FedNova()"])
def test_it_composes_with_methods(method):
    found = [
        ud.train(Seeded(1), patients(SIZES), method, rounds=2, local=FULL, loss=cox, engine=engine).model.state_dict()
        for engine in ("plain", "lanes")
    ]
    assert distance(*found) < 1e-12


@pytest.mark.parametrize("method", ["FedCurv(0.1)", "BalancedLoss()"])
def test_methods_that_need_each_samples_loss_refuse_it(method):
    with pytest.raises(ud.UndriftError, match=r"needs a loss for every sample"):
        ud.train(net(), make_clients(SIZES), method, rounds=1, local=FULL, loss=contrastive)


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_gradients_of_single_samples_refuse_it(engine):
    @dataclass(frozen=True)
    class Squares(ud.Part):
        def gradient(self, g, params, client):
            return ud.tree_map(lambda each: each.mean(0), client.gradients(params))

    with pytest.raises(ud.UndriftError, match="needs a loss for every sample"):
        ud.train(net(), make_clients(SIZES), Squares(), rounds=1, local=FULL, loss=contrastive, engine=engine)


@pytest.mark.parametrize(("function", "module"), [(F.cross_entropy, nn.CrossEntropyLoss()), (F.mse_loss, nn.MSELoss())])
def test_torchs_functions_are_their_modules(function, module):
    """So lanes may pad short batches."""
    data = make_clients(SIZES)
    if function is F.mse_loss:
        data = ud.FederatedDataset.from_clients([(data[i][0], data[i][0][:, :4]) for i in range(len(SIZES))])
    result = ud.train(net(), data, rounds=2, local=SHORT, loss=function)
    assert result.choices["engine"] == "lanes"
    assert distance(dict(result.model.named_parameters()), hand_loop(net(), data, SHORT, 2, module)) < 1e-12


def test_a_registered_loss_keeps_its_name_and_resumes(tmp_path):
    ud.register_loss("cox", cox)
    out, settings = tmp_path / "run", {"local": FULL, "loss": "cox"}
    whole = ud.train(Seeded(1), patients(SIZES), rounds=3, **settings)
    ud.train(Seeded(1), patients(SIZES), rounds=2, out=out, checkpoint_every=1, **settings)
    assert 'loss = "cox"' in (out / "config.toml").read_text(encoding="utf-8")
    resumed = ud.train(Seeded(1), patients(SIZES), rounds=3, out=out, resume=True, **settings)
    assert distance(resumed.model.state_dict(), whole.model.state_dict()) == 0


def test_a_metric_still_needs_one_value_per_sample():
    with pytest.raises(ud.UndriftError, match="The whole must return one value per sample"):
        ud.train(
            Seeded(1), patients(SIZES), rounds=1, local=FULL, loss=cox, metrics={"whole": cox}
        )  # fmt: skip


def test_clients_own_tests_have_batches_of_their_own():
    data = patients([40, 30, 50])
    pairs = [data[i] for i in range(3)]
    x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    held = ud.load((x, y), ud.IID(), 3, client_test_fraction=0.5)
    result = ud.train(Seeded(1), held, rounds=1, local=FULL, loss=cox)
    by_client = result.history[-1]["by_client"]["loss"]
    with torch.no_grad():
        want = [float(cox(result.model(held.client_test[i][0]), held.client_test[i][1])) for i in range(3)]
    assert by_client == pytest.approx(want)
