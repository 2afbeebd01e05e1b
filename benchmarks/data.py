"""How long a data set takes to start, and how much memory: the first time, decoding it, and the second.

    UNDRIFT_DATA=folder python -m benchmarks.data cifar10

Each start is a process of its own. The import of torch is timed apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

START = """
import json, resource, sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
import undrift as ud
ud.load(sys.argv[1], ud.Dirichlet(0.1), 20)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"torch": imported - began, "load": done - imported, "peak": peak}))
"""


def start(name: str, cache: str) -> dict[str, float]:
    env = {**os.environ, "UNDRIFT_CACHE": cache}
    done = subprocess.run([sys.executable, "-c", START, name], env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    print(f"{'data set':<20} {'first start':>12} {'second':>8} {'peak memory':>12}    (import of torch apart)")
    for name in sys.argv[1:] or ["cifar10"]:
        with tempfile.TemporaryDirectory() as cache:
            first, second = start(name, cache), start(name, cache)
        print(f"{name:<20} {first['load']:10.1f} s {second['load']:6.2f} s {first['peak']:8.0f} MiB")


if __name__ == "__main__":
    main()
