"""RESULTS.md from what the benchmarks wrote:  python -m benchmarks.report

Refuses GPU figures that come from different versions of the package's source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.agree import BOUNDS
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
    return ", ".join([found["gpu"], *(f"{name} {version}" for name, version in versions.items())])


def on_gpu(found: dict[str, Any]) -> bool:
    return "gpu" in found and "CPU" not in found["gpu"]


def version(files: dict[str, dict[str, Any]]) -> str | None:
    """The commit that all GPU figures are of; raises `SystemExit` unless they are of the same source."""
    gpu = {name: found for name, found in files.items() if on_gpu(found)}
    sources = {name: found.get("source", "not recorded") for name, found in gpu.items()}
    if "not recorded" in sources.values() or len(set(sources.values())) > 1:
        told = "; ".join(f"{name}.json: {source}" for name, source in sources.items())
        raise SystemExit(f"The GPU figures are not all of one version of src/, so measure them again. {told}.")
    commits = {found["commit"] for found in gpu.values()}
    return ", ".join(sorted(commits)) or None


def bounds() -> str:
    return ", ".join(f"{bound:.2g} in {precision}" for precision, bound in BOUNDS.items() if precision != "float64")


def others(found: dict[str, Any]) -> list[str]:
    name, base = found["benchmark"], fastest(found["rows"])
    beside = "" if name == "pfl" else f", beside {name}"
    lines = []
    for r in found["rows"]:
        agrees = f"{r['agrees']:.0e}" if "agrees" in r else "not checked"
        lines.append(f"| {r['side']} | {r['ms']:.2f} | {base['ms'] / r['ms']:.1f}× | {agrees} |")
    return [
        f"## pfl-research's CIFAR-10 benchmark{beside}{', on a CPU' if 'CPU' in found['gpu'] else ''}",
        "",
        f"`python -m benchmarks.{name.lower()}`, {where(found)}. {ABOUT[name]}",
        "",
        f"| | ms per round | times as fast as {base['side']} | agrees to |",
        "|---|---|---|---|",
        *lines,
    ]


def cohort(found: dict[str, Any]) -> list[str]:
    sides = ("loop", "replayed", "central", "ours", "compiled")
    lines = []
    for row in found["rows"]:
        speed = row["thousand_samples_a_second"]
        cells = " | ".join(f"{speed[side]:.1f}" if side in speed else "–" for side in sides)
        over = " | ".join(f"{row['best'] / speed[side]:.2f}×" for side in ("loop", "replayed", "central"))
        lines.append(f"| {row['case']}, {row['precision']} | {cells} | {over} | {max(row['agrees'].values()):.0e} |")
    return [
        "## The papers' models",
        "",
        f"`python -m benchmarks.cohort`, {where(found)}. Thousand samples per second: an eager loop, the loop with its",
        "step replayed as a CUDA graph, one model on as many samples per step, ours, ours compiled; then our better",
        "one over each. The sides written by hand agree with eager float32 steps, ours with the plain engine.",
        "",
        f"| | {' | '.join(sides)} | ÷ loop | ÷ replayed | ÷ central | agree to |",
        "|---" * 10 + "|",
        *lines,
    ]


def convolutions(found: dict[str, Any]) -> list[str]:
    ways, lines = ("grouped", "channels last", "ours"), []
    for row in found["rows"]:
        took = row["microseconds"]
        over = min(took["grouped"], took["channels last"]) / took["ours"]
        lines.append(
            f"| {row['layer']}, {row['precision']} | {' | '.join(f'{took[w]:.0f}' for w in ways)} | {over:.2f}× "
            f"| {row['agrees']['ours']:.0e} |"
        )
    return [
        "## A cohort's convolutions",
        "",
        f"`python -m benchmarks.convolutions`, {where(found)}. Microseconds, forward and backward: torch's grouped",
        "convolution, the same with channels last in memory, our kernels; then the better of torch's over ours. Every",
        "way's results agree with float64, within 0.002 in tf32 and 0.016 in bfloat16.",
        "",
        f"| | {' | '.join(ways)} | torch ÷ ours | ours agrees to |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def methods(found: dict[str, Any]) -> list[str]:
    epoch, lines = next(r["ms"] for r in found["rows"] if r["method"] == "FedAvg"), []
    for r in found["rows"]:
        apart = f"{r['passes_ms']:.1f} | {r['passes_ms'] / epoch:.2f}×" if r["passes_ms"] else " | "
        lines.append(f"| {r['method']} | {r['ms']:.1f} | {r['ms'] / epoch:.2f}× | {apart} | {r['agrees']:.0e} |")
    return [
        "## Methods, on VGG-9",
        "",
        f"`python -m benchmarks.methods`, {where(found)}, compiled: {found['compile']}. A round is one",
        "local epoch; passes over the data without training are counted apart, beside it. Agreement is with the plain",
        "engine after two rounds.",
        "",
        "| | ms per round | ÷ FedAvg | passes, ms | ÷ an epoch | agrees to |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def accuracy(found: dict[str, Any]) -> list[str]:
    rows, percent = found["rows"], [100 * row["accuracy"] for row in found["rows"]]
    pixels = "from 0 to 1" if found["raw"] else "normalised by channel"
    lines = [
        f"| {r['seed']} | {p:.1f} | {r['seconds']:.1f} | {r['ms_per_round']:.2f} |"
        for r, p in zip(rows, percent, strict=True)
    ]
    return [
        "## pfl-research's CIFAR-10 benchmark: accuracy",
        "",
        f"`python -m benchmarks.pfl_accuracy`, {where(found)}, {found['precision']}. CIFAR-10, 1,000 users,",
        f"{found['rounds']:,} rounds, uniform weights, lr 0.1, dropout, pixels {pixels}: test accuracy after the",
        f"last round, from {min(percent):.1f} to {max(percent):.1f}. Seconds are everything after the arrays are in",
        "memory: partition, compilation (cached, but for the first seed's), rounds, evaluation.",
        "",
        "| seed | test accuracy, % | seconds | ms per round |",
        "|---|---|---|---|",
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
        agree = f"{max(row['agrees'].values()):.0e}" if "agrees" in row else "not checked"
        lines.append(f"| {row['case']} | {cells} | {over} | {row['lanes']} | {agree} |")
    return [
        "## On a CPU",
        "",
        f"`python -m benchmarks.cpu`, {found['threads']} threads, torch {found['torch']}. Samples per second: a loop,",
        "what the rule chooses, and its choices by hand (all lanes: vmap over the cohort). Ratios are medians of",
        "neighbouring runs' ratios.",
        "",
        f"| | {' | '.join(sides)} | auto ÷ loop | ÷ the better of loop and all lanes | lanes | agree to |",
        "|---" * 10 + "|",
        *lines,
    ]


def federation(found: dict[str, Any]) -> list[str]:
    sides = {(row["dropout"], row["side"]): row for row in found["rows"]}
    lines = []
    for (dropout, side), row in sides.items():
        stock = sides[dropout, "stock"]
        times = f"{row['inside'] / stock['inside']:.3f}×" if side != "stock" else ""
        rest = f"{(row['inside'] - found['nodes'] * row['draws']) / stock['inside']:.3f}×" if times else ""
        spread = f"{row['rounds'][0]:.1f} – {row['rounds'][-1]:.1f}"
        cells = (f"{row['client']:.2f}", f"{row['server']:.3f}", times, rest, f"{row['round']:.1f}", spread)
        lines.append(f"| {side}{', dropout' if dropout else ''} | {' | '.join(cells)} |")
    return [
        "## Flower's apps",
        "",
        f"`python -m benchmarks.federation`, {found['nodes']} nodes of {found['samples']:,} samples, "
        f"{where(found)}. Medians of {found['repeats']} runs, by turns.",
        "Inside the apps, in seconds of the processor: a client app per message, the server app per round, and",
        "those of all nodes and the server over stock Flower FedAvg's; then the same without the seconds that keyed",
        "draws take. Whole rounds on the same real nodes, in seconds, have transport, processes and imports too; the",
        "machine was shared, so only their order of magnitude counts.",
        "",
        "| | client app | server app | ÷ stock | without keyed draws | whole round | fastest – slowest |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ]


def main() -> None:
    sections = {
        "pfl": others,
        "pfl_accuracy": accuracy,
        "flower": others,
        "cohort": cohort,
        "convolutions": convolutions,
        "methods": methods,
        "busy": busy,
        "cpu": cpu,
        "pfl_cpu": others,
        "flower_cpu": others,
        "fedjax_cpu": others,
        "federation": federation,
    }
    files = {name: found for name in sections if (found := read(name))}
    lines = [
        "# Benchmarks",
        "",
        "Made by `python -m benchmarks.report` from `benchmarks/results/*.json`. Before a side's time counts, its",
        "weights must be finite and its update Δ must agree with the update Δ′ of a reference in the same process:",
        'undrift\'s plain engine in float32, unless said otherwise. "Agrees to" is ‖Δ − Δ′‖/‖Δ′‖; the bounds are',
        f"{bounds()} (`benchmarks/agree.py`), and a side that fails has no row.",
        "Other systems are compared over one round, from the same weights, on the same batches, without dropout.",
        "",
    ]
    if commit := version(files):
        lines += [f"All figures from a GPU are of commit {commit}.", ""]
    for name, found in files.items():
        lines += [*sections[name](found), ""]
    (HERE / "RESULTS.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
