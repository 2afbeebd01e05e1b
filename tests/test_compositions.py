"""Random problems, random sums of parts: both engines agree, and nothing turns into NaN that need not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import undrift as ud
from tests.problems import distance, make_clients, net

TE = ud.TemporalEnsemble(beta=0.5)
PARTS = [
    ud.FedAvg(),
    ud.FedProx(mu=0.5),
    ud.FedProx(mu=ud.decay(0.5, 0.5), target=TE),
    ud.Scaffold(),
    ud.FedNova(),
    ud.FedDyn(alpha=0.5),
    ud.FedRS(alpha=0.5),
    ud.FedLC(tau=0.3),
    ud.FedNLR(),
    ud.FedNLR(ratio={"0": 2.0}),
    ud.CCVR(samples_per_class=5, epochs=1),
    ud.TwoDLRD(window=0, C=0.5),
    ud.AllDecreasing(window=0),
    ud.AdditiveTuning(window=0),
    ud.FirstStepOnly(after=1),
    ud.FedCurv(weight=0.3),
    ud.FedCL(weight=0.3, target=TE),
    ud.SignAgreement(threshold=1),
    ud.Projection(radius=2.5),
    ud.GradientNoise(std=0.01),
    ud.ServerTraining(lr=0.05),
    ud.ServerSGD(momentum=0.5),
    ud.ServerAdam(lr=0.01),
    ud.ServerYogi(lr=0.01),
    ud.ServerAdagrad(lr=0.01),
]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(PARTS), min_size=2, max_size=5),
    st.lists(st.integers(0, 12), min_size=3, max_size=5).filter(lambda sizes: sum(n > 0 for n in sizes) > 1),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_sums_of_parts_agree_between_engines_and_stay_finite(parts, sizes, batch_size, steps, seed):
    try:
        method = sum(parts[2:], parts[0] + parts[1])
    except ud.UndriftError:
        assume(False)
    local = ud.Local(steps=steps, batch_size=batch_size, lr=0.05)
    options = {"rounds": 3, "local": local, "participation": 2, "seed": seed}
    lanes = ud.train(net(), make_clients(sizes), method, engine="lanes", **options)
    plain = ud.train(net(), make_clients(sizes), method, engine="plain", **options)
    assert all(torch.isfinite(w).all() for w in lanes.params.values())
    assert distance(lanes.params, plain.params) < 1e-7  # Adam and signs magnify rounding where an update is near zero
    assert [row["steps"] for row in lanes.history] == [row["steps"] for row in plain.history]


@pytest.mark.parametrize(("name", "most"), [("fedprox", 10), ("scaffold", 25), ("fednlr", 40)])
def test_methods_stay_short(name, most):
    """Lines of the class, docstrings, comments, blank lines and refusals aside."""
    import ast
    from importlib import import_module
    from inspect import getsource

    tree = ast.parse(getsource(import_module(f"undrift.methods.{name}")))
    part = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.lower() == name)
    refusals = ("check", "__post_init__")
    hooks = [n for n in part.body if not (isinstance(n, ast.FunctionDef) and n.name.startswith(refusals))]
    text = "\n".join(
        ast.unparse(n) for n in hooks if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    )
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(lines) <= most
