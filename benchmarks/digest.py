"""What the digests of all data cost: loading with and without them, the first time (decoding) and from the cache.

    UNDRIFT_DATA=folder python -m benchmarks.digest cifar10 [--first 2] [--later 9]

With them, each array gets a SHA-256 and a checksum when it is decoded, every array's checksum is verified when the
cache is opened, and `data.digests` is asked for. Each start is a process of its own; the two kinds take turns, and
medians are compared. The import of torch, which every start pays as well, is timed apart. CPU seconds are less moved
than wall seconds by what else the machine does, but count all threads of the digest.
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
clocks = time.perf_counter, time.process_time
began = [clock() for clock in clocks]
import torch
imported = [clock() for clock in clocks]
import undrift as ud
if sys.argv[2] == "without":
    from undrift.data import digest
    digest.sha256 = digest.checksum = lambda data: "-"
ud.load(sys.argv[1], ud.Dirichlet(0.1), 20).digests
done = [clock() for clock in clocks]
wall, cpu = ([b - a, c - b] for a, b, c in zip(began, imported, done))
print(json.dumps({"torch": wall[0], "load": wall[1], "cpu": cpu[1]}))
"""


def start(name: str, kind: str, cache: str) -> dict[str, float]:
    env = {**os.environ, "UNDRIFT_CACHE": cache}
    done = subprocess.run([sys.executable, "-c", START, name, kind], env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def measure(name: str, first: int, later: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """The times of each kind of start, by whether it decodes."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {s: {"with": [], "without": []} for s in ("first", "later")}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(first):
            for kind, times in found["first"].items():
                times.append(start(name, kind, str(Path(folder, kind, str(i)))))
        for i in range(later):
            for kind, times in list(found["later"].items())[:: 1 if i % 2 else -1]:
                times.append(start(name, kind, str(Path(folder, kind, "0"))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["cifar10"])
    parser.add_argument("--first", type=int, default=2)
    parser.add_argument("--later", type=int, default=9)
    options = parser.parse_args()
    heads = [f"{'data set':<12} {'start':<6} {'clock':<5}", f"{'without':>9} {'with':>9} {'cost':>9}"]
    print(*heads, " of loading  of all with torch")
    for name in options.names:
        for which, kinds in measure(name, options.first, options.later).items():
            torch = statistics.median(row["torch"] for rows in kinds.values() for row in rows)
            for clock in ("load", "cpu"):
                without, given = (statistics.median(row[clock] for row in kinds[k]) for k in ("without", "with"))
                cost = given - without
                print(
                    f"{name:<12} {which:<6} {'wall' if clock == 'load' else 'cpu':<5} {without:7.3f} s {given:7.3f} s "
                    f"{1000 * cost:6.0f} ms  {cost / without:10.1%}  {cost / (without + torch):17.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
