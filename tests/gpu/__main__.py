"""What must hold on a GPU, one line per check.

    python -m tests.gpu                       the groups of `make gpu`
    python -m tests.gpu --only b --only c     some of them
    python -m tests.gpu --full                what `make gpu-full` runs: everything that `make gpu` leaves out
    python -m tests.gpu --device cpu          the same comparisons without a GPU, to see that the checks are right
    python -m tests.gpu --list                the checks' names

The exit status is 0 only if every check ran and passed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.gpu import worker
from tests.gpu.runner import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a group, a to t; may be given more than once")
    parser.add_argument("--name", default="", help="only checks whose name contains this")
    parser.add_argument("--full", action="store_true", help="the longer half")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for all checks together")
    parser.add_argument("--log", type=Path, help="a file for all lines, with the tracebacks of failures")
    parser.add_argument("--checks", default="tests.gpu.catalogue:collect", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker.serve(asked.checks, asked.device)
        return 0
    if asked.device.startswith("cuda") and not (asked.list or torch.cuda.is_available()):
        print("torch sees no GPU here. `python -m tests.gpu --device cpu` makes the same comparisons on a CPU.")
        return 1
    checks = [check for check in worker.load(asked.checks) if check.full == asked.full and asked.name in check.name]
    if asked.only:
        checks = [check for check in checks if check.group in asked.only]
    if not checks:
        print("There is no such check; `python -m tests.gpu --list` names them all.")
        return 1
    if asked.list:
        print("\n".join(check.key for check in checks))
        return 0
    return 0 if run(checks, asked.checks, asked.device, asked.workers, asked.limit, asked.log) else 1


if __name__ == "__main__":
    sys.exit(main())
