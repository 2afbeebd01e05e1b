"""With engine="auto", what the plain engine can train is trained: a round that fails in lanes starts again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud
from tests.problems import make_clients, net, same_bits

LOCAL = ud.Local(epochs=1, batch_size=4, lr=0.1)


def masked_loss(z, y):
    """Its intermediate shape depends on values, which vmap cannot follow."""
    losses = torch.zeros(len(y), dtype=z.dtype)
    known = y != 1
    losses[known] = F.cross_entropy(z[known], y[known], reduction="none")
    return losses


class OnItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        x = x.clone() if x.requires_grad else x
        x += 1  # in place, on what it is given
        return self.inner(x)


class OnAConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("on", torch.ones(1))

    def forward(self, x):
        return self.inner(x) if self.on.sum() > 0 else self.inner(-x)


@pytest.mark.parametrize(
    ("make", "loss"), [(net, masked_loss), (OnItsInput, None), (OnAConstant, None)], ids=["loss", "input", "constant"]
)
def test_what_plain_can_train_auto_trains(make, loss):
    options = {"rounds": 2, "local": LOCAL, "loss": loss}
    auto, plain = (ud.train(make(), make_clients([9, 6, 3]), engine=e, **options) for e in ("auto", "plain"))
    assert same_bits(auto.params, plain.params) or auto.choices["engine"] == "lanes"
    for a, b in zip(auto.params.values(), plain.params.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class FailsLater(ud.Part):
    """In lanes it can be traced while the number of clients that it has seen allows: an `if` on a round's number."""

    def start(self, params):
        return torch.zeros(())

    def broadcast(self, params, state, server):
        # From round 2 on clients receive something of another shape, for which the step is traced anew.
        return {"of": torch.ones(1 if server.round < 2 else 2)}

    def gradient(self, g, params, client):
        received = client.received["of"]
        if len(received) == 2 and received.sum() > client.n:  # an `if` on values
            return g
        return ud.tree_map(lambda g: 1.5 * g, g)


def test_a_round_that_fails_starts_again_on_the_plain_engine():
    data = make_clients([9, 6, 3])
    found = ud.train(net(), data, FailsLater(), rounds=4, local=LOCAL)
    wanted = ud.train(net(), data, FailsLater(), rounds=4, local=LOCAL, engine="plain")
    assert found.choices["engine"] == "plain" and found.choices["switched"] == 3
    assert ["switched" in row for row in found.history] == [False, False, True, False]
    assert (
        "FailsLater.gradient" in found.history[2]["switched"] and found.history[2]["switched"] == found.choices["why"]
    )
    for name, w in wanted.params.items():
        assert torch.allclose(found.params[name], w, rtol=1e-12, atol=1e-14)
    with pytest.raises(ud.UndriftError, match=r"FailsLater.gradient"):
        ud.train(net(), data, FailsLater(), rounds=4, local=LOCAL, engine="lanes")


def test_a_resumed_run_stays_on_the_plain_engine(tmp_path):
    data = make_clients([9, 6, 3])
    whole = ud.train(net(), data, FailsLater(), rounds=5, local=LOCAL, out=tmp_path / "whole", checkpoint_every=1)
    ud.train(net(), data, FailsLater(), rounds=4, local=LOCAL, out=tmp_path / "part", checkpoint_every=1)
    again = ud.train(
        net(), data, FailsLater(), rounds=5, local=LOCAL, out=tmp_path / "part", checkpoint_every=1, resume=True
    )
    assert same_bits(again.params, whole.params)
    assert again.choices["engine"] == "plain" and again.choices["switched"] == 3
    assert again.choices["why"] == whole.choices["why"]


def test_an_error_of_both_engines_is_the_plain_ones():
    @dataclass(frozen=True)
    class Wrong(ud.Part):
        def gradient(self, g, params, client):
            raise ValueError("always")

    with pytest.raises(ud.UndriftError, match=r"Wrong.gradient failed .*: ValueError: always"):
        ud.train(net(), make_clients([9]), Wrong(), rounds=1, local=LOCAL)


def test_the_config_of_a_run_that_switched_repeats_it(tmp_path):
    ud.train(net(), make_clients([9, 6, 3]), FailsLater(), rounds=4, local=LOCAL, out=tmp_path / "run")
    assert 'engine = "auto"' in (tmp_path / "run" / "config.toml").read_text()
