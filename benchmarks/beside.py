"""Another system beside undrift on the problem of `cifar10.py`: by turns in one run, as a table and as a file.

Before anything is timed the other system trains one round without dropout, from undrift's weights, on the users and
batches of undrift's first round, and must come out where undrift's plain engine does.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.agree import Weights, change, check
from benchmarks.cifar10 import DEVICE, ours, problem


@dataclass(frozen=True)
class Peer:
    """Another system's side. Both functions raise `SystemExit` if its weights do not end finite."""

    time: Callable[[], float]
    """Trains with dropout; returns the seconds per round."""
    first_round: Callable[[], Weights]
    """Trains undrift's first round without dropout; returns the weights, named as undrift's are."""
    precision: str = "float32"


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


def undrift(rounds: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """undrift's sides: seconds per round, and the distance from the plain engine."""
    if DEVICE == "cpu":
        return {"undrift": lambda: ours("undrift", rounds, "auto")}
    settings = {
        "undrift, tf32": ("tf32", False),
        "undrift, tf32, compiled": ("tf32", True),
        "undrift, bf16": ("bfloat16", False),
        "undrift, bf16, compiled": ("bfloat16", True),
    }
    return {side: lambda side=side, how=how: ours(side, 60, *how) for side, how in settings.items()}


def agreement(side: str, peer: Peer) -> float:
    """How far the other system is from undrift's plain engine after one round without dropout."""
    start = dict(problem(dropout=False).model.named_parameters())
    return check(side, change(peer.first_round(), start), problem(dropout=False).reference, peer.precision)


def fastest(rows: list[dict]) -> dict:
    """What undrift is compared with: the fastest of the other system's sides."""
    return min((row for row in rows if not row["side"].startswith("undrift")), key=lambda row: row["ms"])


def compare(name: str, peers: Mapping[str, Peer], chosen: argparse.Namespace, **versions: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(chosen.threads)
    agrees = {side: agreement(side, peer) for side, peer in peers.items()}
    mine = undrift(chosen.rounds)
    times: dict[str, list[float]] = {side: [] for side in (*peers, *mine)}
    for _ in range(chosen.repeats):  # by turns, so that a slow minute slows both
        for side, peer in peers.items():
            times[side].append(1e3 * peer.time())
        for side, run in mine.items():
            seconds, agrees[side] = run()
            times[side].append(1e3 * seconds)
    rows = [{"side": s, "ms": statistics.median(all), "all": all, "agrees": agrees[s]} for s, all in times.items()]
    base = fastest(rows)
    head = record.head(name, **({"with": versions} if versions else {}))
    print(", ".join([head["gpu"], f"torch {torch.__version__}", *(f"{k} {v}" for k, v in versions.items())]))
    width = max(map(len, times)) + 2
    print(f"{'':{width}}{'ms per round':>14}{'speed-up':>14}{'spread':>20}{'agrees to':>12}")
    table = record.Table(chosen.json, head, "side")
    for row in rows:
        spread = f"{min(row['all']):.2f} – {max(row['all']):.2f}"
        over = f"{base['ms'] / row['ms']:13.2f}×"
        print(f"{row['side']:{width}}{row['ms']:14.2f}{over}{spread:>20}{row['agrees']:12.1e}")
        table.add(row)
