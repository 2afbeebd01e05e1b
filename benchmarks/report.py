"""RESULTS.md from what the benchmarks wrote:  python -m benchmarks.report"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.beside import fastest

HERE = Path(__file__).parent
ABOUT = {
    "pfl": "Whole rounds, both sides in one process, by turns, medians.",
    "Flower": "Whole rounds, by turns, medians;\nclients that train at a time have a Ray actor each.",
    "FedJAX": "Whole rounds, both sides in one process,\nby turns, medians.",
}


def read(name: str) -> dict[str, Any] | None:
    file = HERE / "results" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def where(found: dict[str, Any]) -> str:
    versions = {"torch": found["torch"], **found.get("with", {})}
    older = ["an earlier version"] if found.get("older") else []
    return ", ".join([found["gpu"], *(f"{name} {version}" for name, version in versions.items()), *older])


def others(found: dict[str, Any]) -> list[str]:
    name, base = found["benchmark"], fastest(found["rows"])
    beside = "" if name == "pfl" else f", beside {name}"
    lines = [f"| {r['side']} | {r['ms']:.2f} | {base['ms'] / r['ms']:.1f}× |" for r in found["rows"]]
    return [
        f"## pfl-research's CIFAR-10 benchmark{beside}{', on a CPU' if 'CPU' in found['gpu'] else ''}",
        "",
        f"`python -m benchmarks.{name.lower()}`, {where(found)}. {ABOUT[name]}",
        "",
        f"| | ms a round | ÷ {base['side']} |",
        "|---|---|---|",
        *lines,
    ]


def cohort(found: dict[str, Any]) -> list[str]:
    sides = ("loop", "replayed", "central", "ours", "compiled")
    lines = []
    for row in found["rows"]:
        speed = row["thousand_samples_a_second"]
        cells = " | ".join(f"{speed[side]:.1f}" if side in speed else "–" for side in sides)
        over = " | ".join(f"{row['best'] / speed[side]:.2f}×" for side in ("loop", "replayed", "central"))
        older = ", an earlier version" if row.get("older") else ""
        lines.append(f"| {row['case']}, {row['precision']}{older} | {cells} | {over} |")
    return [
        "## The papers' models",
        "",
        f"`python -m benchmarks.cohort`, {where(found)}. Thousand samples a second: an eager loop, the loop with its",
        "step replayed as a CUDA graph, one model on as many samples a step, ours, ours compiled; then our better one",
        "over each.",
        "",
        f"| | {' | '.join(sides)} | ÷ loop | ÷ replayed | ÷ central |",
        "|---" * 9 + "|",
        *lines,
    ]


def convolutions(found: dict[str, Any]) -> list[str]:
    ways, lines = ("grouped", "channels last", "ours"), []
    for row in found["rows"]:
        took = row["microseconds"]
        over = min(took["grouped"], took["channels last"]) / took["ours"]
        lines.append(
            f"| {row['layer']}, {row['precision']} | {' | '.join(f'{took[w]:.0f}' for w in ways)} | {over:.2f}× |"
        )
    return [
        "## A cohort's convolutions",
        "",
        f"`python -m benchmarks.convolutions`, {where(found)}. Microseconds, forward and backward: torch's grouped",
        "convolution, the same with channels last in memory, our kernels; then the better of torch's over ours.",
        "",
        f"| | {' | '.join(ways)} | torch ÷ ours |",
        "|---|---|---|---|---|",
        *lines,
    ]


def methods(found: dict[str, Any]) -> list[str]:
    epoch, lines = found["rows"][0]["ms"], []
    for r in found["rows"]:
        apart = f"{r['passes_ms']:.1f} | {r['passes_ms'] / epoch:.2f}×" if r["passes_ms"] else " | "
        lines.append(f"| {r['method']} | {r['ms']:.1f} | {r['over_fedavg']:.2f}× | {apart} |")
    return [
        "## Methods, on VGG-9",
        "",
        f"`python -m benchmarks.methods`, {where(found)}, compiled: {found['compile']}. A round is one",
        "local epoch; passes over the data without training are counted apart, beside it.",
        "",
        "| | ms a round | ÷ FedAvg | passes, ms | ÷ an epoch |",
        "|---|---|---|---|---|",
        *lines,
    ]


def busy(found: dict[str, Any]) -> list[str]:
    lines = [f"| {n} | {r['median']:.1%} | {r['lowest']:.1%} – {r['highest']:.1%} |" for n, r in found["rows"].items()]
    return [
        "## How busy lanes are",
        "",
        "`python -m benchmarks.busy`: 100 clients by Dirichlet(0.1), batches of 64, ten partitions. The rule picks "
        f"{min(found['rule'])} to {max(found['rule'])}.",
        "",
        "| lanes | busy, median | lowest – highest |",
        "|---|---|---|",
        *lines,
    ]


def cpu(found: dict[str, Any]) -> list[str]:
    sides, lines = ("loop", "auto", "one lane", "all lanes", "plain"), []
    for row in found["rows"]:
        cells = " | ".join(f"{row['samples_per_second'][side]:,.0f}" for side in sides)
        over = f"{row['auto_over_loop']:.2f}× | {row['auto_over_better']:.2f}×"
        lines.append(f"| {row['case']} | {cells} | {over} | {row['lanes']} |")
    return [
        "## On a CPU",
        "",
        f"`python -m benchmarks.cpu`, {found['threads']} threads, torch {found['torch']}. Samples a second: a loop,",
        "what the rule chooses, and its choices by hand (all lanes: vmap over the cohort). Ratios are medians of",
        "neighbouring runs' ratios.",
        "",
        f"| | {' | '.join(sides)} | auto ÷ loop | ÷ the better of loop and all lanes | lanes |",
        "|---" * 9 + "|",
        *lines,
    ]


def main() -> None:
    lines = ["# Benchmarks", "", "Made by `python -m benchmarks.report` from `benchmarks/results/*.json`.", ""]
    sections = {
        "pfl": others,
        "flower": others,
        "cohort": cohort,
        "convolutions": convolutions,
        "methods": methods,
        "busy": busy,
        "cpu": cpu,
        "pfl_cpu": others,
        "flower_cpu": others,
        "fedjax_cpu": others,
    }
    for name, section in sections.items():
        if found := read(name):
            lines += [*section(found), ""]
    (HERE / "RESULTS.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
