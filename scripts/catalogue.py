"""The page of methods: their groups, references, equations, arguments, hooks and measured costs.

`benchmarks.costs` measures the costs, and writes docs/methods.md with `page`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

import undrift as ud
from scripts.references import NAMES, by_class, read
from undrift.method.parse import as_method
from undrift.method.part import Part
from undrift.methods import curvature, decay

TE = "target=TemporalEnsemble(0.2)"
METHODS: dict[str, list[str]] = {
    "Federated averaging": ["FedAvg()"],
    "Client-side regularization": [
        "FedProx(mu=0.01)",
        "FedDyn(alpha=0.1)",
        "FedCurv(weight=1)",
        "FedCL(weight=1)",
    ],
    "Temporal ensembles": [f"FedProx(mu=0.01, {TE})", f"FedCL(weight=1, {TE})"],
    "Control variates": ["Scaffold()"],
    "Aggregation": ["FedNova()", "SignAgreement(threshold=2)"],
    "Server optimizers": [
        "FedAvgM()",
        "FedAdam(lr=0.01)",
        "FedYogi(lr=0.01)",
        "FedAdagrad(lr=0.01)",
        "ServerSGD(momentum=0.9)",
        "ServerAdam(lr=0.01)",
        "ServerYogi(lr=0.01)",
        "ServerAdagrad(lr=0.01)",
    ],
    "Label skew": ["FedRS(alpha=0.5)", "FedLC(tau=1)", "FedNLR()", "CCVR()"],
    "Decaying learning rates and local steps": [
        "TwoDLRD(window=10)",
        "AllDecreasing(window=10)",
        "AdditiveTuning(window=10)",
        "FirstStepOnly(after=2)",
    ],
    "Server training, projection and noise": [
        "ServerTraining(lr=0.1)",
        "Projection(radius=3)",
        "GradientNoise(std=1e-4)",
    ],
}
"""By group, the methods as they are measured."""
ALSO = {"Temporal ensembles": ["TemporalEnsemble"], "Label skew": ["BalancedLoss"]}
"""What a group has besides, without a measurement of its own."""
ABOUT = {
    "FedAvg": "Averages the clients' updates. The baseline for everything else",
    "FedProx": "Keeps clients close to the global model. For long local training, and clients with unequal local steps",
    "FedDyn": "Corrects each client's loss by a linear and a quadratic term. For label skew and long local training",
    "FedCurv": "Keeps clients close to the last cohort's models, weighted by curvature. For label skew",
    "FedCL": "FedProx weighted by curvature, which the server measures on data of its own",
    "TemporalEnsemble": "Pulls FedProx or FedCL towards an average of the global models. For an unsteady global model",
    "Scaffold": "Corrects client drift with control variates. For heterogeneous clients and partial participation",
    "FedNova": "Normalizes updates by the number of local steps. For clients that take unequal numbers of steps",
    "SignAgreement": "Updates only the coordinates on whose sign clients agree. For updates that cancel each other",
    "FedAvgM": "Momentum on the server. For label skew; costs clients nothing",
    "FedAdam": "Adam on the server. For sparse gradients and learning rates that are hard to tune",
    "FedYogi": "Yogi on the server: like Adam, with a second moment that changes more slowly",
    "FedAdagrad": "Adagrad on the server. For sparse gradients",
    "ServerSGD": "FedAvgM without momentum by default: a learning rate on the server",
    "ServerAdam": "Adam on the server with bias correction, and other defaults than FedAdam",
    "ServerYogi": "Yogi on the server with other defaults than FedYogi",
    "ServerAdagrad": "Adagrad on the server with other defaults than FedAdagrad",
    "FedRS": "Scales down the logits of classes that a client lacks. For label skew with missing classes",
    "FedLC": "Enlarges the margins of classes that are rare at a client. For label skew",
    "FedNLR": "Scales each neuron's learning rate by its activation on the client's data. For label skew",
    "CCVR": "Retrains the classifier on virtual features after the last round. For a classifier biased by label skew",
    "BalancedLoss": "Weights samples so that a client's classes count equally. For imbalanced classes within clients",
    "TwoDLRD": "Decays the learning rate over rounds and over local steps. For bias that remains late in training",
    "AllDecreasing": "Decays the learning rate of all local steps alike. A baseline of 2D-LRD",
    "AdditiveTuning": "Decays the learning rate of all local steps but the first. A baseline of 2D-LRD",
    "FirstStepOnly": "Stops all local steps but the first, from some round on. An experiment rather than a method",
    "ServerTraining": "Trains on the server's data after each round. Where the server has a small data set",
    "Projection": "Bounds the norm of local weights. For local models that diverge from one another",
    "GradientNoise": "Adds noise to local gradients, as a regularizer. Gives no privacy",
}
"""What each method does and where it is meant to help, in a line."""


def _paragraph(module: Any, number: int) -> str:
    return (inspect.getdoc(module) or "").split("\n\n")[number]


INTRODUCTION = """# Methods

Federated learning methods for heterogeneous, non-IID clients. Each is FedAvg plus a change, and they combine with `+`:
`FedDyn(0.1) + FedNLR()`. Every number may be a schedule of the round, such as `ud.decay(0.1, 0.99)`.

The last column says what a method does and what it is meant for; it may or may not help on your data.
[Which method helps](troubles.md) compares methods on six kinds of heterogeneity, and [Papers](papers.md)
re-runs the experiments of five papers. [References](references.md) lists all papers, with BibTeX. More methods are
written as examples on the page of [hooks](hooks.md): MOON, FedSAM, Ditto, FedPer, Mime and others.

*Generated by `python -m benchmarks.costs --write docs/methods.md` from docstrings, references and measurements.*
"""
GROUPS = {
    "Client-side regularization": "A term in each client's loss limits client drift: how far local training moves away "
    f"from the other clients. {_paragraph(curvature, 1).replace('Both use', 'FedCurv and FedCL use')}",
    "Temporal ensembles": "FedProx and FedCL pull clients towards the latest global model. With a temporal ensemble, "
    "they pull towards an average of all global models so far.",
    "Control variates": "Each client estimates how its gradient differs from that of all clients, and local steps "
    "correct for the difference.",
    "Aggregation": "How the server combines the clients' updates.",
    "Server optimizers": "The server treats the aggregated update as a gradient, and takes the step of an optimizer. "
    "Clients do the same work as with FedAvg. The family is also known as FedOpt.",
    "Label skew": "For clients whose class distributions differ: some classes are rare at a client, or missing.",
    "Decaying learning rates and local steps": "On heterogeneous clients, with several local steps at a constant "
    "learning rate, FedAvg converges to a point other than the minimum of the global loss. Decaying the learning rate "
    "or the number of local steps reduces this bias.\n\n" + _paragraph(decay, 2),
    "Server training, projection and noise": "Three more techniques of the paper behind `SignAgreement`. Its momentum "
    "on the server is `ServerSGD`.",
}
"""What the methods of a group have in common."""
SCHEDULES = """### Decaying the number of local steps

{reference}: a schedule, without a part.

- `ud.Local(steps=ud.decay(K₀, d), …)` takes `K_t = ⌈K₀·d^t⌉` local steps in round t.
- `ud.Local(lr=ud.decay(γ₀, d), …)` and `ud.ServerSGD(lr=ud.decay(η₀, d))` decay the learning rates in the same way.
- `ud.inverse(initial, offset)` is `initial·offset/(offset + t)`, in place of the exponential decay.

The history has the number of local steps so far (`total_steps`), and its fraction of what constant K₀ would have taken
(`steps_fraction`).

The example of the paper is a loss in one variable (`examples/quadratic.py`, mean of ten runs). With constant K, FedAvg
misses the minimum; with decaying K, it reaches it.

![Constant K misses the minimum; decaying K reaches it](quadratic.png)"""
HOOKS = [name for name, hook in vars(Part).items() if inspect.isfunction(hook) and not name.startswith("_")]


def contradictions(part: Part) -> list[str]:
    """The methods that cannot be combined with this one, by trying."""
    found = []
    for expression in sorted({e for group in METHODS.values() for e in group}):
        other = as_method(expression).parts[0]
        if type(other) is not type(part) and type(other).__name__ not in found:
            try:
                part + other
            except ud.UndriftError:
                found.append(type(other).__name__)
    return found


def page(found: dict[str, Any]) -> str:
    """The page, in Markdown, with the costs that were measured."""
    lines = [INTRODUCTION, *overview(), "", *costs(found)]
    shown: set[str] = set()
    for title, group in METHODS.items():
        lines += ["", f"## {title}", *(["", wrapped(GROUPS[title])] if title in GROUPS else [])]
        for name in [*(e.partition("(")[0] for e in group), *ALSO.get(title, ())]:
            if name not in shown:
                lines += entry(getattr(ud, name))
            shown.add(name)
        if title.startswith("Decaying"):
            lines += ["", SCHEDULES.format(reference=by_class(read())["decay"].link)]
    return "\n".join(lines) + "\n"


def overview() -> list[str]:
    """The table of all methods, by group."""
    lines = ["| class | in the literature | reference | what it does, and for what |", "|---|---|---|---|"]
    papers, shown = by_class(read()), set()
    for title, group in METHODS.items():
        lines.append(f"| **{title}** | | | |")
        for name in dict.fromkeys([*(e.partition("(")[0] for e in group), *ALSO.get(title, ())]):
            if name not in shown:
                paper = papers[name].link if name in papers else "–"
                lines.append(f"| [`{name}`](#{name.lower()}) | {literature(name)} | {paper} | {ABOUT[name]} |")
            shown.add(name)
        if title.startswith("Decaying"):
            said = "Decays the number of local steps. For bias that remains late in training, and to save computation"
            link = "[`Local(steps=ud.decay(…))`](#decaying-the-number-of-local-steps)"
            lines.append(f"| {link} | decaying K | {papers['decay'].link} | {said} |")
    return lines


def literature(name: str) -> str:
    """What papers call the method; nothing for what has no name there."""
    unnamed = ("FirstStepOnly", "BalancedLoss", "Projection", "GradientNoise", "SignAgreement", "ServerTraining")
    return {"TemporalEnsemble": "FedProx-TE, FedCL-TE"}.get(name, "–" if name in unnamed else NAMES.get(name, name))


def costs(found: dict[str, Any]) -> list[str]:
    """The table of costs, and how to read it."""
    rows = found["rows"]
    itself, ccvr = rows["FedAvg()"]["round"], rows["CCVR()"]["round"]
    how = f"""**Round** is the time of a round relative to FedAvg: runs of the method and of FedAvg took turns, and the
    figure is the median of the ratios. **Down** and **up** are what a client receives and sends, **client** and
    **server** what each keeps between rounds, in multiples of the size of the weights. Digits, the `mlp`, 20 clients,
    batch size 10, one local epoch, two CPU threads, torch {found["torch"]}."""
    noise = f"""FedAvg measured against itself gave {itself:.2f}, and CCVR, which is FedAvg until the last round,
    {ccvr:.2f}. Differences of this size are noise, so the table has one decimal, and you should read nothing into 0.1.
    A round of this small model takes milliseconds, so the fixed costs of a step weigh more than they would in a large
    model. CCVR's own work comes after the last round; neither its time nor its uploads are in the table."""
    lines = ["## Costs", "", wrapped(how), "", wrapped(noise), ""]
    lines += ["| method | round | down | up | client | server |", "|---|---:|---:|---:|---:|---:|"]
    for expression in (e for group in METHODS.values() for e in group):
        row = rows[expression]
        cells = [f"{row['round']:.1f}", *(times(row[k]) for k in ("down", "up", "kept", "server"))]
        lines.append(f"| [`{expression}`](#{expression.partition('(')[0].lower()}) | {' | '.join(cells)} |")
    return lines


def wrapped(text: str) -> str:
    """The text with its lines filled, paragraph by paragraph."""
    paragraphs = (textwrap.fill(" ".join(p.split()), 120, break_on_hyphens=False) for p in text.split("\n\n"))
    return "\n\n".join(paragraphs)


def times(x: float) -> str:
    return "–" if x < 0.005 else f"{x:.2f}"


def entry(part: type) -> list[str]:
    """One method: its docstring, its arguments, an example, and the hooks that it overrides."""
    doc = inspect.getdoc(part) or ""
    text = doc.partition("\n\nExample:\n")[0].partition("\n\nArgs:\n")[0]
    described = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", doc.partition("\n\nArgs:\n")[2], re.M))
    lines = ["", f"### {part.__name__}", "", text]
    if fields := arguments(part, described):
        lines += ["", *fields]
    if example := re.search(r">>> method = (.+)", doc):
        lines += ["", f"Example: `{example[1]}`"]
    if used := [h for h in HOOKS if issubclass(part, Part) and getattr(part, h) is not getattr(Part, h)]:
        lines += ["", f"Overrides {', '.join(f'[{h}](hooks.md#{h})' for h in used)}."]
    return lines


def arguments(part: type, described: dict[str, str]) -> list[str]:
    """The arguments with their ranges, defaults and descriptions."""
    found = []
    for field in dataclasses.fields(part):
        about = []
        if "Number" in str(field.type):
            about.append(f"in {getattr(part, 'ranges', {}).get(field.name, '[0, inf)')}")
        if field.default is not dataclasses.MISSING:
            about.append(f"default {field.default!r}")
        brackets = f" ({', '.join(about)})" if about else ""
        found.append(f"- `{field.name}`{brackets}: {' '.join(described[field.name].split())}")
    return found
