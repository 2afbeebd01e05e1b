"""Each method's limits, its effect, and where it has one its fixed point."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import undrift as ud
from tests.problems import Point, distance, make_clients, net, quadratics, same_bits
from undrift.method.parse import as_method

SIZES = [23, 5, 0, 41, 10, 17, 1]
LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1)
UNIFORM = ud.FedAvg(weighting="uniform")
TE = ud.TemporalEnsemble


def run(method, dtype=torch.float32, engine="lanes", local=LOCAL, rounds=5, **options):
    data = make_clients(SIZES, dtype)
    return ud.train(
        net(dtype), data, method, rounds=rounds, local=local, participation=4, seed=1, engine=engine, **options
    )


OFF = [
    (ud.FedProx(mu=0), ud.FedAvg()),
    (ud.FedProx(mu=0.5, target=TE(beta=0)), ud.FedProx(mu=0.5)),
    (ud.FedCurv(weight=0), ud.FedAvg()),
    (ud.FedCL(weight=0), ud.FedAvg()),
    (ud.FedCL(weight=5, target=TE(beta=0)), ud.FedCL(weight=5)),
    (ud.FedRS(alpha=1), ud.FedAvg()),
    (ud.FedLC(tau=0), ud.FedAvg()),
    (ud.GradientNoise(std=0), ud.FedAvg()),
    (ud.Projection(radius=float("inf")), ud.FedAvg()),
    (ud.Projection(radius=float("inf"), center="global"), ud.FedAvg()),
    (ud.SignAgreement(threshold=0), ud.FedAvg()),
    (ud.ServerSGD(lr=1, momentum=0), ud.FedAvg()),
    (ud.FedAvgM(momentum=0), ud.FedAvg()),
    (UNIFORM + ud.Scaffold(variates="uniform"), UNIFORM + ud.Scaffold()),
    (ud.FedNLR(ratio=1), ud.FedAvg()),
    (ud.TwoDLRD(window=1, C=0), UNIFORM),
    (ud.AllDecreasing(window=1, factor=1), UNIFORM),
    (ud.AdditiveTuning(window=1, C=0), UNIFORM),
    (ud.FirstStepOnly(after=5), ud.FedAvg()),
]


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize(("off", "plain"), OFF, ids=[repr(off) for off, _ in OFF])
def test_off_is_off_to_the_bit(off, plain, engine):
    assert same_bits(run(off, engine=engine).params, without(plain, engine))


@functools.cache
def without(method, engine):
    return run(method, engine=engine).params


def test_fednova_is_fedavg_when_all_take_equal_steps():
    local = ud.Local(steps=5, batch_size=8, lr=0.1, momentum=0.5)
    nova, plain = (run(m, torch.float64, local=local).params for m in (ud.FedNova(), ud.FedAvg()))
    assert 0 < distance(nova, plain) < 1e-14


STRONGER = [
    (ud.FedProx(mu=0.1), ud.FedProx(mu=1)),
    (ud.FedProx(mu=1, target=TE(beta=0.2)), ud.FedProx(mu=1, target=TE(beta=0.9))),
    (ud.FedCurv(weight=0.1), ud.FedCurv(weight=1)),
    (ud.FedCL(weight=1), ud.FedCL(weight=10)),
    (ud.FedCL(weight=10, target=TE(beta=0.2)), ud.FedCL(weight=10, target=TE(beta=0.9))),
    (ud.FedRS(alpha=0.9), ud.FedRS(alpha=0.1)),
    (ud.FedLC(tau=0.1), ud.FedLC(tau=1)),
    (ud.FedDyn(alpha=0.1), ud.FedDyn(alpha=1)),
    (ud.GradientNoise(std=0.01), ud.GradientNoise(std=0.1)),
    (ud.Projection(radius=3), ud.Projection(radius=1)),
    (ud.SignAgreement(threshold=2), ud.SignAgreement(threshold=4)),
    (ud.ServerSGD(momentum=0.1), ud.ServerSGD(momentum=0.9)),
    (ud.FedAvgM(momentum=0.1), ud.FedAvgM()),
    (ud.FedAdam(lr=0.01), ud.FedAdam(lr=0.1)),
    (ud.FedAdam(lr=0.1, tau=1e-1), ud.FedAdam(lr=0.1)),
    (ud.FedYogi(lr=0.01), ud.FedYogi(lr=0.1)),
    (ud.FedAdagrad(lr=0.01), ud.FedAdagrad(lr=0.1)),
    (ud.ServerAdam(lr=0.01), ud.ServerAdam(lr=0.1)),
    (ud.ServerYogi(lr=0.01), ud.ServerYogi(lr=0.1)),
    (ud.ServerAdagrad(lr=0.01), ud.ServerAdagrad(lr=0.1)),
    (ud.ServerTraining(lr=0.01), ud.ServerTraining(lr=0.1)),
    (ud.FirstStepOnly(after=4), ud.FirstStepOnly(after=1)),
    (ud.FedNLR(ratio=1.5), ud.FedNLR(ratio=4)),
    (ud.FedNLR(depth=0, width=0.1), ud.FedNLR(depth=3, width=0.1)),
    (ud.FedAvg(), ud.Scaffold()),
    (ud.Scaffold(variates="uniform"), ud.Scaffold()),
    (ud.FedAvg(), ud.FedNova()),
]


@pytest.mark.parametrize(("weak", "strong"), STRONGER, ids=[repr(strong) for _, strong in STRONGER])
def test_strength_moves_the_weights(weak, strong):
    weak, strong = (run(method, torch.float64, engine="plain").params for method in (weak, strong))
    assert distance(weak, strong) > 1e-4


def settle(method, pairs, rounds=400, participation=1.0, **local):
    data = quadratics(pairs)
    result = ud.train(
        Point(),
        data,
        method,
        rounds=rounds,
        local=ud.Local(**local),
        participation=participation,
        evaluate_every=rounds,
    )
    return float(result.params["w"])


PAIRS = [(1.0, -1.0), (2.0, 3.0), (5.0, 0.5), (0.5, 10.0)]
BEST = sum(a * b for a, b in PAIRS) / sum(a for a, _ in PAIRS)


@pytest.mark.long
@pytest.mark.parametrize("method", [ud.Scaffold(), ud.FedDyn(alpha=1.0)])
def test_drift_is_corrected_to_the_minimiser_of_the_sum(method):
    """Thirty local steps on quadratics: SCAFFOLD and FedDyn end where the sum is least, FedAvg does not."""
    assert abs(settle(ud.FedAvg(), PAIRS, steps=30, lr=0.05) - BEST) > 0.3
    assert abs(settle(method, PAIRS, steps=30, lr=0.05) - BEST) < 1e-6
    # With half of the clients a round the variates must be kept, and N must be all clients.
    assert abs(settle(method, PAIRS, rounds=600, participation=2, steps=30, lr=0.05) - BEST) < 1e-2


UNEQUAL = [(0.5, -1.0), (2.0, 3.0)]
"""Curvatures and minima of two clients."""
SIZES_OF_TWO, STEPS_OF_TWO = [3, 1], [2, 5]


def weighted_minimum(weights):
    return sum(p * a * b for p, (a, b) in zip(weights, UNEQUAL, strict=True)) / sum(
        p * a for p, (a, _) in zip(weights, UNEQUAL, strict=True)
    )


def ends_at(method, engine, lr=0.1, rounds=800):
    data = quadratics(UNEQUAL, SIZES_OF_TWO)
    local = ud.Local(steps=STEPS_OF_TWO, batch_size=None, lr=lr)
    found = ud.train(Point(), data, method, rounds=rounds, local=local, engine=engine, evaluate_every=rounds)
    return float(found.params["w"])


BY_SAMPLES, UNIFORMLY = weighted_minimum(SIZES_OF_TWO), weighted_minimum([1, 1])


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize(
    ("method", "minimum"),
    [
        (ud.SCAFFOLD(), BY_SAMPLES),
        (ud.SCAFFOLD() + UNIFORM, UNIFORMLY),
        (ud.SCAFFOLD() + ud.FedAvgM(lr=0.5, momentum=0.3), BY_SAMPLES),
        (ud.FedDyn(alpha=1.0), UNIFORMLY),
    ],
    ids=str,
)
def test_the_fixed_point_is_the_minimum_of_the_objective_with_the_weights_of_the_mean(method, minimum, engine):
    """Two quadratics with unequal sizes, curvatures and numbers of steps."""
    assert abs(BY_SAMPLES - UNIFORMLY) > 0.5
    assert abs(ends_at(method, engine) - minimum) < 1e-8


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_uniform_variates_beside_a_mean_by_samples_lead_to_the_minimum_of_the_uniform_objective(engine):
    assert abs(ends_at(ud.Scaffold(variates="uniform"), engine) - UNIFORMLY) < 1e-8


def root_of_fednova(lr):
    """Where `Σ pᵢ·(1 − (1 − γaᵢ)^Kᵢ)/Kᵢ·(w − bᵢ)` is zero."""
    pulls = [n * (1 - (1 - lr * a) ** k) / k for n, k, (a, _) in zip(SIZES_OF_TWO, STEPS_OF_TWO, UNEQUAL, strict=True)]
    return sum(pull * b for pull, (_, b) in zip(pulls, UNEQUAL, strict=True)) / sum(pulls)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_fednova_ends_at_its_root_whose_bias_is_of_first_order(engine):
    for lr in (0.1, 0.05):
        assert abs(ends_at(ud.FedNova(), engine, lr) - root_of_fednova(lr)) < 1e-8
    bias = [abs(root_of_fednova(lr) - BY_SAMPLES) for lr in (0.1, 0.05)]
    assert 1.8 < bias[0] / bias[1] < 2.2


@pytest.mark.long
def test_fednova_removes_the_bias_of_unequal_steps_to_first_order():
    """Shrink γ tenfold and FedNova's gap to the minimiser falls with it; FedAvg's stays."""
    steps = {"steps": [1, 4, 10, 30]}
    nova, plain = (
        [abs(settle(m, PAIRS, rounds=round(2 / lr), lr=lr, **steps) - BEST) for lr in (0.03, 0.003)]
        for m in (ud.FedNova(), ud.FedAvg())
    )
    assert 8 < nova[0] / nova[1] < 12
    assert plain[1] > 0.9 and plain[0] / plain[1] < 1.5


def test_the_sign_rule_with_two_agents():
    """They agree on one coordinate, downwards, and disagree on the other, which stays."""
    x = torch.eye(2, dtype=torch.float64)[:1].expand(1, 2)
    clients = [
        (x, torch.tensor([[-1.0, 1.0]], dtype=torch.float64)),
        (x, torch.tensor([[-1.0, -1.0]], dtype=torch.float64)),
    ]
    data = ud.FederatedDataset.from_clients(clients, task=ud.Task(loss="mse"))
    model = torch.nn.Linear(2, 2, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    local = ud.Local(steps=1, lr=0.1)
    moved = ud.train(model, data, ud.SignAgreement(threshold=2), rounds=1, local=local).params["weight"]
    assert moved[0, 0] < 0 and moved[1, 0] == 0
    free = ud.train(model, data, rounds=3, local=ud.Local(steps=3, lr=ud.decay(0.1, 0.5)), participation=1).params[
        "weight"
    ]
    assert free[1, 0] != 0


def test_the_diagnostic_as_the_paper_tells_it():
    """2D-LRD: the first decay in round window + 1 at the earliest, α = 1 − C·d, one step per round once C·d ≥ 1."""
    # A rate of 0.9 overshoots a quadratic with a = 2, so successive updates oppose each other.
    data = quadratics([(2.0, 1.0), (2.0, 3.0)])
    history = ud.train(Point(), data, ud.TwoDLRD(window=3, C=0.5), rounds=12, local=ud.Local(steps=5, lr=0.9)).history
    assert [row["decays"] for row in history] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [row["steps"] for row in history] == [10] * 8 + [2] * 4  # from the second decay on one step a client
    assert history[0]["rates"] == pytest.approx([0.9] * 4)
    assert history[4]["rates"] == pytest.approx([0.9, 0.45, 0.225, 0.1125])
    assert history[8]["rates"] == pytest.approx([0.9, 0, 0, 0])
    assert history[2]["diagnostic"] < 0 and history[3]["diagnostic"] == 0
    rates = {
        name: ud.train(Point(), data, m, rounds=5, local=ud.Local(steps=5, lr=0.9)).history[-1]["rates"]
        for name, m in {
            "AD": ud.AllDecreasing(window=3),
            "AT": ud.AdditiveTuning(window=3),
            "first": ud.FirstStepOnly(after=4),
        }.items()
    }
    assert rates["AD"] == pytest.approx([0.72] * 4)
    assert rates["AT"] == pytest.approx([0.9, 0.72, 0.72, 0.72])
    assert rates["first"] == pytest.approx([0.9, 0, 0, 0])


def test_five_times_a_fifth_is_one():
    """C·d is compared so that five decays at C = 0.2 are enough for one step per round at the full rate."""
    part = (
        as_method("TwoDLRD(window=1)")
        .bind([{"window": torch.tensor(1.0), "C": torch.tensor(0.2, dtype=torch.float64)}])
        .parts[0]
    )
    plan = ud.Plan(round=0, clients=np.array([0, 1]), steps=np.array([5, 7]), lr=0.1, momentum=0.0, weight_decay=0.0)
    assert part.plan(plan, {"decays": torch.tensor(4)}, None)[0].steps.tolist() == [5, 7]
    assert part.plan(plan, {"decays": torch.tensor(5)}, None)[0].steps.tolist() == [1, 1]


def test_work_is_counted():
    data = make_clients([8, 8, 8])
    run = ud.train(
        net(), data, rounds=40, local=ud.Local(steps=ud.decay(10, 0.9), batch_size=4, lr=0.01), participation=2
    )
    steps = [ud.schedule.whole_steps(10 * 0.9**t) for t in range(40)]
    assert [row["steps"] for row in run.history] == [2 * k for k in steps]
    assert run.history[-1]["total_steps"] == 2 * sum(steps)
    assert run.history[-1]["steps_fraction"] == pytest.approx(sum(steps) / 400)
    assert run.history[0]["steps_fraction"] == 1


@dataclass(frozen=True)
class LateStart(ud.Part):
    """Nobody takes part in round 0."""

    def plan(self, plan, state, server):
        chosen = slice(0, None if plan.round else 0)
        return replace(plan, clients=plan.clients[chosen], steps=plan.steps[chosen]), state


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_a_run_may_begin_with_an_empty_round(uneven, engine):
    """No step has been counted by then, of which `steps_fraction` could be a share."""
    run = ud.train(net(), uneven, LateStart(), rounds=2, local=ud.Local(epochs=1, lr=0.1), engine=engine)
    assert [row["steps_fraction"] for row in run.history] == [1, 1]
    assert [row["total_steps"] for row in run.history] == [0, 6]
    assert run.history[0]["loss"] != run.history[1]["loss"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ud.FedNova() + ud.FedDyn(alpha=1), "FedNova and FedDyn contradict"),
        (lambda: ud.TwoDLRD(window=3) + ud.AllDecreasing(window=3), "TwoDLRD and AllDecreasing contradict"),
        (
            lambda: ud.FirstStepOnly(after=3) + ud.AdditiveTuning(window=3),
            "FirstStepOnly and AdditiveTuning contradict",
        ),
        (lambda: ud.ServerAdam(lr=1) + ud.ServerYogi(lr=1), "ServerAdam and ServerYogi contradict"),
        (
            lambda: ud.FedDyn(alpha=1) + ud.FedAvg(weighting="samples"),
            "FedDyn needs the uniform mean and FedAvg needs the samples mean",
        ),
        (
            lambda: ud.FedAvg(weighting="samples") + ud.TwoDLRD(window=3),
            "FedAvg needs the samples mean and TwoDLRD needs the uniform mean",
        ),
        (lambda: ud.Projection(radius=1, center="here"), 'must be "origin" or "global"'),
        (lambda: ud.ServerTraining(lr=1, epochs=0), "epochs. must be a whole number from 1"),
        (lambda: ud.CCVR(2**63 - 1), r"CCVR.samples_per_class. must be a whole number from 1 to 1,000,000"),
        (lambda: ud.CCVR(True), r"CCVR.samples_per_class. must be a whole number from 1 to 1,000,000, not True"),
    ],
)
def test_contradictions_are_refused_by_name(make, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("method", "local", "sentence"),
    [
        (ud.Scaffold(), ud.Local(steps=1, lr=0.1, momentum=0.9), "Scaffold and client momentum contradict"),
        (ud.FedCL(weight=1), LOCAL, "FedCL needs proxy data at the server"),
        (ud.ServerTraining(lr=1), LOCAL, "ServerTraining needs data at the server"),
        (ud.ServerTraining(lr=1, clip_norm=0), LOCAL, r"ServerTraining\(clip_norm\) is 0; it must be in \(0, inf\]"),
        (ud.FedDyn(alpha=0), LOCAL, r"FedDyn\(alpha\) is 0; it must be in \(0, inf\)"),
        (ud.FedRS(alpha=2), LOCAL, r"FedRS\(alpha\) is 2; it must be in \[0, 1\]"),
        (ud.FedLC(tau=-1), LOCAL, r"FedLC\(tau\) is -1"),
        (ud.Projection(radius=0), LOCAL, r"Projection\(radius\) is 0"),
        (ud.FedProx(mu=1, target=TE(beta=1)), LOCAL, r"FedProx\(target=TemporalEnsemble\)\(beta\) is 1"),
        (ud.TwoDLRD(window=-1), LOCAL, r"TwoDLRD\(window\) is -1"),
        (ud.FedNLR(ratio=0.5), LOCAL, r"FedNLR\(ratio\) is 0.5; it must be in \[1, inf\)"),
        (ud.FedNLR(ratio={"head": 2.0}), LOCAL, "no layer called 'head'. Known: 0, 3"),
        (ud.FedNLR(base=0.1, depth=0.1, width=0.1), LOCAL, "gives layer '0' a ratio of 0.24"),
    ],
)
def test_what_cannot_run_is_refused_before_training(method, local, sentence):
    data = ud.FederatedDataset.from_clients([make_clients([5])[0]])
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(net(), data, method, rounds=1, local=local)


def test_logit_methods_need_classes():
    data = quadratics(PAIRS)
    with pytest.raises(ud.UndriftError, match="FedRS needs labels that are classes"):
        ud.train(Point(), data, ud.FedRS(alpha=0.5), rounds=1, local=LOCAL)


def test_expressions_reach_every_method():
    text = 'FedCL(weight=1, target=TemporalEnsemble(0.2)) + Projection(inf, center="global") + TwoDLRD(window=10)'
    expected = ud.FedCL(weight=1, target=TE(0.2)) + ud.Projection(float("inf"), center="global") + ud.TwoDLRD(window=10)
    assert as_method(text).parts == expected.parts


def test_fedcl_with_one_number_per_tensor_takes_its_authors_steps():
    """Three steps of github.com/thu-media/FedCL at 4b16e106: `core/agent.py`, `ewc` on batches of 3, then `train`."""

    def filled(first: int, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.sin(torch.arange(first, first + count, dtype=torch.float64)).reshape(shape)

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    with torch.no_grad():
        for i, weights in enumerate(model.parameters()):
            weights.copy_(filled(10 * i, *weights.shape))
    pair = filled(100, 7, 3), torch.tensor([0, 1, 2, 2, 1, 0, 2])
    local = ud.Local(epochs=3, batch_size=7, lr=0.1, momentum=0.9, weight_decay=1e-4)
    result = ud.train(
        model=model,
        data=ud.FederatedDataset.from_clients([pair], test=pair, server=pair),
        local=local,
        method=ud.FedCL(0.5, fisher="tensor", batch_size=3),
        rounds=1,
        device="cpu",
    )
    expected = {
        "0.weight": [
            0.0773474163,
            0.8694530891,
            0.8621876015,
            0.219499025,
            -0.7384370694,
            -1.0174575277,
            -0.324972315,
            0.667620594,
            1.0464062077,
            0.3697311231,
            -0.5569402422,
            -0.9715633173,
        ],
        "0.bias": [-0.5351110516, -0.9109786721, -0.4655810514, 0.4253851262],
        "2.weight": [
            0.8961566686,
            0.7643650264,
            -0.0350007777,
            -0.8197385277,
            -0.893855604,
            -0.1419553659,
            0.791987395,
            0.9209084132,
            0.2759562221,
            -0.5817419056,
            -0.9912981405,
            -0.3950357529,
        ],
        "2.bias": [-0.8671341256, -0.3913464473, 0.4178848765],
    }
    for name, weights in expected.items():
        assert result.params[name].flatten().tolist() == pytest.approx(weights, rel=1e-6, abs=1e-9)
