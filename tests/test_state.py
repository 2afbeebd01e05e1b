"""A run's state is one value: a round returns a new one, and everything that training changes is in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import undrift as ud
from tests.parts import Normed
from tests.problems import make_clients, net, same_bits
from undrift.training.build import prepare
from undrift.training.rounds import federated_round
from undrift.training.settings import Settings
from undrift.tree import tree_leaves

SIZES = [12, 9, 20, 8]
LOCAL = ud.Local(epochs=1, batch_size=6, lr=0.1)


def with_server_data(sizes: list[int]) -> ud.FederatedDataset:
    torch.manual_seed(1)
    data = make_clients(sizes)
    own = [data[c] for c in range(len(data))]
    server = (torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 4)
    return ud.FederatedDataset.from_clients(own, server=server)


@pytest.mark.parametrize(
    ("module", "engine", "method"),
    [
        (net, "lanes", ud.Scaffold() + ud.ServerSGD(momentum=0.9)),
        (Normed, "plain", ud.FedDyn(0.1) + ud.ServerTraining(0.1, batch_size=8)),
    ],
    ids=["lanes", "batch norm"],
)
def test_a_round_leaves_the_state_before_it_as_it_was(module, engine, method):
    run = prepare(
        Settings(
            model=module(), data=with_server_data(SIZES), method=method, rounds=3, local=LOCAL, device="cpu",
            engine=engine,
        )
    )  # fmt: skip

    def leaves(state):
        kept = {i: dict(states) for i, states in state.clients.parts.items()}
        return tree_leaves([state.params, state.parts, state.tracked, kept])

    with torch.no_grad():
        state, _ = federated_round(run, run.start(), skip=False)
        before = [t.clone() for t in leaves(state)]
        again = [federated_round(run, state, skip=False)[0] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(leaves(state), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(leaves(again[0]), leaves(again[1]), strict=True))
    assert len(state.clients.parts[0]) == len(SIZES) and (engine == "lanes") == (not state.tracked)
    for new, old in zip(leaves(again[0])[: len(state.params)], leaves(state)[: len(state.params)], strict=True):
        assert not torch.equal(new, old)


def test_states_that_changed_since_a_round_are_known_by_the_round():
    run = prepare(Settings(model=net(), data=make_clients(SIZES), method=ud.Scaffold(), rounds=4, local=LOCAL,
                           participation=2, device="cpu"))  # fmt: skip
    state, cohorts = run.start(), []
    with torch.no_grad():
        for _ in range(3):
            state, done = federated_round(run, state, skip=False)
            cohorts.append(set(done.answers.clients.tolist()))
    assert state.clients.changed_since(2) == cohorts[2]
    assert state.clients.changed_since(1) == cohorts[1] | cohorts[2]
    assert state.clients.changed_since(-1) == set.union(*cohorts) == set(state.clients.parts[0])
    assert not state.clients.changed_since(3)


@dataclass(frozen=True)
class Recalibrate(ud.Part):
    """Running statistics of the final model, set at the end."""

    measures = "finish"

    def measure(self, params, batch, client):
        return batch.mask.sum()

    def finish(self, params, state, server):
        server.model.track({name: torch.full_like(b, 3) for name, b in server.model.tracked.items()})
        return params


def test_finish_may_set_running_statistics():
    run = ud.train(Normed(), make_clients(SIZES), Recalibrate(), rounds=2, local=LOCAL)
    assert all((b == 3).all() for b in run.model.buffers())


def test_a_skipped_round_leaves_running_statistics_too():
    """Not even training at the server, after clients that all dropped out, moves them."""
    faults = ud.Faults(dropout=lambda t: float(t == 1))
    settings = {"local": LOCAL, "faults": faults, "on_nonfinite": "skip"}
    module, data, method = Normed(), with_server_data(SIZES), ud.ServerTraining(0.1, batch_size=8)
    one, two = (ud.train(module, data, method, rounds=rounds, **settings) for rounds in (1, 2))
    assert two.history[1]["round_skipped"]
    assert same_bits(dict(one.model.named_buffers()), dict(two.model.named_buffers()))
    assert same_bits(one.params, two.params)


@dataclass(frozen=True)
class Fewer(ud.Part):
    """Only some of the sampled clients train."""

    def plan(self, plan, state, server):
        return replace(plan, clients=plan.clients[:3], steps=plan.steps[:3]), state


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_a_plan_with_fewer_clients_and_a_limit_on_norms(engine):
    run = ud.train(net(), make_clients(SIZES), Fewer(), rounds=2, local=LOCAL, max_norm_ratio=50.0, engine=engine)
    assert [len(row["clients"]) for row in run.history] == [3, 3] and run.history[-1]["survivors"] == 3


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = torch.nn.GRU(2, 5, batch_first=True), torch.nn.Linear(5, 4)
        self.double()

    def forward(self, x):
        return self.head(self.rnn(x.view(-1, 3, 2))[0][:, -1])


def test_the_model_of_a_finished_run_has_torchs_own_layers(tmp_path):
    settings = {"rounds": 1, "local": LOCAL, "engine": "lanes", "out": tmp_path / "r"}
    first = ud.train(Reader(), make_clients(SIZES), **settings)
    again = ud.train(Reader(), make_clients(SIZES), resume=True, **settings)
    assert type(first.model.rnn) is type(again.model.rnn) is torch.nn.GRU
    assert same_bits(first.params, again.params)
