"""(b) The lanes engine against the plain one, for every kind of model, cohort and method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import undrift as ud
from tests.gpu.checks import Check, Finding, counted_replays, start_of, update_distance, within
from tests.gpu.cohorts import COHORTS, GIANT, Cohort, with_momentum
from tests.gpu.models import MODELS, POOLED, data_for, make
from undrift.engine import graph

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative to the norm of the update. float64 never reaches our own kernels, so every model also runs in float32."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}
METHODS: dict[str, Any] = {
    "momentum": ud.FedAvg(),
    "Scaffold": ud.Scaffold(),
    "FedDyn + FedNLR": ud.FedDyn(alpha=0.3) + ud.FedNLR(base=1.0, depth=0.45, width=0.3),
    "FedCurv": ud.FedCurv(weight=0.5),
}


def compare(
    model: str, dtype: torch.dtype, cohort: Cohort, device: str, method: Any = ud.FedAvg(), compiled: bool = False  # noqa: B008
) -> Finding:  # fmt: skip
    """Both engines from the same weights; the distance between them, relative to what the plain one learned."""
    lengths = cohort.lengths()
    assert cohort.holds(lengths), f"the cohort is not what its name says: its segments are {lengths}"
    module, data = make(model, dtype), data_for(model, cohort.sizes)
    settings: dict[str, Any] = {"rounds": cohort.rounds, "local": cohort.local, "device": device}
    settings["rehearse"] = False  # which takes steps of its own, and would notice some of what this is to notice
    plain = ud.train(module, data, method, engine="plain", **settings)
    captured = graph.captures(torch.device(device))
    # Only captured steps are compiled. Elsewhere the comparison is the same, of steps that are not.
    settings["compile"] = compiled and captured
    with counted_replays() as replays:
        lanes = ud.train(module, data, method, engine="lanes", lanes=cohort.lanes, **settings)
    assert lanes.choices["engine"] == "lanes" and lanes.choices["lanes"] == min(cohort.lanes, len(cohort.sizes))
    assert lanes.choices["device"].startswith(device) and lanes.choices["compile"] == settings["compile"]
    steps = sum(map(sum, lengths))
    if captured and replays != [steps]:
        return Finding("FAIL", f"{replays[0]} replays of captured graphs for {steps} steps")
    return within(update_distance(lanes.params, plain.params, start_of(module)), BOUNDS[dtype])


def checks() -> Iterator[Check]:
    for model in MODELS:
        for dtype, kind in DTYPES.items():
            if model == POOLED and kind == torch.float64:
                continue  # which has no kernels, nor what is fused
            for name, cohort in COHORTS.items():
                yield _check(f"{model}, {dtype}, {name}", model, kind, cohort)
            for name, method in METHODS.items():
                for where, cohort in (("", GIANT), (", steps grow", COHORTS["steps grow"])):
                    made = with_momentum(cohort) if name == "momentum" else cohort
                    yield _check(f"{model}, {dtype}, {name}{where}", model, kind, made, method=method, full=bool(where))
    yield from compiled()


COMPILED = ("linear", "convolution, padded", "convolution, strided", "GRU")
"""What `make gpu-full` compiles with every cohort and method."""


def compiled() -> Iterator[Check]:
    """Compiling takes half a minute, so `make gpu` compiles each cohort and method once, and each model twice or so."""
    methods = {name: (with_momentum(GIANT) if name == "momentum" else GIANT, m) for name, m in METHODS.items()}
    cases = {name: (cohort, ud.FedAvg()) for name, cohort in COHORTS.items()} | methods
    for i, (name, (cohort, method)) in enumerate(cases.items()):
        for j, model in enumerate(MODELS):
            first = i % len(MODELS) == j
            if first or model in COMPILED:
                title = f"{model}, float32, {name}, compiled"
                yield _check(title, model, torch.float32, cohort, not first, method=method, compiled=True)
    name = "a later segment is longer"
    yield _check(f"linear, float64, {name}, compiled", "linear", torch.float64, COHORTS[name], compiled=True)


def _check(title: str, model: str, dtype: torch.dtype, cohort: Cohort, full: bool = False, **options: Any) -> Check:
    def run(device: str) -> Finding:
        return compare(model, dtype, cohort, device, **options)

    return Check("b", title, run, seconds=40.0 if options.get("compiled") else 4.0, full=full)
