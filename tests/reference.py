"""A second implementation of every method, written from the equations alone: one client at a time, the weights one
flat float64 vector, no hooks. It shares with the package only the batches (`ud.batches`) and the keyed draws.

`parts` is a list of (name, settings) in the order of `+`; a setting that may be a schedule is given as its value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import undrift as ud
from undrift.method.part import REFINE, part_stream
from undrift.random import Key, bits, derive, normal


class Problem:
    """A model as a function of one flat vector."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.start = parameters_to_vector(model.parameters()).detach().clone()

    def tree(self, w: Tensor) -> dict[str, Tensor]:
        parts = w.split([s.numel() for s in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def output(self, w: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, self.tree(w), (x,))

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, logits=lambda z: z) -> Tensor:
        w = w.clone().requires_grad_()
        z = logits(self.output(w, x))
        (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z, y), w)
        return g

    def fisher(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([self.gradient(w, x[j : j + 1], y[j : j + 1]) ** 2 for j in range(len(x))]).mean(0)

    def fisher_of_tensors(self, w: Tensor, x: Tensor, y: Tensor, size: int) -> Tensor:
        """One number per tensor: squared gradients of batches' mean losses, summed, by the number of samples."""
        squares = torch.zeros_like(w)
        for begin in range(0, len(x), size):
            squares += self.gradient(w, x[begin : begin + size], y[begin : begin + size]) ** 2
        tensors = squares.split([shape.numel() for shape in self.shapes.values()])
        return torch.cat([torch.full_like(t, float(t.sum()) / len(x)) for t in tensors])

    def draw(self, words: tuple[int, int], step: int, stream: int) -> Tensor:
        key = Key(torch.tensor([int(w) for w in words]), torch.tensor(step), stream)
        return normal(key, (sum(s.numel() for s in self.shapes.values()),), torch.float64)


def at(number, t: int) -> float:
    return number(t) if callable(number) else number


def simulate(model, data, local, cohorts, parts, seed, scales=None, steps=None, factors=None) -> dict[str, Tensor]:
    """The global weights after all rounds; one whose cohort is empty changes nothing.

    `scales(w, i)`: FedNLR's, a vector for client i at the global weights. `steps(t, i)`: how many of its planned steps
    client i takes in round t. `factors(t, i)`: how many times as far from the global weights it returns.
    """
    problem = Problem(model)
    settings = dict(parts)
    uniform = settings.get("FedAvg") == "uniform" or {"FedDyn", "TwoDLRD", "AllDecreasing", "AdditiveTuning"} & set(
        settings
    )
    w = problem.start
    zeros = torch.zeros_like(w)
    sizes = [len(data[i][0]) for i in range(len(data))]
    population = sum(n > 0 for n in sizes)
    c, c_own = zeros, {}  # SCAFFOLD
    h, h_own = zeros, {}  # FedDyn
    ensemble, rounds_seen = zeros, 0  # temporal ensemble
    curvature = {}  # FedCurv: client -> (F, its local weights), of the previous round
    velocity, m, v, tau = zeros, zeros, zeros, 0  # server optimizers
    stalled, g_previous, r0, d = 0.0, zeros, 0, 0  # Pflug

    for t, cohort in enumerate(cohorts):
        if not cohort:
            continue
        start = w
        beta = next((s["beta"] for s in settings.values() if isinstance(s, dict) and "beta" in s), None)
        target = start if beta is None or not rounds_seen else ensemble / (1 - beta**rounds_seen)
        fisher_server = problem.fisher(start, *data.server) if "FedCL" in settings else None
        if settings.get("FedCL", {}).get("sum"):
            fisher_server = fisher_server * len(data.server[0])
        if size := settings.get("FedCL", {}).get("batch_size"):
            fisher_server = problem.fisher_of_tensors(start, *data.server, size)
        updates, works, weights, signs, new_curvature = [], [], [], [], {}
        c_changes = zeros
        for i in cohort:
            x, y = data[i]
            counts = torch.bincount(y, minlength=4)
            batches = ud.batches(data, local, client=i, round=t, seed=seed)
            if "TwoDLRD" in settings and settings["TwoDLRD"]["C"] * d >= 1 - 1e-12:
                batches = batches[:1]
            batches = batches[: steps(t, i)] if steps else batches
            words = derive(seed, "client", t, np.array([i]))
            words = (words[0][0], words[1][0])

            def logits(z, counts=counts):
                if "FedRS" in settings:
                    z = torch.where(counts > 0, z, settings["FedRS"] * z)
                if "FedLC" in settings:
                    z = z - settings["FedLC"] * counts.double().clamp(min=1e-8) ** -0.25
                return z

            scale = scales(start, i) if scales else torch.ones_like(w)
            wi, momentum, rate_sum, work, inertia = start, zeros, zeros, zeros, 0.0
            for k, rows in enumerate(batches):
                g = problem.gradient(wi, x[rows], y[rows], logits)
                g = g + local.weight_decay * wi
                if "FedProx" in settings:
                    g = g + at(settings["FedProx"]["mu"], t) * (wi - target)
                if "Scaffold" in settings:
                    g = g - c_own.get(i, zeros) + c
                if "FedDyn" in settings:
                    g = g - h_own.get(i, zeros) + settings["FedDyn"] * (wi - start)
                if "FedCurv" in settings:
                    for j, (f, wj) in curvature.items():
                        if j != i:
                            g = g + 2 * settings["FedCurv"] * f * (wi - wj)
                if "FedCL" in settings:
                    g = g + 2 * settings["FedCL"]["weight"] * fisher_server * (wi - target)
                if "GradientNoise" in settings:
                    stream = part_stream(ud.GradientNoise(std=0))
                    g = g + settings["GradientNoise"] * problem.draw(words, k, stream)
                momentum = local.momentum * momentum + g
                multiplier = scale * step_rate(settings, k, d, t)
                rate = at(local.lr, t) * multiplier
                wi = wi - rate * momentum
                if "Projection" in settings:
                    radius, around = settings["Projection"]
                    centre = start if around == "global" else zeros
                    length = (wi - centre).norm()
                    if length > radius:
                        wi = centre + (wi - centre) * radius / length
                inertia = local.momentum * inertia + 1
                rate_sum, work = rate_sum + rate, work + multiplier * inertia
            wi = start + factors(t, i) * (wi - start) if factors else wi
            delta = wi - start
            if "Scaffold" in settings:
                share = 1 / population if uniform or settings["Scaffold"] == "uniform" else len(x) / sum(sizes)
                new = c_own.get(i, zeros) - c + (start - wi) / rate_sum
                c_changes = c_changes + share * (new - c_own.get(i, zeros))
                c_own[i] = new
            if "FedDyn" in settings:
                h_own[i] = h_own.get(i, zeros) - settings["FedDyn"] * delta
            if "FedCurv" in settings:
                new_curvature[i] = (problem.fisher(wi, x, y), wi)
            updates.append(delta)
            works.append(work)
            weights.append(1.0 if uniform else float(len(x)))
            signs.append(torch.sign(delta))
        shares = [p / sum(weights) for p in weights]
        c, curvature = c + c_changes, new_curvature

        update = sum(p * u for p, u in zip(shares, updates, strict=True))
        for name, setting in parts:
            if name == "FedNova":
                total = sum(p * a for p, a in zip(shares, works, strict=True))
                update = total * sum(p * u / a for p, u, a in zip(shares, updates, works, strict=True))
            if name == "FedDyn":
                h = h - setting / population * sum(updates)
                update = update - h / setting
            if name == "ServerSGD":
                velocity = setting["momentum"] * velocity + update
                update = setting["lr"] * velocity
            if name in ("ServerAdam", "ServerYogi", "ServerAdagrad"):
                tau, q, b1, b2 = tau + 1, -update, 0.9, 0.999
                m = b1 * m + (1 - b1) * q
                if name == "ServerAdam":
                    v = b2 * v + (1 - b2) * q**2
                    eta = setting * (1 - b2**tau) ** 0.5 / (1 - b1**tau)
                elif name == "ServerYogi":
                    v, eta = v - (1 - b2) * torch.sign(v - q**2) * q**2, setting
                else:
                    v, eta = v + q**2, setting
                update = -eta * m / (v.sqrt() + 1e-8)
            if name == "FedAvgM":
                velocity = setting["momentum"] * velocity + update
                update = setting["lr"] * velocity
            if name in ("FedAdam", "FedYogi", "FedAdagrad"):
                b1, b2, adaptivity = setting.get("beta1", 0.9), setting.get("beta2", 0.99), setting.get("tau", 1e-3)
                if t == cohorts.index(next(c for c in cohorts if c)):
                    v = torch.full_like(w, setting.get("initial_v", adaptivity**2))
                m = b1 * m + (1 - b1) * update
                squared = update**2
                v = {
                    "FedAdam": b2 * v + (1 - b2) * squared,
                    "FedYogi": v - (1 - b2) * squared * torch.sign(v - squared),
                    "FedAdagrad": v + squared,
                }[name]
                update = setting["lr"] * m / (v.sqrt() + adaptivity)
            if name == "SignAgreement":
                update = torch.where(sum(signs).abs() >= setting, update, 0.0)
        w = start + update
        if "ServerTraining" in settings:
            w = server_training(problem, data, w, settings["ServerTraining"], seed, t)
        if beta is not None:
            ensemble, rounds_seen = (1 - beta) * w + beta * ensemble, rounds_seen + 1
        # Pflug's diagnostic, rounds counted from 1
        g_round = w - start
        stalled += float(g_round @ g_previous)
        g_previous = g_round
        for name in ("TwoDLRD", "AllDecreasing", "AdditiveTuning"):
            if name in settings and t + 1 > settings[name]["window"] + r0 and stalled < 0:
                d, stalled, r0 = d + 1, 0.0, t + 1
    return problem.tree(w)


def step_rate(settings, k: int, d: int, t: int) -> float:
    """What multiplies γ in local step k."""
    if "TwoDLRD" in settings:
        spent = settings["TwoDLRD"]["C"] * d
        return 1.0 if spent >= 1 - 1e-12 else (1 - spent) ** k
    if "AllDecreasing" in settings:
        return settings["AllDecreasing"]["factor"] ** d
    if "AdditiveTuning" in settings:
        return 1.0 if k == 0 else max(1 - settings["AdditiveTuning"]["C"] * d, 0)
    if "FirstStepOnly" in settings:
        return 0.0 if t >= settings["FirstStepOnly"] and k > 0 else 1.0
    return 1.0


def server_training(problem, data, w, setting, seed, t) -> Tensor:
    x, y = data.server
    words, v = torch.tensor(derive(seed, "server", t)), 0.0
    for epoch in range(setting["epochs"]):
        key = Key(words, torch.tensor(REFINE), part_stream(ud.ServerTraining(lr=0)) + (1 << 15) + epoch)
        for rows in torch.argsort(bits(key, len(x)), stable=True).split(setting["batch_size"]):
            g = problem.gradient(w, x[rows], y[rows]) + setting["weight_decay"] * w
            g = g * min(1.0, setting.get("clip_norm", torch.inf) / float(g.norm() + 1e-6))
            v = setting.get("momentum", 0.0) * v + g
            w = w - setting["lr"] * v
    return w
