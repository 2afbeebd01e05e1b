"""The same promises on a GPU. CI has none; these run where torch sees one."""

from __future__ import annotations

import pytest
import torch

import undrift as ud
from tests.problems import distance, make_clients, net, same_bits
from tests.test_engines import METHOD, Normed
from tests.test_reference import EVERYTHING

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=0.01)
SIZES = [23, 5, 0, 41, 10, 17, 1]


def test_lanes_plain_and_cpu_agree_in_float64_every_hook_included():
    data = make_clients(SIZES)
    settings = {"rounds": 10, "local": LOCAL, "participation": 4}
    cpu = ud.train(net(dropout=0.3), data, METHOD, device="cpu", engine="lanes", lanes=2, **settings)
    for engine in ("lanes", "plain"):
        gpu = ud.train(net(dropout=0.3), data, METHOD, device="cuda", engine=engine, lanes=2, **settings)
        assert gpu.choices["device"].startswith("cuda")
        assert distance({n: w.cpu() for n, w in gpu.params.items()}, cpu.params) < 1e-10


@pytest.mark.parametrize("method", [m for m, _ in EVERYTHING.values()], ids=list(EVERYTHING))
def test_every_method_agrees_with_the_cpu(method):
    data, local = make_clients(SIZES), ud.Local(epochs=1, batch_size=8, lr=0.1)
    settings = {"rounds": 3, "local": local, "participation": 4, "engine": "lanes"}
    cpu, gpu = (ud.train(net(), data, method, device=d, **settings) for d in ("cpu", "cuda"))
    assert distance({n: w.cpu() for n, w in gpu.params.items()}, cpu.params) < 1e-7


def test_frozen_weights_of_the_callers_model_stay_where_they_are():
    model = net(torch.float32)
    model[0].weight.requires_grad_(False)
    ud.train(model, make_clients(SIZES, torch.float32), rounds=1, local=LOCAL, device="cuda")
    assert model[0].weight.device.type == "cpu"


def test_kept_state_moves_to_the_host_when_it_would_not_fit(monkeypatch):
    from undrift.engine import cohort

    local = ud.Local(epochs=1, batch_size=8, lr=0.1)
    runs = []
    for share in (0.0, 0.25):
        monkeypatch.setattr(cohort, "KEPT_SHARE", share)
        runs.append(ud.train(net(), make_clients(SIZES), ud.Scaffold(), rounds=4, local=local, participation=4))
    assert same_bits(runs[0].params, runs[1].params)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_two_runs_give_the_same_bits(engine):
    data = make_clients(SIZES, torch.float32)
    settings = {"rounds": 5, "local": LOCAL, "participation": 4, "engine": engine}
    runs = [ud.train(net(torch.float32, 0.3), data, ud.FedProx(mu=0.1), **settings) for _ in range(2)]
    assert runs[0].choices["device"].startswith("cuda") and same_bits(runs[0].params, runs[1].params)


def test_float32_agrees_with_the_cpu():
    data = make_clients(SIZES, torch.float32)
    runs = [ud.train(net(torch.float32, 0.3), data, rounds=10, local=LOCAL, device=d) for d in ("cpu", "cuda")]
    assert distance({n: w.cpu() for n, w in runs[1].params.items()}, runs[0].params) < 1e-4


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_lower_precisions_train_and_keep_the_parameters_in_float32(precision):
    data = ud.load("digits", ud.Dirichlet(0.3), clients=10)
    settings = {"rounds": 15, "local": ud.Local(epochs=2, batch_size=32, lr=0.1)}
    full, low, again = (ud.train("cnn", data, precision=p, **settings) for p in ("auto", precision, precision))
    assert low.params["0.weight"].dtype == torch.float32 and same_bits(low.params, again.params)
    assert 1e-6 < distance(low.params, full.params) < 0.1
    assert abs(low.history[-1]["loss"] - full.history[-1]["loss"]) < 0.1


def test_batch_norm_and_switches_are_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    run = ud.train(Normed(), make_clients([12, 8, 20]), rounds=2, local=LOCAL, precision="tf32", deterministic=True)
    assert run.choices["engine"] == "plain" and torch.backends.cuda.matmul.allow_tf32 == before
