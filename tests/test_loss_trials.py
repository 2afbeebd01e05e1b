"""Losses and metrics of users that broadcast, couple samples, or give one number for a batch."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud
from tests.handloop import hand_loop
from tests.problems import distance, make_clients, net
from undrift.errors import UndriftError as refused  # noqa: N813 - it reads as a word

LOCAL = ud.Local(steps=3, batch_size=5, lr=0.1)


def regression(axis: bool, rows: int = 40) -> ud.FederatedDataset:
    """Clients with one number to predict; with `axis`, targets are N×1."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    y = y[:, None] if axis else y
    return ud.FederatedDataset.from_clients([(x[i::4], y[i::4]) for i in range(3)], test=(x[3::4], y[3::4]))


class Flat(nn.Module):
    """Outputs of shape N."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)


def by_row(z, y):
    return ((z - y) ** 2).mean(1)


def by_column(z, y):
    return ((z - y) ** 2).mean(0)


def squeezed(z, y):
    return ((z.squeeze(1) - y) ** 2).mean(1)


def absolute(z, y):
    return (z - y).abs().flatten(1).mean(1)


@pytest.mark.parametrize(
    ("module", "axis", "loss"),
    [
        (nn.Linear(3, 1), False, by_row),
        (nn.Linear(3, 1), False, by_column),
        (nn.Linear(3, 1), False, absolute),
        (nn.Linear(3, 1), True, squeezed),
        (Flat(), True, by_row),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_loss_that_broadcasts_is_refused(module, axis, loss, engine):
    with pytest.raises(refused, match=r"The loss broadcasts outputs of shape \(N.*y\[:, None\]"):
        ud.train(module, regression(axis), rounds=1, local=LOCAL, loss=loss, engine=engine)


def test_values_of_all_pairs():
    with pytest.raises(refused, match=r"not \(2, 2\).*They are broadcast; give both one shape"):
        ud.train(nn.Linear(3, 1), regression(False), rounds=1, local=LOCAL, loss=lambda z, y: (z - y) ** 2)


def test_targets_that_are_nearly_all_the_same():
    x, y = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(100)
    y[57] = 1
    with pytest.raises(refused, match="The loss broadcasts"):
        ud.train(nn.Linear(3, 1), ud.FederatedDataset.from_clients([(x, y)]), rounds=1, local=LOCAL, loss=by_row)


def test_a_metric_that_broadcasts_is_refused():
    with pytest.raises(refused, match="The far broadcasts outputs"):
        ud.train(nn.Linear(3, 1), regression(False), rounds=1, local=LOCAL, loss="mse", metrics={"far": absolute})


def ranked(z, y):
    """Couples samples on purpose, in either shape."""
    z, y = z.flatten(), y.flatten()
    return F.softplus(-(z[:, None] - z) * (y[:, None] - y).sign()).mean(1)


def aligned(z, y):
    return F.smooth_l1_loss(z.flatten(), y.flatten(), reduction="none")


def noisy(z, y):
    return (z.flatten() + torch.randn(len(z)) - y.flatten()) ** 2


@pytest.mark.parametrize("axis", [True, False])
@pytest.mark.parametrize("loss", [ranked, aligned, noisy, "mse", nn.HuberLoss()])
def test_other_losses_are_not(axis, loss, caplog):
    module = nn.Linear(3, 1) if axis or not isinstance(loss, nn.Module) else Flat()
    with caplog.at_level(logging.WARNING):
        ud.train(module, regression(axis), rounds=1, local=LOCAL, loss=loss, metrics={"far": aligned})
    assert not caplog.records


def by_runs(z, y):
    return F.cross_entropy(z, y, reduction="none") * len(torch.unique_consecutive(y))


def by_kinds(z, y):
    return F.cross_entropy(z, y, reduction="none") * len(torch.unique(y))


def by_largest(z, y):
    return F.cross_entropy(z, y, reduction="none") * len(torch.bincount(y))


def by_repeats(z, y):
    return F.cross_entropy(z, y, reduction="none") * len(torch.repeat_interleave(y, y + 1))


def by_values(z, y):
    return F.cross_entropy(z, y, reduction="none") * len(set(y.tolist()))


def by_chosen(z, y):
    return F.cross_entropy(z, y, reduction="none") * len(z[y > 1])


@pytest.mark.parametrize("sizes", [[12], [12, 8, 4]])
@pytest.mark.parametrize("loss", [by_runs, by_kinds, by_largest, by_repeats, by_values, by_chosen])
def test_a_loss_whose_shapes_depend_on_values_is_not_traced(loss, sizes):
    """One lane needs no vmap, which would refuse some of these."""
    local, data = ud.Local(epochs=2, batch_size=4, lr=0.1), make_clients(sizes)
    found = ud.train(net(), data, rounds=2, local=local, loss=loss, rehearse=False)
    wanted = hand_loop(net(), data, local, rounds=2, loss=lambda z, y: loss(z, y).mean())
    assert distance(found.model.state_dict(), wanted) < 1e-9 and found.choices["engine"] == "plain"
    with pytest.raises(refused, match=r"the shape of a result depends on values|failed in lanes"):
        ud.train(net(), data, rounds=2, local=local, loss=loss, engine="lanes", lanes=1, rehearse=False)


def by_counts(z, y):
    return F.cross_entropy(z, y, reduction="none") / torch.bincount(y, minlength=4)[y]


def by_fixed_repeats(z, y):
    return F.cross_entropy(z, y, reduction="none") * torch.repeat_interleave(y, torch.ones_like(y), output_size=len(y))


@pytest.mark.parametrize("loss", [by_counts, by_fixed_repeats])
def test_shapes_that_arguments_fix_are_traced(loss):
    local, data = ud.Local(epochs=2, batch_size=4, lr=0.1), make_clients([12])
    found = ud.train(net(), data, rounds=2, local=local, loss=loss, engine="lanes", rehearse=False)
    wanted = hand_loop(net(), data, local, rounds=2, loss=lambda z, y: loss(z, y).mean())
    assert distance(found.model.state_dict(), wanted) < 1e-9
