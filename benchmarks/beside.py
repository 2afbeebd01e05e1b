"""Another system beside undrift on the problem of `cifar10.py`: by turns in one run, as a table and as a file."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cifar10 import DEVICE, ours

Sides = dict[str, Callable[[], float]]


def options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20 if DEVICE == "cuda" else 5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser


def need(install: str, *modules: str) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SystemExit(f"There is no {module} to compare with ({error}): {install}.") from error


def undrift(rounds: int) -> Sides:
    if DEVICE == "cpu":
        return {"undrift": lambda: ours(rounds, "auto")}
    return {
        "undrift, tf32": lambda: ours(60, "tf32", False),
        "undrift, tf32, compiled": lambda: ours(60, "tf32", True),
        "undrift, bf16": lambda: ours(60, "bfloat16", False),
        "undrift, bf16, compiled": lambda: ours(60, "bfloat16", True),
    }


def fastest(rows: list[dict]) -> dict:
    """What undrift is compared with: the fastest of the other system's sides."""
    return min((row for row in rows if not row["side"].startswith("undrift")), key=lambda row: row["ms"])


def compare(name: str, theirs: Sides, chosen: argparse.Namespace, **versions: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(chosen.threads)
    sides = theirs | undrift(chosen.rounds)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(chosen.repeats):  # by turns, so that a slow minute slows both
        for side, run in sides.items():
            times[side].append(1e3 * run())
    rows = [{"side": side, "ms": statistics.median(all), "all": all} for side, all in times.items()]
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{chosen.threads} threads of a CPU"
    base = fastest(rows)
    print(", ".join([where, f"torch {torch.__version__}", *(f"{k} {v}" for k, v in versions.items())]))
    width = max(map(len, sides)) + 2
    print(f"{'':{width}}{'ms a round':>12}{'÷ ' + name:>14}{'spread':>20}")
    for row in rows:
        spread = f"{min(row['all']):.2f} – {max(row['all']):.2f}"
        print(f"{row['side']:{width}}{row['ms']:12.2f}{base['ms'] / row['ms']:13.2f}×{spread:>20}")
    if chosen.json:
        head = {"benchmark": name, "gpu": where, "torch": torch.__version__, **({"with": versions} if versions else {})}
        chosen.json.write_text(json.dumps({**head, "rows": rows}, indent=1))
