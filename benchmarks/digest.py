"""What the digests of all data cost, and verifying the cache: the first time (decoding) and from the cache.

    UNDRIFT_DATA=folder python -m benchmarks.digest cifar10 [--first 3] [--later 15]

Decoding takes a SHA-256 and a checksum of each array; opening the cache verifies the checksums; `data.digests` hashes
who holds what. All of that happens in three functions, which are timed inside the load they are part of: comparing two
loads would show what else the machine does. Each start is a process of its own, with the import of torch timed apart,
and medians are printed. CPU seconds count all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

START = """
import json, sys, time
import numpy as np
clocks = lambda: np.array([time.perf_counter(), time.process_time()])
began = clocks()
import torch
imported = clocks()
import undrift as ud
from undrift.data import digest
spent = {"digests": np.zeros(2), "checks": np.zeros(2)}
def timed(function, what):
    def call(data):
        before = clocks()
        found = function(data)
        spent[what] += clocks() - before
        return found
    return call
digest.sha256, digest.checksum = timed(digest.sha256, "digests"), timed(digest.checksum, "checks")
data = ud.load(sys.argv[1], ud.Dirichlet(0.1), 20)
loaded = clocks()
data.digests
spent["digests"] += clocks() - loaded
whole = clocks() - imported
for i, clock in enumerate(("wall", "cpu")):
    found = {what: float(times[i]) for what, times in spent.items()}
    found |= {"load": float(whole[i]) - sum(found.values()), "torch": float((imported - began)[i])}
    print(json.dumps({"clock": clock, **found}))
"""


def start(name: str, cache: Path) -> list[dict[str, float]]:
    """One start's seconds, on each clock: the load without digests and checks, and those."""
    env = {**os.environ, "UNDRIFT_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", START, name], env=env, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["cifar10"])
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--later", type=int, default=15)
    options = parser.parse_args()
    print(f"{'data set':<12} {'start':<6} {'clock':<5} {'load':>9} {'digests':>18} {'checks':>18}   (import of torch)")
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            starts = {"first": [start(name, Path(folder, str(i))) for i in range(options.first)]}
            starts["later"] = [start(name, Path(folder, "0")) for _ in range(options.later)]
        for which, runs in starts.items():
            for rows in zip(*runs, strict=True):
                seconds = {k: statistics.median(row[k] for row in rows) for k in ("load", "digests", "checks", "torch")}
                load = seconds["load"]
                costs = [f"{1000 * t:.1f} ms ({t / load:.1%})" for t in (seconds["digests"], seconds["checks"])]
                label = f"{name:<12} {which:<6} {rows[0]['clock']:<5}"
                print(f"{label} {load:7.3f} s {costs[0]:>18} {costs[1]:>18}   ({seconds['torch']:.1f} s)")


if __name__ == "__main__":
    main()
