"""BalancedLoss: class weights of each client's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import undrift as ud
from tests.problems import distance, make_clients, net, same_bits

SIZES = [7, 1, 4, 10]
LOCAL = ud.Local(epochs=2, batch_size=3, lr=0.3)


def weights_of(y: Tensor, power: float) -> dict[int, float]:
    """`n·n_c^(−p) / Σ_k n_k^(1−p)` by class."""
    counts = {int(c): int((y == c).sum()) for c in y.unique() if c >= 0}
    n, below = sum(counts.values()), sum(count ** (1 - power) for count in counts.values())
    return {c: n * count**-power / below for c, count in counts.items()}


def by_hand(data: ud.FederatedDataset, power: float, mu: float, rounds: int) -> dict[str, Tensor]:
    model = net()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for t in range(rounds):
        total = {n: torch.zeros_like(w) for n, w in start.items()}
        for c in range(len(data)):
            model.load_state_dict(start)
            x, y = data[c]
            weights = weights_of(y, power)
            for rows in ud.batches(data, LOCAL, client=c, round=t, seed=0):
                own = torch.tensor([weights.get(int(label), 1.0) for label in y[rows]], dtype=torch.float64)
                losses = F.cross_entropy(model(x[rows]), y[rows], reduction="none")
                grads = torch.autograd.grad((own * losses).mean(), list(model.parameters()))
                with torch.no_grad():
                    for (n, p), g in zip(model.named_parameters(), grads, strict=True):
                        p.sub_(LOCAL.lr * (g + mu * (p - start[n])))
            for n, p in model.named_parameters():
                total[n] += len(y) / data.sizes.sum() * p.detach()
        start = total
    return start


@pytest.mark.parametrize(("power", "mu"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.2)])
@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_training_is_that_of_a_loop_by_hand(power, mu, engine):
    data, part = make_clients(SIZES), ud.BalancedLoss(power)
    method = part + ud.FedProx(mu) if mu else part
    found = ud.train(net(), data, method, rounds=3, local=LOCAL, engine=engine).model
    want = by_hand(data, power, mu, 3)
    assert distance(dict(found.named_parameters()), want) < 1e-12
    assert distance(want, by_hand(data, 0.0, mu, 3)) > 1e-3, "clients' classes are uneven, so weights matter"


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_samples_without_a_label_keep_their_weight(engine):
    rng, plain = np.random.default_rng(3), make_clients(SIZES)
    pairs = [plain[i] for i in range(len(SIZES))]
    pairs = [(x, torch.where(torch.tensor(rng.random(len(y)) < 0.3), -100, y)) for x, y in pairs]
    pairs[2] = (pairs[2][0], torch.full((4,), -100))  # a client without any label
    data = ud.FederatedDataset.from_clients(pairs)
    found = ud.train(net(), data, ud.BalancedLoss(), rounds=2, local=LOCAL, engine=engine).model
    assert distance(dict(found.named_parameters()), by_hand(data, 1.0, 0.0, 2)) < 1e-12


def test_power_0_is_fedavg_and_the_mean_weight_is_1():
    data = make_clients(SIZES)
    runs = [ud.train(net(), data, method, rounds=2, local=LOCAL) for method in (ud.BalancedLoss(0), ud.FedAvg())]
    assert distance(*(run.model.state_dict() for run in runs)) < 1e-14
    for i in range(len(data)):
        weights = weights_of(data[i][1], 0.7)
        assert np.mean([weights[int(label)] for label in data[i][1]]) == pytest.approx(1)


def test_expressions_know_it_and_its_power_may_be_a_schedule():
    data = make_clients(SIZES)
    methods = ["BalancedLoss(power=decay(1, 0.5)) + FedProx(0.1)", ud.BalancedLoss(ud.decay(1, 0.5)) + ud.FedProx(0.1)]
    runs = [ud.train(net(), data, method, rounds=3, local=LOCAL) for method in methods]
    assert same_bits(*(run.model.state_dict() for run in runs))


def test_targets_must_be_classes_with_outputs_of_their_own():
    x = torch.zeros(3, 6, dtype=torch.float64)
    data = ud.FederatedDataset.from_clients([(x, torch.zeros(3, 4, dtype=torch.float64))])
    with pytest.raises(ud.UndriftError, match="BalancedLoss needs labels that are classes"):
        ud.train(net(), data, ud.BalancedLoss(), rounds=1, local=LOCAL, loss="mse")
    data = ud.FederatedDataset.from_clients([(x, torch.tensor([0, 5, 9]))])
    with pytest.raises(ud.UndriftError, match="an output for every class"):
        ud.train(net(), data, ud.BalancedLoss(), rounds=1, local=LOCAL, loss=lambda z, y: z.square().mean(1))
