"""Train models that undrift's authors did not write, with every engine, and hold them against plain PyTorch.

    python -m tests.compat                          all cases, into results.json here and the table in the documentation
    python -m tests.compat --only resnet --only S1  those with such a name, or for such a fault of the review
    python -m tests.compat --quick                  the subset that needs nothing but torch
    python -m tests.compat --list                   the cases' names
    python -m tests.compat --table                  write the table anew from tests/compat/results.json

The exit status is 0 only if every case came out as it must.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.compat import pool, results
from tests.compat.case import Case
from tests.compat.trial import Finding

CASES = "tests.compat.cases:collect"


def load(source: str) -> list[Case]:
    """The cases that `module:function` returns."""
    module, function = source.split(":")
    return getattr(importlib.import_module(module), function)()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="part of a name, a group, or a fault such as S3")
    parser.add_argument("--quick", action="store_true", help="the cases that run with the project's tests")
    parser.add_argument("--list", action="store_true", help="print the cases' names and run nothing")
    parser.add_argument("--table", action="store_true", help="write the table from the stored results")
    parser.add_argument("--update", action="store_true", help="put the results of some cases among the stored ones")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes")
    parser.add_argument("--log", type=Path, help="a file for tracebacks")
    parser.add_argument("--worker", metavar="CASES", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        pool.serve({case.name: case for case in load(asked.worker)})
        return 0
    if asked.table:
        results.write_table(results.PAGE, json.loads(results.FILE.read_text(encoding="utf-8")))
        return 0
    everything = load(CASES)
    cases = [case for case in everything if wanted(case, asked.only) and (case.quick or not asked.quick)]
    if asked.list:
        print("\n".join(f"{case.group:<10} {case.name}" for case in cases))
        return 0
    missing = sorted({name for case in cases for name in case.missing})
    if missing:
        print(f"Not installed: {', '.join(missing)}. `make compat` installs them; --quick needs none of them.")
        return 1
    return carry_out(everything, cases, asked)


def wanted(case: Case, only: list[str]) -> bool:
    return not only or any(part.lower() in case.name.lower() or part in (case.group, *case.review) for part in only)


def carry_out(everything: list[Case], cases: list[Case], asked: Any) -> int:
    began, entries, failed = time.perf_counter(), {}, 0

    def report(case: Case, found: Finding) -> None:
        nonlocal failed
        failed += bool(found.problems)
        entries[case.name] = results.entry(case, found)
        print(line(case, found), flush=True)
        if asked.log:
            with asked.log.open("a", encoding="utf-8") as file:
                file.write(f"{line(case, found)}\n{found.detail}\n")

    pool.run(cases, CASES, asked.jobs, report)
    seconds = time.perf_counter() - began
    counts = Counter(entry["outcome"] for entry in entries.values())
    print(f"\n{', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}; "
          f"{failed} not as they must be; {seconds / 60:.1f} min")  # fmt: skip
    if asked.update:
        stored = json.loads(results.FILE.read_text(encoding="utf-8"))["cases"]
        entries = {entry["name"]: entry for entry in stored} | entries
    if asked.update or len(cases) == len(everything):
        results.save(results.FILE, everything, entries)
        results.write_table(results.PAGE, json.loads(results.FILE.read_text(encoding="utf-8")))
    return 1 if failed else 0


def line(case: Case, found: Finding) -> str:
    figures = [f"{what} {value:.0e}" for what, value in (("lanes/plain", found.lanes_plain), ("hand", found.hand))
               if value is not None]  # fmt: skip
    says = "; ".join([*figures, *found.problems] or [found.why])
    return f"{'FAIL' if found.problems else 'ok':<5}{found.outcome:<10} {case.name}: {says} ({found.seconds} s)"


if __name__ == "__main__":
    sys.exit(main())
