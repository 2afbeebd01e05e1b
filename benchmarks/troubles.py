"""Which method helps against which kind of heterogeneity: the tables of docs/troubles.md, from a study on digits.

    undrift study benchmarks/troubles.toml --out runs/troubles      run the study: about ten minutes on one core
    python -m benchmarks.troubles --study runs/troubles             keep its study.json as the results
    python -m benchmarks.troubles --write docs/troubles.md          write the page's tables from the results

`benchmarks/troubles.toml` describes the study. Every method tries six settings on a tuning seed and keeps the one with
the best validation accuracy. It is then run with three other seeds, which are reported. An accuracy is the mean over
the last five rounds of a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "troubles.json"
KINDS = {
    "skewed labels": (
        "label skew",
        "class proportions differ a lot between clients: `Dirichlet(0.05)`, 20 clients, 8 per round",
    ),
    "two classes each": (
        "two classes per client",
        "each client has two of the ten classes: `Shards(2)`, 20 clients, 8 per round",
    ),
    "unequal work": (
        "unequal local steps",
        "clients take from 1 to 32 local steps: `Local(steps=[1, 2, 4, 8, 16, 32, 1, …])`, `Dirichlet(0.1)`, "
        "18 clients, all in every round",
    ),
    "few take part": ("low participation", "2 of 40 clients per round, `Dirichlet(0.1)`"),
    "long local training": (
        "many local steps",
        "few rounds, with much local training in each: 10 rounds of 60 local steps, `Dirichlet(0.1)`, 20 clients, "
        "8 per round",
    ),
    "tiny clients": (
        "small clients",
        "120 clients with about ten samples each, IID: `IID()`, 12 per round",
    ),
}
"""What the study calls a kind: the page's words for it, and its settings."""
Cell = dict[str, Any]


def tables(found: dict[str, Any]) -> str:
    """What to try, and all results, in Markdown."""
    cells = {(cell["partition"], cell["name"]): cell for cell in found["cells"]}
    methods = list(dict.fromkeys(cell["name"] for cell in found["cells"]))
    lines = [f"- **{title}**: {what}" for title, what in KINDS.values()]
    titles = " | ".join(title for title, _ in KINDS.values())
    lines += ["", "| heterogeneity | FedAvg | try | accuracy |", "|---|---:|---|---:|"]
    for name in KINDS:
        fedavg = cells[name, "FedAvg"]
        ranked = sorted(methods, key=lambda m: -cells[name, m]["mean"])
        ahead = [m for m in ranked if _ahead(cells[name, m], fedavg)][:3] or ["FedAvg"]
        tries = "<br>".join(f"`{cells[name, m]['method']}`, lr {_rate(cells[name, m])}" for m in ahead)
        gives = "<br>".join(_spread(cells[name, m]) for m in ahead)
        lines.append(f"| {KINDS[name][0]} | {_spread(fedavg)} | {tries} | {gives} |")
    lines += [
        "",
        "All methods: test accuracy, mean ± standard deviation over three seeds. **Bold** marks the best of a column,",
        "▲ a method that beat FedAvg in all three seeds, and ▼ one that lost to it in all three.",
        "",
    ]
    lines += [f"| | {titles} |", "|---|" + "---:|" * len(KINDS)]
    for method in methods:
        row = []
        for name in KINDS:
            cell, fedavg = cells[name, method], cells[name, "FedAvg"]
            text = _spread(cell)
            text = f"**{text}**" if cell["mean"] == max(cells[name, m]["mean"] for m in methods) else text
            row.append(text + ("&nbsp;▲" if _ahead(cell, fedavg) else "&nbsp;▼" if _ahead(fedavg, cell) else ""))
        lines.append(f"| {method} | {' | '.join(row)} |")
    lines += ["", "The settings chosen on validation data (`lr` is the clients' learning rate):", ""]
    lines += [f"| | {titles} |", "|---|" + "---|" * len(KINDS)]
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
    """Whether a beat b in every seed; both ran on the same data, with the same cohorts."""
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
