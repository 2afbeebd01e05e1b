"""SCALE.md from what the benchmarks of scale wrote:  python -m benchmarks.scale.report"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
SECTIONS = {
    "population": (
        "Populations",
        "A round of 100 clients of two small samples each, out of so many; memory beyond the index and the samples.",
        "python -m benchmarks.scale.population",
        {"clients": "clients", "build_s": "built in, s", "ms": "ms per round", "beyond_mb": "MB beyond"},
    ),
    "states": (
        "What clients keep",
        "Scaffold, 1 M parameters, 50 clients per round, 60 rounds; `broken` was killed twice, and has the same bits.",
        "python -m benchmarks.scale.states",
        {"run": "run", "clients": "clients", "anonymous_mb": "anonymous memory, MB", "kept_gb": "on disk, GB"},
    ),
    "cohort_scale": (
        "A cohort of 10,000",
        "pfl-research's network, 50 samples per client, in batches of 10.",
        "python -m benchmarks.scale.cohort --precision tf32",
        {"cohort": "clients", "lanes": "lanes", "s": "s", "samples_per_s": "samples/s", "gpu_gb": "GB on the GPU"},
    ),
    "ranks": (
        "Processes",
        "One run in several processes of one thread each; `alone` is without torchrun.",
        "python -m benchmarks.scale.ranks",
        {"processes": "processes", "ms": "ms per round", "times": "times as fast", "agrees": "agrees to"},
    ),
    "stacked": (
        "Runs side by side, on a GPU",
        "Seeds in one program, against one after another; the time is of a round of all runs.",
        "python -m benchmarks.scale.stacked paper5",
        {
            "problem": "problem",
            "compile": "compiled",
            "processes": "processes",
            "runs": "runs",
            "alone, s per round": "alone, s per round of one",
            "together, s per round of all": "together, s",
            "times as fast": "times as fast",
            "lowest": "lowest",
            "highest": "highest",
            "accuracies apart, points": "accuracies apart, points",
            "commit": "commit",
        },
    ),
    "hostdata": (
        "Data that stay on the host",
        "VGG-9 on pictures of CIFAR-10's shape; a folder of pictures that is read as it is needed.",
        "python -m benchmarks.scale.hostdata speed",
        {
            "what": "what",
            "device, samples/s": "device, samples/s",
            "host, samples/s": "host, samples/s",
            "host / device": "host / device",
            "folder, MB": "folder, MB",
            "grown at most, MB": "memory grown by, MB",
        },
    ),
}
SECTIONS["ranks_gpu"] = (
    "Processes, on a GPU",
    "pfl-research's network, 50 clients per round; `1` is one process that torchrun started, which uses NCCL.",
    *SECTIONS["ranks"][2:],
)
SECTIONS["stacked_cpu"] = (
    "Runs side by side, on a CPU",
    *SECTIONS["stacked"][1:2],
    "python -m benchmarks.scale.stacked digits",
    SECTIONS["stacked"][3],
)


def cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def section(name: str) -> list[str]:
    file = HERE / "results" / f"{name}.json"
    title, about, command, columns = SECTIONS[name]
    if not file.exists():
        return [f"## {title}", "", f"Not measured yet: `{command}`.", ""]
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = [{"commit": found.get("commit")} | row for row in found["rows"]]  # a row may be older than its file
    head = [f"## {title}", "", f"{about} `{command}`, {found['gpu']}, torch {found['torch']}.", ""]
    table = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    table += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
    return [*head, *table, ""]


def page() -> str:
    lines = ["# Scale", "", "Made by `python -m benchmarks.scale.report` from `benchmarks/results/`.", ""]
    return "\n".join([*lines, *(line for name in SECTIONS for line in section(name))])


if __name__ == "__main__":
    (HERE / "SCALE.md").write_text(page(), encoding="utf-8")
