"""Which method helps against which kind of heterogeneity: the tables of the page, from a study of digits.

    undrift study benchmarks/troubles.toml --out runs/troubles                  run it: about ten minutes on one core
    python -m benchmarks.troubles --study runs/troubles                         keep its study.json as our results
    python -m benchmarks.troubles --write docs/troubles.md                      the page's tables, from those results

`benchmarks/troubles.toml` describes it. Every method tries six settings on a tuning seed, and keeps the one with the
best validation accuracy; three other seeds are then run and reported. An accuracy is the mean of a run's last five
rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "troubles.json"
KINDS = {
    "skewed labels": "clients' classes differ a lot: `Dirichlet(0.05)`, 20 clients, 8 per round",
    "two classes each": "a client has two of the ten classes: `Shards(2)`, 20 clients, 8 per round",
    "unequal work": "clients take from 1 to 32 local steps: `Local(steps=[1, 2, 4, 8, 16, 32, 1, …])`, "
    "`Dirichlet(0.1)`, 18 clients, all in every round",
    "few take part": "2 of 40 clients per round, `Dirichlet(0.1)`",
    "long local training": "few rounds, much work in each: 10 rounds of 60 local steps, `Dirichlet(0.1)`, 20 clients, "
    "8 per round",
    "tiny clients": "120 clients with about ten samples each, of all classes alike: `IID()`, 12 per round",
}
Cell = dict[str, Any]


def tables(found: dict[str, Any]) -> str:
    """What to try, and all figures, in Markdown."""
    cells = {(cell["partition"], cell["name"]): cell for cell in found["cells"]}
    methods = list(dict.fromkeys(cell["name"] for cell in found["cells"]))
    lines = [f"- **{name}**: {what}" for name, what in KINDS.items()]
    lines += ["", "| kind | FedAvg | try | accuracy |", "|---|---:|---|---:|"]
    for name in KINDS:
        fedavg = cells[name, "FedAvg"]
        ranked = sorted(methods, key=lambda m: -cells[name, m]["mean"])
        ahead = [m for m in ranked if _ahead(cells[name, m], fedavg)][:3] or ["FedAvg"]
        tries = "<br>".join(f"`{cells[name, m]['method']}`, lr {_rate(cells[name, m])}" for m in ahead)
        gives = "<br>".join(_spread(cells[name, m]) for m in ahead)
        lines.append(f"| {name} | {_spread(fedavg)} | {tries} | {gives} |")
    lines += [
        "",
        "All methods: test accuracy, mean ± standard deviation over three seeds. **Bold** is a column's best;",
    ]
    lines += ["▲: ahead of FedAvg in each of the three seeds; ▼: behind in each.", ""]
    lines += [f"| | {' | '.join(KINDS)} |", "|---|" + "---:|" * len(KINDS)]
    for method in methods:
        row = []
        for name in KINDS:
            cell, fedavg = cells[name, method], cells[name, "FedAvg"]
            text = _spread(cell)
            text = f"**{text}**" if cell["mean"] == max(cells[name, m]["mean"] for m in methods) else text
            row.append(text + ("&nbsp;▲" if _ahead(cell, fedavg) else "&nbsp;▼" if _ahead(fedavg, cell) else ""))
        lines.append(f"| {method} | {' | '.join(row)} |")
    lines += ["", "The settings that validation data chose:", ""]
    lines += [f"| | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for method in methods:
        lines.append(f"| {method} | {' | '.join(_setting(cells[name, method]) for name in KINDS)} |")
    return "\n".join(lines)


def _rate(cell: Cell) -> str:
    return f"{cell['setting']['local.lr']:g}"


def _setting(cell: Cell) -> str:
    """The method's own strength, if it has one, and the clients' learning rate."""
    own = {key: value for key, value in cell["setting"].items() if key != "local.lr"}
    return "".join(f"{key.replace('lr', 'server lr')} {value}, " for key, value in own.items()) + f"lr {_rate(cell)}"


def _ahead(a: Cell, b: Cell) -> bool:
    """In every seed: both ran on the same data, with the same cohorts."""
    return all(x > y for x, y in zip(a["values"], b["values"], strict=True))


def _spread(cell: Cell) -> str:
    return f"{statistics.mean(cell['values']):.3f}&nbsp;±&nbsp;{statistics.stdev(cell['values']):.3f}"


def write(page: Path, found: dict[str, Any]) -> None:
    """Put the tables between the page's markers."""
    before, rest = page.read_text(encoding="utf-8").split("<!-- measured -->\n", 1)
    after = rest.split("<!-- end -->", 1)[1]
    page.write_text(f"{before}<!-- measured -->\n\n{tables(found)}\n\n<!-- end -->{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.study:
        found = json.loads((arguments.study / "study.json").read_text(encoding="utf-8"))
        if any(cell["lost"] or "why" in cell for cell in found["cells"]):
            raise SystemExit("a run of the study diverged or failed")
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        write(arguments.write, json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
