"""What each method costs beside FedAvg, measured, and the catalogue page that is made of it and of the docstrings.

    python -m benchmarks.costs [--repeats 5]              measure, into benchmarks/results/costs.json
    python -m benchmarks.costs --write docs/methods.md    the page, from that file and from the docstrings

Time is a whole round's on the digits MLP (20 clients, batch 10), bytes are those of the trees that really travel and
stay, in multiples of the weights. Both sides run in one process, take turns, and the figure is the median. Each run
must agree with the plain engine after two rounds, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks import record
from benchmarks.agree import Problem
from undrift.method.parse import as_method
from undrift.method.part import Part
from undrift.training.build import prepare
from undrift.training.settings import Settings
from undrift.tree import tree_bytes

TE = "target=TemporalEnsemble(0.2)"
METHODS: dict[str, list[str]] = {
    "The base": ["FedAvg()"],
    "Decaying learning rates": [
        "TwoDLRD(window=10)",
        "AllDecreasing(window=10)",
        "AdditiveTuning(window=10)",
        "FirstStepOnly(after=2)",
    ],
    "Server optimizers": [
        "ServerSGD(momentum=0.9)",
        "ServerAdam(lr=0.01)",
        "ServerYogi(lr=0.01)",
        "ServerAdagrad(lr=0.01)",
    ],
    "Four techniques": [
        "SignAgreement(threshold=2)",
        "Projection(radius=3)",
        "GradientNoise(std=1e-4)",
        "ServerTraining(lr=0.1)",
    ],
    "Neuron-wise rates and their baselines": [
        "FedNLR()",
        "FedProx(mu=0.01)",
        "Scaffold()",
        "FedNova()",
        "FedDyn(alpha=0.1)",
        "FedRS(alpha=0.5)",
        "FedLC(tau=1)",
        "CCVR()",
    ],
    "Better targets": [f"FedProx(mu=0.01, {TE})", "FedCurv(weight=1)", "FedCL(weight=1)", f"FedCL(weight=1, {TE})"],
}
SCHEDULES = """## Decaying the number of local steps

No part, but a schedule: `ud.Local(steps=ud.decay(K₀, d), …)` takes `K_t = ⌈K₀·d^t⌉` steps in round t, and likewise
`lr=ud.decay(γ₀, d)` and `ServerSGD(lr=ud.decay(η₀, d))`; `ud.inverse(initial, offset)` is
`initial·offset/(offset + t)`. The history counts the work: `total_steps`, and `steps_fraction` of what a constant K₀
would have taken. Why it helps, on one number (`examples/quadratic.py`, the mean of ten runs):

![Constant K misses the optimum; decaying K reaches it](quadratic.png)"""
HOOKS = [name for name, hook in vars(Part).items() if inspect.isfunction(hook) and not name.startswith("_")]
LOCAL = ud.Local(epochs=1, batch_size=10, lr=0.1)
ROUNDS = 60


def data() -> ud.FederatedDataset:
    return ud.load("digits", ud.IID(), clients=20, server_fraction=0.05)


def problem(method: str, held: ud.FederatedDataset) -> Problem:
    model = ud.models.get("mlp", classes=held.classes, shape=held[0][0].shape[1:])
    return Problem(model, held, LOCAL, method, rounds=2)


def seconds(side: str, given: Problem) -> tuple[float, float]:
    """Seconds per round, and the distance from the plain engine."""
    run, apart = given.train(side, ROUNDS, evaluate_every=ROUNDS)
    return statistics.median(row["seconds"] for row in run.history[2:-1]), apart  # the first trace, the last finishes


def traffic(expression: str, held: ud.FederatedDataset) -> dict[str, float]:
    """Bytes down, up and kept a client, and at the server, in multiples of the weights."""
    given = Settings(model="mlp", data=held, method=expression, rounds=1, local=LOCAL, device="cpu", engine="lanes")
    run = prepare(given)
    with torch.no_grad():
        method = run.bound(0)
        state = run.start()
        received = method.broadcast(state.params, state.parts, run.server(0, state))
        plan, _ = method.plan(run.plan(0), state.parts, run.server(0, state))
        inputs = run.inputs(run.checked(plan, 0), state, received)
        outcome = run.engine.run(inputs)
    weights = tree_bytes(run.model.start)
    kept = sum(tree_bytes(next(iter(states.values()))) for states in outcome.kept.values())
    return {
        "down": 1 + tree_bytes(inputs.shared["received"]) / weights,
        "up": 1 + tree_bytes(outcome.sums) / weights,
        "kept": kept / weights,
        "server": tree_bytes(state.parts) / weights,
    }


def contradictions(part: Part) -> list[str]:
    """The methods that cannot stand beside this one, tried out."""
    found = []
    for expression in sorted({e for group in METHODS.values() for e in group}):
        other = as_method(expression).parts[0]
        if type(other) is not type(part) and type(other).__name__ not in found:
            try:
                part + other
            except ud.UndriftError:
                found.append(type(other).__name__)
    return found


def times(x: float) -> str:
    return "–" if x < 0.005 else f"{x:.2f}"


def page(found: dict[str, Any]) -> str:
    """The catalogue, in Markdown."""
    lines = [
        "# The methods",
        "",
        "Every method is FedAvg plus changes; they add up with `+`, and every number may be a schedule of the round.",
        "[Which method for which trouble](troubles.md) says what to try first.",
        "",
        "*Made by `python -m benchmarks.costs --write docs/methods.md` from the docstrings and from measurements.*",
        "",
        "## What they cost",
        "",
        "In multiples of FedAvg's round, and of the weights' bytes: what a client gets and sends, what it keeps",
        "between rounds, what the server keeps. Digits MLP, 20 clients, batch 10, one epoch, two CPU threads, "
        f"torch {found['torch']}.",
        "",
        "| method | round | down | up | client keeps | server keeps |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in found["rows"].items():
        cells = [f"{row['round']:.2f}", *(times(row[k]) for k in ("down", "up", "kept", "server"))]
        lines.append(f"| [`{name}`](#{name.partition('(')[0].lower()}) | {' | '.join(cells)} |")
    lines += ["", "CCVR's work comes once, after the last round, and is not in its figure; nor are its uploads then."]
    lines += ["", *SCHEDULES.splitlines()]
    shown: set[Any] = set()
    for title, group in METHODS.items():
        lines += ["", f"## {title}"]
        for part in dict.fromkeys(type(as_method(e).parts[0]) for e in group):
            if part not in shown:
                example = next(as_method(e).parts[0] for e in group if e.startswith(part.__name__ + "("))
                lines += entry(part, shown, contradictions(example))
    lines += entry(ud.TemporalEnsemble, shown, [])
    return "\n".join(lines) + "\n"


def entry(part: type, shown: set[Any], beside: list[str]) -> list[str]:
    """One method: the docstring of its module, if several methods share it, and its own, its arguments and hooks."""
    family = inspect.getdoc(sys.modules[part.__module__]) or ""
    lines = ["", f"### {part.__name__}", ""]
    if list(ud.METHODS.values()).count(part.__module__) > 1 and family not in shown:  # before the first of a family
        lines += [family, ""]
    shown |= {part, family}
    text, _, arguments = (inspect.getdoc(part) or "").partition("\n\nArgs:\n")
    lines += [text]
    if fields := numbers(part, dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, re.M))):
        lines += ["", *fields]
    if used := [h for h in HOOKS if issubclass(part, Part) and getattr(part, h) is not getattr(Part, h)]:
        lines += ["", f"Hooks: {', '.join(f'[{h}](hooks.md#{h})' for h in used)}."]
    return [*lines, "", f"Not beside: {', '.join(beside)}."] if beside else lines


def numbers(part: type, described: dict[str, str]) -> list[str]:
    """The arguments, with their ranges, defaults and descriptions."""
    found = []
    for field in dataclasses.fields(part):
        interval = getattr(part, "ranges", {}).get(field.name, "[0, inf)")
        values = f" in {interval}" if "Number" in str(field.type) else ""
        default = "" if field.default is dataclasses.MISSING else f", by default {field.default!r}"
        found.append(f"- `{field.name}`{values}{default}: {' '.join(described[field.name].split())}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    file = Path(__file__).parent / "results" / "costs.json"
    if arguments.write:
        arguments.write.write_text(page(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    torch.set_num_threads(2)
    held, rows = data(), {}
    base = problem("FedAvg()", held)
    for expression in (e for group in METHODS.values() for e in group):
        given, ratios, apart = problem(expression, held), [], 0.0
        for _ in range(arguments.repeats):
            took, apart = seconds(expression, given)
            ratios.append(took / seconds("FedAvg()", base)[0])
        rows[expression] = {"round": statistics.median(ratios), **traffic(expression, held)}
        figures = "".join(f"{k} {v:6.2f}  " for k, v in rows[expression].items())
        print(f"{expression:50}{figures}agrees to {apart:.0e}", flush=True)
        rows[expression]["agrees"] = apart
    found = {**record.head("costs"), "rows": rows}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
