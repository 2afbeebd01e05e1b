"""Which method helps against which trouble, measured on digits, and the tables of the page made of it.

    python -m benchmarks.troubles [--json benchmarks/results/troubles.json]     run it: about ten minutes on one core
    python -m benchmarks.troubles --write docs/troubles.md                      the page's tables, from that file

Every method may try six settings on data dealt out with a seed of their own, and keeps the one with the best
validation accuracy. Only then three other seeds are run, and their test accuracy is told. An accuracy is the mean of a
run's last five rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks.agree import finite

TUNING, SEEDS, TAIL = 100, (0, 1, 2), 5
EPOCHS = {"epochs": 2, "batch_size": 32}
TROUBLES: dict[str, dict[str, Any]] = {
    "skewed labels": {
        "what": "clients' classes differ a lot: `Dirichlet(0.05)`, 20 clients, 8 a round",
        "data": {"partition": "Dirichlet(0.05)", "clients": 20},
        "run": {"rounds": 30, "participation": 0.4},
        "local": EPOCHS,
    },
    "two classes each": {
        "what": "a client has two of the ten classes: `Shards(2)`, 20 clients, 8 a round",
        "data": {"partition": "Shards(2)", "clients": 20},
        "run": {"rounds": 30, "participation": 0.4},
        "local": EPOCHS,
    },
    "unequal work": {
        "what": "clients take from 1 to 32 local steps: `Local(steps=[1, 2, 4, 8, 16, 32, 1, …])`, `Dirichlet(0.1)`, "
        "18 clients, all in every round",
        "data": {"partition": "Dirichlet(0.1)", "clients": 18},
        "run": {"rounds": 15, "participation": 1.0},
        "local": {"steps": [1, 2, 4, 8, 16, 32] * 3, "batch_size": 32},
    },
    "few take part": {
        "what": "2 of 40 clients per round, `Dirichlet(0.1)`",
        "data": {"partition": "Dirichlet(0.1)", "clients": 40},
        "run": {"rounds": 60, "participation": 2},
        "local": EPOCHS,
    },
    "long local training": {
        "what": "few rounds, much work in each: 10 rounds of 60 local steps, `Dirichlet(0.1)`, 20 clients, 8 a round",
        "data": {"partition": "Dirichlet(0.1)", "clients": 20},
        "run": {"rounds": 10, "participation": 0.4},
        "local": {"steps": 60, "batch_size": 32},
    },
    "tiny clients": {
        "what": "120 clients with about ten samples each, of all classes alike: `IID()`, 12 a round",
        "data": {"partition": "IID()", "clients": 120},
        "run": {"rounds": 30, "participation": 0.1},
        "local": {"epochs": 4, "batch_size": 4},
    },
}
RATES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.8)
"""Six for methods that have nothing else to choose; the others try three strengths with two of them."""
METHODS: dict[str, list[tuple[float, str]]] = {
    **{name: [(rate, f"{name}()") for rate in RATES] for name in ("FedAvg", "Scaffold", "FedNova", "FedNLR")},
    **{
        name: [(rate, template.format(x)) for rate, x in itertools.product((0.2, 0.5), strengths)]
        for name, template, strengths in (
            ("FedProx", "FedProx(mu={})", (0.1, 0.3, 1.0)),
            ("FedDyn", "FedDyn(alpha={})", (0.03, 0.1, 0.3)),
            ("FedRS", "FedRS(alpha={})", (0.1, 0.5, 0.9)),
            ("FedLC", "FedLC(tau={})", (0.1, 0.3, 1.0)),
            ("ServerSGD", "ServerSGD(momentum={})", (0.5, 0.8, 0.9)),
            ("ServerAdam", "ServerAdam(lr={})", (0.01, 0.03, 0.1)),
            ("FedRS + ServerSGD", "FedRS(alpha=0.5) + ServerSGD(momentum={})", (0.5, 0.8, 0.9)),
        )
    },
}


def accuracies(trouble: dict[str, Any], lr: float, method: str, seed: int) -> tuple[float, float]:
    """On validation and on test data, the mean of the last rounds."""
    data = ud.load("digits", **trouble["data"], seed=seed, validation_fraction=0.2)
    local = ud.Local(**trouble["local"], lr=lr)
    run = ud.train("mlp", data, method, local=local, seed=seed, **trouble["run"])
    if seed != TUNING:  # a setting that diverges loses on validation data; one that is reported must not
        finite(f"{method}, lr {lr}, seed {seed}", run.params)
    rows = run.history[-TAIL:]
    return tuple(statistics.mean(row[name] for row in rows) for name in ("validation_accuracy", "accuracy"))  # type: ignore[return-value]


def measure(file: Path) -> None:
    torch.set_num_threads(1)
    began, cells = time.process_time(), []
    for name, trouble in TROUBLES.items():
        for method, settings in METHODS.items():
            tried = [accuracies(trouble, lr, expression, TUNING)[0] for lr, expression in settings]
            lr, expression = settings[tried.index(max(tried))]
            test = [accuracies(trouble, lr, expression, seed)[1] for seed in SEEDS]
            cells.append({"trouble": name, "method": method, "lr": lr, "chosen": expression, "test": test})
            print(f"{name:20} {method:20} lr {lr:<5} {expression:44} {statistics.mean(test):.3f}", flush=True)
            took = round(time.process_time() - began)
            head = {"benchmark": "troubles", "torch": torch.__version__, "cpu_seconds": took, "seeds": SEEDS}
            file.write_text(json.dumps({**head, "cells": cells}, indent=1) + "\n", encoding="utf-8")


def tables(found: dict[str, Any]) -> str:
    """What to try, and all figures, in Markdown."""
    cells = {(cell["trouble"], cell["method"]): cell for cell in found["cells"]}
    lines = [f"- **{name}**: {trouble['what']}" for name, trouble in TROUBLES.items()]
    lines += ["", "| trouble | FedAvg | try | which gives |", "|---|---:|---|---:|"]
    for name in TROUBLES:
        fedavg = cells[name, "FedAvg"]
        ranked = sorted(METHODS, key=lambda m: -statistics.mean(cells[name, m]["test"]))
        ahead = [m for m in ranked if _ahead(cells[name, m], fedavg)][:3] or ["FedAvg"]
        tries = "<br>".join(f"`{cells[name, m]['chosen']}`, lr {cells[name, m]['lr']:g}" for m in ahead)
        gives = "<br>".join(_spread(cells[name, m]["test"]) for m in ahead)
        lines.append(f"| {name} | {_spread(fedavg['test'])} | {tries} | {gives} |")
    lines += [
        "",
        "All of them: test accuracy, mean ± standard deviation over three seeds. **Bold** is a column's best;",
    ]
    lines += ["▲ says: ahead of FedAvg in each of the three seeds; ▼: behind in each.", ""]
    lines += [f"| | {' | '.join(TROUBLES)} |", "|---|" + "---:|" * len(TROUBLES)]
    for method in METHODS:
        row = []
        for name in TROUBLES:
            cell, fedavg = cells[name, method], cells[name, "FedAvg"]
            best = max(statistics.mean(cells[name, m]["test"]) for m in METHODS)
            text = _spread(cell["test"])
            text = f"**{text}**" if statistics.mean(cell["test"]) == best else text
            row.append(text + ("&nbsp;▲" if _ahead(cell, fedavg) else "&nbsp;▼" if _ahead(fedavg, cell) else ""))
        lines.append(f"| {method} | {' | '.join(row)} |")
    lines += ["", "What validation data chose:", "", f"| | {' | '.join(TROUBLES)} |", "|---|" + "---|" * len(TROUBLES)]
    for method in METHODS:
        row = [f"{_strength(cells[name, method]['chosen'])}lr {cells[name, method]['lr']:g}" for name in TROUBLES]
        lines.append(f"| {method} | {' | '.join(row)} |")
    return "\n".join(lines)


def _strength(expression: str) -> str:
    """What was chosen beside the clients' rate: the last argument, if there is one."""
    arguments = re.findall(r"(\w+)=([\d.]+)", expression)
    return f"{arguments[-1][0].replace('lr', 'server lr')} {arguments[-1][1]}, " if arguments else ""


def _ahead(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """In every seed: both ran on the same data, with the same cohorts."""
    return all(x > y for x, y in zip(a["test"], b["test"], strict=True))


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}&nbsp;±&nbsp;{statistics.stdev(values):.3f}"


def write(page: Path, found: dict[str, Any]) -> None:
    """Put the tables between the page's markers."""
    before, rest = page.read_text(encoding="utf-8").split("<!-- measured -->\n", 1)
    after = rest.split("<!-- end -->", 1)[1]
    page.write_text(f"{before}<!-- measured -->\n\n{tables(found)}\n\n<!-- end -->{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "troubles.json")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, json.loads(arguments.json.read_text(encoding="utf-8")))
    else:
        measure(arguments.json)


if __name__ == "__main__":
    main()
