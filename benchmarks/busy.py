"""How busy lanes are: a cohort of 100 clients by Dirichlet(0.1), batches of 64, one local epoch.

    python -m benchmarks.busy [--json FILE]

Needs no GPU: which lane takes which client is planned beforehand. The clients share out CIFAR-10's 50,000 labels, 5,000
of each class. Busy is the share of all lanes' steps in which a lane has a client.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import numpy as np

import undrift as ud
from undrift.engine.packing import busy, pack
from undrift.method.local import steps_per_epoch
from undrift.random import host_generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    labels = np.repeat(np.arange(10), 5000)
    found: dict[str, list[float]] = {str(lanes): [] for lanes in (8, 16, 32, 50)} | {"the rule's": []}
    picked = []
    for seed in range(10):
        owner = ud.Dirichlet(0.1)(labels, 100, host_generator(seed, "partition"), None)
        sizes = np.bincount(owner, minlength=100)
        steps = steps_per_epoch(sizes[sizes > 0], 64)
        rule = math.ceil(len(steps) * steps.mean() / steps.max())  # what engine/choose.py takes where memory allows
        picked.append(rule)
        for name in found:
            found[name].append(busy(steps, pack(steps, rule if name == "the rule's" else int(name))))
    print("lanes busy, median of 10 partitions (lowest, highest)")
    for name, shares in found.items():
        lanes = f"{min(picked)} to {max(picked)} lanes, the rule's" if name == "the rule's" else f"{name} lanes"
        print(f"{lanes:28}{statistics.median(shares):8.1%}  ({min(shares):.1%}, {max(shares):.1%})")
    if arguments.json:
        rows = {
            name: {"median": statistics.median(s), "lowest": min(s), "highest": max(s)} for name, s in found.items()
        }
        arguments.json.write_text(json.dumps({"benchmark": "busy", "rule": picked, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
