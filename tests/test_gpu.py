"""The same promises on a GPU. CI has none; these run where torch sees one."""

from __future__ import annotations

import pytest
import torch

import undrift as ud
from tests.equations import EVERYTHING
from tests.parts import METHOD, Normed
from tests.problems import distance, make_clients, net, same_bits
from undrift.engine import client_states
from undrift.engine.table import Table

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
    local = ud.Local(epochs=1, batch_size=8, lr=0.1)
    runs = []
    for share, home in ((0.0, "cpu"), (0.25, "cuda")):
        monkeypatch.setattr(client_states, "MEMORY_SHARE", share)
        states = client_states.ClientStates({0: Table()}, torch.device("cuda"), population=10, count=1)
        assert states.updated({0: {3: torch.zeros(2, device="cuda")}}, 1).parts[0][3].device.type == home
        runs.append(ud.train(net(), make_clients(SIZES), ud.Scaffold(), rounds=4, local=local, participation=4))
    assert same_bits(runs[0].params, runs[1].params)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
def test_rounding_does_not_make_samples_interact(seed, precision):
    """Convolutions are tf32 by torch's default, which took a deep network's samples for some that interact."""
    torch.manual_seed(seed)
    data = ud.FederatedDataset.from_clients([(torch.randn(9, 3, 32, 32), torch.arange(9)) for _ in range(2)])
    local = ud.Local(epochs=1, batch_size=6, lr=0.01)
    run = ud.train("vgg9", data, rounds=1, local=local, device="cuda", seed=seed, precision=precision, compile=False)
    assert run.choices["engine"] == "lanes", run.choices["why"]


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
    assert run.choices["engine"] == "lanes" and torch.backends.cuda.matmul.allow_tf32 == before


def pictures(sizes: list[int]) -> ud.FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.rand(n, 3, 12, 12, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in sizes
    ]
    return ud.FederatedDataset.from_clients(pairs, test=pairs[0])


def small_cnn() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Dropout(0.2), torch.nn.Flatten(), torch.nn.Linear(200, 4),
    )  # fmt: skip


PICTURES = {"rounds": 4, "local": ud.Local(epochs=2, batch_size=8, lr=0.1), "participation": 4}


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("method", [ud.FedAvg(), ud.FedDyn(0.1) + ud.FedNLR(), ud.GradientNoise(0.01)])
def test_compiled_steps_agree_with_plain_ones(method):
    """Uneven clients, short batches, dropout, convolutions of both kinds: within float32's rounding."""
    data = pictures([23, 5, 41, 10, 17])
    plain = ud.train(small_cnn(), data, method, engine="plain", device="cuda", **PICTURES)
    for compile in (False, True):
        found = ud.train(small_cnn(), data, method, engine="lanes", lanes=3, compile=compile, **PICTURES)
        assert found.choices["compile"] == compile
        assert distance(found.params, plain.params) < 2e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_two_compiled_runs_give_the_same_bits(precision):
    data = pictures([23, 5, 41, 10, 17])
    runs = [
        ud.train(small_cnn(), data, ud.FedProx(0.1), precision=precision, compile=True, **PICTURES) for _ in range(2)
    ]
    assert same_bits(runs[0].params, runs[1].params)


def test_compile_is_chosen_for_long_runs_and_refused_where_it_cannot_be():
    from undrift.engine.choose import Choice, compiles

    lanes, where = Choice("lanes", 10, ""), torch.device("cuda")
    assert compiles(None, lanes, where, 1000, 100.0) and not compiles(None, lanes, where, 10, 100.0)
    with pytest.raises(ud.UndriftError, match="compile=True is for lanes on a GPU"):
        compiles(True, lanes, torch.device("cpu"), 10, 1.0)
