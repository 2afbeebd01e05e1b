"""Local optimizers in whole runs, on both engines, against loops over `ud.batches` that use `torch.optim` itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import undrift as ud
from tests.experiments import StopError, stop_after
from tests.killing import left_by, sigkilled
from tests.problems import distance, make_clients, net, same_bits
from undrift.training.build import prepare
from undrift.training.rounds import federated_round
from undrift.training.settings import Settings

PRECISION = 1e-12
SIZES = [23, 5, 0, 41, 10, 17, 1]
ENGINES = {"plain": {"engine": "plain"}} | {f"{n} lanes": {"engine": "lanes", "lanes": n} for n in (1, 2, 3)}
ON_BOTH = pytest.mark.parametrize("engine", [ENGINES["plain"], ENGINES["2 lanes"]], ids=["plain", "2 lanes"])
STEPS = ud.Local(epochs=2, batch_size=8, lr=0.05)
WEIGHTS = sum(p.numel() for p in net().parameters()) * 8
"""Bytes of the weights."""

OPTIMIZERS = {
    "sgd": (ud.SGD(), torch.optim.SGD, {}),
    "sgd with decay": (ud.SGD(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (ud.SGD(0.9, weight_decay=0.1), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (
        ud.SGD(0.9, nesterov=True, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (ud.Adam(), torch.optim.Adam, {}),
    "adam with decay": (
        ud.Adam(0.8, 0.95, 1e-3, weight_decay=0.1),
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (ud.AdamW(weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
}
CASES = pytest.mark.parametrize("case", OPTIMIZERS)


# ---- the same, by hand ----------------------------------------------------------------------------------------------

Carry = dict[str, dict[str, Tensor]]
"""The state of torch's optimizer, by parameter and name."""


class PowersOfBeta(torch.optim.Optimizer):
    """Adam, with the powers of its betas as state in place of the step count, as averaged moments need them.

    A moment m after t steps has the expectation (1 − βᵗ)·E[g], so the mean of several has (1 − mean of βᵗ)·E[g].
    """

    decoupled = False

    def __init__(self, groups, lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (p,), (beta1, beta2) = group["params"], group["betas"]
            if not self.state[p]:
                ones = {name: torch.ones((), dtype=torch.float64) for name in ("power1", "power2")}
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p), **ones}
            s, decay = self.state[p], group["weight_decay"] * p
            g = p.grad if self.decoupled else p.grad + decay
            s["m"], s["v"] = beta1 * s["m"] + (1 - beta1) * g, beta2 * s["v"] + (1 - beta2) * g**2
            s["power1"], s["power2"] = s["power1"] * beta1, s["power2"] * beta2
            direction = s["m"] / (1 - s["power1"]) / ((s["v"] / (1 - s["power2"])).sqrt() + group["eps"])
            p -= group["lr"] * (direction + decay if self.decoupled else direction)


class PowersOfBetaW(PowersOfBeta):
    decoupled = True

    def __init__(self, groups, lr, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(groups, lr, weight_decay, betas, eps)


WITH_POWERS = {torch.optim.Adam: PowersOfBeta, torch.optim.AdamW: PowersOfBetaW}


@dataclass
class ByHand:
    """Federated averaging with torch's optimizers, one client at a time, without anything of undrift but `ud.batches`.

    `options(t)` are the optimizer's in round t, and `own` those of single parameters (as factors of the rate and of
    the weight decay). `factor(k, steps)` multiplies the rate in local step k. `corrected(w, w0, client)` is added to
    the gradient, before clipping.
    """

    data: ud.FederatedDataset
    local: ud.Local
    kind: Any
    options: Callable[[int], dict[str, Any]]
    clip: Callable[[int], float | None] = lambda t: None
    factor: Callable[[int, int], float] = lambda k, steps: 1.0
    own: Callable[[str], tuple[float, float]] = lambda name: (1.0, 1.0)
    state: str = "reset"
    corrected: Callable[[dict[str, Tensor], dict[str, Tensor], int], dict[str, Tensor]] | None = None
    uniform: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.w = {n: p.detach().clone() for n, p in net().named_parameters()}
        self.kept: dict[int, Carry] = {}
        self.mean: Carry | None = None
        self.updates: dict[int, dict[str, Tensor]] = {}
        self.trace: list[dict[str, Tensor]] = []

    def client(self, t: int, i: int) -> tuple[dict[str, Tensor], Carry]:
        """Its weights after training, and its optimizer's state. `trace` has the weights before every step."""
        model, (x, y) = net(), self.data[i]
        model.load_state_dict(self.w)
        options = {"lr": 1.0, "weight_decay": 0.0, **self.options(t)}
        lr = self.local.lr(t) if callable(self.local.lr) else self.local.lr
        groups = [
            {"params": [p], "weight_decay": self.own(n)[1] * options["weight_decay"]}
            for n, p in model.named_parameters()
        ]
        optimizer = self.kind(groups, **options)
        before = {"reset": None, "keep": self.kept.get(i), "average": self.mean}[self.state]
        for n, p in model.named_parameters():
            if before:
                optimizer.state[p] = {name: value.clone() for name, value in before[n].items()}
        batches = ud.batches(self.data, self.local, client=i, round=t, seed=self.seed)
        for k, rows in enumerate(batches):
            self.trace.append({n: p.detach().clone() for n, p in model.named_parameters()})
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            if self.corrected:
                now = {n: p.detach() for n, p in model.named_parameters()}
                for n, term in self.corrected(now, self.w, i).items():
                    model.get_parameter(n).grad += term
            if self.clip(t) is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip(t))
            for group, n in zip(optimizer.param_groups, self.w, strict=True):
                group["lr"] = lr * self.factor(k, len(batches)) * self.own(n)[0]
            optimizer.step()
        state = {
            n: {k: v.detach().double().clone() for k, v in optimizer.state[p].items()}
            for n, p in model.named_parameters()
        }
        return {n: p.detach().clone() for n, p in model.named_parameters()}, state

    def round(self, t: int, cohort: list[int]) -> None:
        sizes = [1 if self.uniform else len(self.data[i][0]) for i in cohort]
        shares = [n / sum(sizes) for n in sizes]
        found = {i: self.client(t, i) for i in cohort}
        self.updates = {i: {n: w[n] - self.w[n] for n in w} for i, (w, _) in found.items()}
        self.kept |= {i: state for i, (_, state) in found.items()}
        first = found[cohort[0]][1]
        self.mean = {
            n: {k: sum(p * found[i][1][n][k] for p, i in zip(shares, cohort, strict=True)) for k in by}
            for n, by in first.items()
        }
        self.w = {
            n: w + sum(p * self.updates[i][n] for p, i in zip(shares, cohort, strict=True)) for n, w in self.w.items()
        }

    def rounds(self, history: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The weights after as many rounds, with the cohorts of this history."""
        for row in history:
            self.round(row["round"] - 1, row["clients"])
        return self.w


def always(options: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    return lambda t: options


@dataclass(frozen=True)
class Trace(ud.Part):
    """Records a lone client's weights before every local step."""

    steps: int

    def carry(self, params, client):
        return {n: torch.zeros(self.steps, *w.shape, dtype=w.dtype) for n, w in params.items()}

    def step(self, g, carry, params, client):
        here = torch.arange(self.steps) == client.step
        return g, {n: torch.where(here.view(-1, *[1] * w.dim()), w, carry[n]) for n, w in params.items()}

    def upload(self, delta, client):
        return client.carry, client.kept

    def transform(self, update, state, server):
        return update, server.totals.sums

    def history(self, state):
        return {"trace": {n: t.clone() for n, t in state.items()}}


# ---- step by step ---------------------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("engine", [ENGINES["plain"], ENGINES["1 lanes"]], ids=["plain", "lanes"])
def test_every_step_of_a_client_is_that_of_torch(case, engine):
    optimizer, kind, options = OPTIMIZERS[case]
    data, local = make_clients([23]), replace(STEPS, optimizer=optimizer)
    run = ud.train(net(), data, ud.FedAvg() + Trace(6), rounds=3, local=local, **engine)
    hand = ByHand(data, local, kind, always(options))
    for t, row in enumerate(run.history):
        hand.trace.clear()
        hand.round(t, [0])
        assert len(hand.trace) == row["steps"] == 6
        for k, wanted in enumerate(hand.trace):
            assert distance({n: row["trace"][n][k] for n in wanted}, wanted) < PRECISION, (t, k)
    assert distance(run.params, hand.w) < PRECISION
    assert distance(hand.trace[-1], hand.trace[0]) > 1e-3


@CASES
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_uneven_clients(case, engine):
    """Several rounds with short last batches, a client with one sample, and lanes that take one after another."""
    optimizer, kind, options = OPTIMIZERS[case]
    data, local = make_clients(SIZES), replace(STEPS, optimizer=optimizer)
    run = ud.train(net(), data, rounds=2, local=local, participation=5, **engine)
    assert any(6 in row["clients"] for row in run.history), "the client with one sample"
    assert distance(run.params, ByHand(data, local, kind, always(options)).rounds(run.history)) < PRECISION


EVERYTHING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipping": ({"clip_norm": 0.5}, {"clip": lambda t: 0.5}),
    "clipping by round": ({"clip_norm": ud.decay(2.0, 0.25)}, {"clip": lambda t: 2.0 * 0.25**t}),
    "clipping nothing": ({"clip_norm": torch.inf}, {}),
    "step schedule": (
        {"step_schedule": ud.warmup(3) * ud.cosine(0.1)},
        {"factor": lambda k, s: min(1, (k + 1) / 3) * (0.1 + 0.9 * (1 + np.cos(np.pi * k / s)) / 2)},
    ),
    "a function of the step": (
        {"step_schedule": lambda k, steps: 0.5**k},
        {"factor": lambda k, steps: 0.5**k},
    ),
    "groups": (
        {"groups": {"0.bias": ud.Group(rate=0.0), "*.bias": ud.Group(2.0, 0.0), "3.*": ud.Group(0.5, 3.0)}},
        {"own": lambda n: {"0.bias": (0.0, 1.0), "3.bias": (2.0, 0.0), "3.weight": (0.5, 3.0)}.get(n, (1.0, 1.0))},
    ),
}
EVERYTHING["all at once"] = tuple(  # type: ignore[assignment]
    {k: v for name in ("clipping by round", "step schedule", "groups") for k, v in EVERYTHING[name][side].items()}
    for side in (0, 1)
)


@ON_BOTH
@pytest.mark.parametrize("what", EVERYTHING)
def test_clipping_step_schedules_and_groups(what, engine):
    settings, by_hand = EVERYTHING[what]
    data = make_clients(SIZES)
    local = replace(STEPS, optimizer=ud.AdamW(weight_decay=0.1), lr=ud.decay(0.05, 0.9), **settings)
    run = ud.train(net(), data, rounds=2, local=local, participation=4, seed=1, **engine)
    hand = ByHand(data, local, torch.optim.AdamW, always({"weight_decay": 0.1}), seed=1, **by_hand)
    assert distance(run.params, hand.rounds(run.history)) < PRECISION
    if by_hand:
        without = ByHand(data, local, torch.optim.AdamW, always({"weight_decay": 0.1}), seed=1)
        assert distance(without.rounds(run.history), run.params) > 1e-4, "it has an effect"


@ON_BOTH
def test_groups_and_clipping_with_the_short_form(engine):
    """Weight decay comes before clipping there, as in a loss with a penalty."""
    data, groups = make_clients(SIZES), {"*.bias": ud.Group(2.0, 0.0), "3.*": ud.Group(0.5, 3.0)}
    local = replace(STEPS, momentum=0.9, weight_decay=0.1, groups=groups, clip_norm=0.5)
    run = ud.train(net(), data, rounds=2, local=local, participation=4, **engine)
    factors = {"0.bias": (2.0, 0.0), "3.bias": (2.0, 0.0), "3.weight": (0.5, 3.0), "0.weight": (1.0, 1.0)}

    def decay(w, w0, i):
        return {n: factors[n][1] * 0.1 * w[n] for n in w}

    hand = ByHand(
        data, local, torch.optim.SGD, always({"momentum": 0.9}), clip=lambda t: 0.5,
        own=lambda n: (factors[n][0], 0.0), corrected=decay,
    )  # fmt: skip
    assert distance(run.params, hand.rounds(run.history)) < PRECISION


@ON_BOTH
def test_an_optimizers_numbers_may_change_with_the_round(engine):
    data = make_clients(SIZES)
    optimizer = ud.Adam(beta1=ud.decay(0.9, 0.5), eps=lambda t: 10.0 ** (t - 8), weight_decay=lambda t: 0.1 * t)
    local = replace(STEPS, optimizer=optimizer)
    run = ud.train(net(), data, rounds=3, local=local, participation=3, **engine)

    def options(t):
        return {"betas": (0.9 * 0.5**t, 0.999), "eps": 10.0 ** (t - 8), "weight_decay": 0.1 * t}

    assert distance(run.params, ByHand(data, local, torch.optim.Adam, options).rounds(run.history)) < PRECISION


def test_momentum_that_is_0_in_the_first_round_only():
    data = make_clients([23, 10])
    local = replace(STEPS, optimizer=ud.SGD(momentum=lambda t: 0.9 * min(t, 1)))
    run = ud.train(net(), data, rounds=2, local=local, **ENGINES["2 lanes"])
    hand = ByHand(data, local, torch.optim.SGD, lambda t: {"momentum": 0.9 * min(t, 1)})
    assert distance(run.params, hand.rounds(run.history)) < PRECISION


# ---- what becomes of the state --------------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("case", ["nesterov", "adam with decay", "adamw"])
@pytest.mark.parametrize("state", ["keep", "average"])
def test_state_over_rounds(case, state, engine):
    """Adam's step count included, as powers of its betas; who sits out goes on later from where it was."""
    optimizer, kind, options = OPTIMIZERS[case]
    kind = WITH_POWERS.get(kind, kind) if state == "average" else kind
    data, local = make_clients(SIZES), replace(STEPS, optimizer=optimizer, optimizer_state=state)
    run = ud.train(net(), data, rounds=4, local=local, participation=3, seed=2, **engine)
    cohorts = [set(row["clients"]) for row in run.history]
    away = [c for t in (0, 1) for c in cohorts[t] - cohorts[t + 1] if any(c in later for later in cohorts[t + 2 :])]
    assert away, "somebody sits out a round and comes back"
    hand = ByHand(data, local, kind, always(options), state=state, seed=2)
    assert distance(run.params, hand.rounds(run.history)) < PRECISION
    forgetful = ByHand(data, local, kind, always(options), seed=2)
    assert distance(forgetful.rounds(run.history), run.params) > 1e-4


def test_the_step_count_goes_on_and_a_client_that_sits_out_keeps_its_state():
    data, local = (
        make_clients([16, 16, 16, 16]),
        ud.Local(steps=3, lr=0.05, optimizer=ud.Adam(), optimizer_state="keep"),
    )
    run = prepare(Settings(model=net(), data=data, rounds=5, local=local, participation=2, seed=3, device="cpu"))
    state, times = run.start(), np.zeros(4, np.int64)
    with torch.no_grad():
        for _ in range(5):
            before = dict(state.clients.parts[1])
            state, done = federated_round(run, state, False)
            took_part = done.answers.clients.tolist()
            times[took_part] += 1
            for c, kept in state.clients.parts[1].items():
                assert float(kept["beta1_power"]) == pytest.approx(0.9 ** (3 * times[c]), rel=1e-12)
                assert c in took_part or kept is before[c]
    assert len(set(times)) > 1


def test_an_averaged_state_travels_with_the_weights():
    """Both moments and two powers down and up, beside the weights and each client's weight in the mean."""
    data, options = make_clients([10, 20, 30]), {"rounds": 3, "participation": 2}
    adam, sgd = ud.Adam(), ud.SGD(momentum=0.9)
    extra = {(adam, "average"): 2 * WEIGHTS + 16, (sgd, "average"): WEIGHTS, (adam, "keep"): 0, (adam, "reset"): 0}
    for (optimizer, state), more in extra.items():
        local = replace(STEPS, optimizer=optimizer, optimizer_state=state)
        for row in ud.train(net(), data, local=local, **options).history:
            assert row["bytes_down"] == 2 * (WEIGHTS + more), (optimizer, state)
            assert row["bytes_up"] == 2 * (WEIGHTS + more + 8), (optimizer, state)
        assert row["total_bytes"] == 3 * (row["bytes_down"] + row["bytes_up"])


def test_an_averaged_state_stays_as_it_is_where_nobody_counts():
    data = make_clients([10, 20, 30])
    local = replace(STEPS, optimizer=ud.Adam(), optimizer_state="average")
    settings = Settings(
        model=net(), data=data, rounds=3, local=local, device="cpu", faults=ud.Faults(dropout=lambda t: float(t == 1))
    )
    run = prepare(settings)
    with torch.no_grad():
        state, _ = federated_round(run, run.start(), False)
        after, _ = federated_round(run, state, False)
    assert float(state.parts[1]["beta1_power"]) < 1 and same_bits(after.params, state.params)
    assert float(after.parts[1]["beta1_power"]) == float(state.parts[1]["beta1_power"])


KEPT = ud.Local(epochs=1, batch_size=8, lr=0.01, optimizer=ud.Adam(), optimizer_state="keep")
KILLED = {"rounds": 5, "local": KEPT, "participation": 3, "seed": 2, "engine": "lanes", "device": "cpu"}


def dying(folder: str) -> None:
    """A run that is killed in its fourth round; the last checkpoint is that of the second."""
    torch.set_num_threads(1)

    def on_round(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    ud.train(net(), make_clients(SIZES), out=folder, checkpoint_every=2, on_round=on_round, **KILLED)


def test_adam_kept_per_client_survives_a_kill_to_the_bit(tmp_path):
    data = make_clients(SIZES)
    whole = ud.train(net(), data, **KILLED)
    sigkilled("tests.test_local_optimizers", "dying", tmp_path / "r")
    assert (tmp_path / "r" / "checkpoint" / "round-2.json").exists()
    again = ud.train(net(), data, out=tmp_path / "r", resume=True, **KILLED)
    assert same_bits(again.params, whole.params) and left_by(again) == left_by(whole)
    fresh = ud.train(net(), data, **{**KILLED, "local": replace(KEPT, optimizer_state="reset")})
    assert not same_bits(fresh.params, whole.params), "what was kept matters"


@pytest.mark.parametrize("state", ["average", "keep"])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, state):
    data, options = make_clients(SIZES), {**KILLED, "local": replace(KEPT, optimizer_state=state), "engine": "plain"}
    whole = ud.train(net(), data, **options)
    for resume, rounds in ((False, 2), (True, 4)):
        with pytest.raises(StopError):
            ud.train(net(), data, out=tmp_path / "r", resume=resume, on_round=stop_after(rounds), **options)
    assert same_bits(ud.train(net(), data, out=tmp_path / "r", resume=True, **options).params, whole.params)


# ---- beside methods -------------------------------------------------------------------------------------------------


@ON_BOTH
def test_fedprox_with_adam(engine):
    data, local = make_clients(SIZES), replace(STEPS, optimizer=ud.Adam())
    run = ud.train(net(), data, ud.FedProx(0.7), rounds=3, local=local, participation=4, **engine)

    def pull(w, w0, i):
        return {n: 0.7 * (w[n] - w0[n]) for n in w}

    hand = ByHand(data, local, torch.optim.Adam, always({}), corrected=pull)
    assert distance(run.params, hand.rounds(run.history)) < PRECISION


@ON_BOTH
def test_feddyn_with_adamw(engine):
    """`h ← h − (α/N)·ΣΔᵢ` and `w ← mean wᵢ − h/α`, whatever the clients' optimizer."""
    data, local, alpha = make_clients(SIZES), replace(STEPS, optimizer=ud.AdamW(weight_decay=0.1)), 0.3
    run = ud.train(net(), data, ud.FedDyn(alpha), rounds=4, local=local, participation=4, **engine)
    zeros = {n: torch.zeros_like(p) for n, p in net().named_parameters()}
    h, own = zeros, {}

    def corrected(w, w0, i):
        return {n: -own.get(i, zeros)[n] + alpha * (w[n] - w0[n]) for n in w}

    decay = always({"weight_decay": 0.1})
    hand = ByHand(data, local, torch.optim.AdamW, decay, corrected=corrected, uniform=True)
    for t, row in enumerate(run.history):
        hand.round(t, row["clients"])
        for i, update in hand.updates.items():
            own[i] = {n: own.get(i, zeros)[n] - alpha * update[n] for n in zeros}
        h = {n: h[n] - alpha / 6 * sum(u[n] for u in hand.updates.values()) for n in zeros}
        hand.w = {n: w - h[n] / alpha for n, w in hand.w.items()}
    assert distance(run.params, hand.w) < 1e-11  # the correction h/α multiplies rounding by 1/α in every round


@dataclass(frozen=True)
class Accounts(ud.Part):
    """Shows a lone client's `rate_sum` and `work`."""

    def upload(self, delta, client):
        return {"rate_sum": client.rate_sum, "work": client.work}, client.kept

    def transform(self, update, state, server):
        return update, server.totals.sums

    def history(self, state):
        return {name: {n: float(x.mean()) for n, x in by.items()} for name, by in state.items()}


@ON_BOTH
@pytest.mark.parametrize("short", [True, False], ids=["short form", "optimizer"])
def test_rate_sums_and_work_with_step_schedules_and_groups(short, engine):
    """FedNova's a: with momentum ρ the gradient of step j is in every later step, ρ^(k−j) of it."""
    data, lr, rho, groups = make_clients([23]), 0.05, 0.8, {"*.bias": ud.Group(rate=3.0), "3.*": ud.Group(rate=0.0)}
    momentum = {"momentum": rho} if short else {"optimizer": ud.SGD(momentum=rho)}
    local = replace(STEPS, step_schedule=ud.warmup(4), groups=groups, **momentum)
    row = ud.train(net(), data, Accounts(), rounds=1, local=local, **engine).history[0]
    factors = [min(1, (k + 1) / 4) for k in range(6)]
    inertia = [sum(rho ** (k - j) for j in range(k + 1)) for k in range(6)]
    for n, rate in {"0.weight": 1.0, "0.bias": 3.0, "3.weight": 0.0, "3.bias": 3.0}.items():
        assert row["rate_sum"][n] == pytest.approx(rate * lr * sum(factors), rel=1e-14)
        wanted = rate * sum(f * v for f, v in zip(factors, inertia, strict=True))
        assert row["work"][n] == pytest.approx(wanted, rel=1e-14)


@ON_BOTH
@pytest.mark.parametrize("method", [ud.FedAvg(), ud.FedNova()], ids=["FedAvg", "FedNova"])
def test_the_short_form_of_momentum_is_sgd_with_momentum_to_the_bit(method, engine):
    data = make_clients(SIZES)
    locals_ = [replace(STEPS, momentum=0.9), replace(STEPS, optimizer=ud.SGD(momentum=0.9))]
    short, long = (ud.train(net(), data, method, rounds=3, local=x, participation=4, **engine) for x in locals_)
    assert same_bits(short.params, long.params)
    without = ud.train(net(), data, method, rounds=3, local=STEPS, participation=4, **engine)
    assert not same_bits(short.params, without.params)


@pytest.mark.parametrize("method", [ud.Scaffold(), ud.Scaffold("after"), ud.FedNova()], ids=str)
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": ud.SGD(0.9, nesterov=True)}, r"cannot account for the steps of SGD\(nesterov=True\)"),
        ({"optimizer": ud.Adam()}, "cannot account for the steps of Adam"),
        ({"optimizer": ud.AdamW()}, "cannot account for the steps of AdamW"),
        ({"clip_norm": 1.0}, "cannot account for clipped gradients"),
        ({"clip_norm": ud.decay(1.0, 0.9)}, "cannot account for clipped gradients"),
    ],
    ids=["nesterov", "adam", "adamw", "clipping", "clipping by round"],
)
def test_what_cannot_be_accounted_for_is_refused(method, settings, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(net(), make_clients([5, 6]), method, rounds=1, local=replace(STEPS, **settings))


@pytest.mark.parametrize("state", ["keep", "average"])
def test_fednova_refuses_a_velocity_of_earlier_rounds(state):
    """Its a counts a velocity that starts at 0 in every round; with another, clients are weighted wrongly."""
    local = replace(STEPS, optimizer=ud.SGD(momentum=0.9), optimizer_state=state)
    with pytest.raises(ud.UndriftError, match=rf'FedNova cannot account for.*optimizer_state="{state}"'):
        ud.train(net(), make_clients([5, 6]), ud.FedNova(), rounds=1, local=local)


def test_scaffold_refuses_momentum_unless_it_corrects_after_the_step():
    for momentum in ({"momentum": 0.9}, {"optimizer": ud.SGD(momentum=0.9)}, {"momentum": lambda t: 0.1 * t}):
        with pytest.raises(ud.UndriftError, match=r'Scaffold and client momentum.*Scaffold\(correction="after"\)'):
            ud.train(net(), make_clients([5, 6]), ud.Scaffold(), rounds=1, local=replace(STEPS, **momentum))
    with pytest.raises(ud.UndriftError, match=r'must be "gradient" or "after", not .before.'):
        ud.Scaffold(correction="before")


@ON_BOTH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_as_niid_bench_writes_it(momentum, engine):
    """Its loop: `optimizer.step()`; `w ← w − lr·(c − cᵢ)`; after all steps `cᵢ ← cᵢ − c + (w₀ − w)/(steps·lr)`."""
    data, lr = make_clients(SIZES), 0.05
    local = replace(STEPS, momentum=momentum, lr=lr)
    method = ud.Scaffold(correction="after", variates="uniform")
    run = ud.train(net(), data, method, rounds=4, local=local, participation=4, **engine)
    w = {n: p.detach().clone() for n, p in net().named_parameters()}
    zeros = {n: torch.zeros_like(p) for n, p in w.items()}
    c, own = zeros, {}
    for t, row in enumerate(run.history):
        sizes = {i: len(data[i][0]) for i in row["clients"]}
        mean, change = zeros, zeros
        for i, n in sizes.items():
            model, (x, y), ci = net(), data[i], own.get(i, zeros)
            model.load_state_dict(w)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            batches = ud.batches(data, local, client=i, round=t, seed=0)
            for rows in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.sub_(lr * (c[name] - ci[name]))
            after = {name: p.detach().clone() for name, p in model.named_parameters()}
            own[i] = {name: ci[name] - c[name] + (w[name] - after[name]) / (len(batches) * lr) for name in w}
            change = {name: change[name] + own[i][name] - ci[name] for name in w}
            mean = {name: mean[name] + n / sum(sizes.values()) * after[name] for name in w}
        w, c = mean, {name: c[name] + change[name] / 6 for name in w}
    assert distance(run.params, w) < 1e-11
    if momentum == 0:
        method = ud.Scaffold(variates="uniform")
        corrected = ud.train(net(), data, method, rounds=4, local=local, participation=4, **engine)
        assert distance(run.params, corrected.params) < 1e-11, "without momentum, before and after are the same step"
