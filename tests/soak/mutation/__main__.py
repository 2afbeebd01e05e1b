"""python -m tests.soak.mutation: a random sample of mutants, and which of them the tests notice.

Every trial is a line in `runs/mutants/results.jsonl`; started again, it goes on where it stopped. With `--again` it
tries the survivors again, after tests were added, and shows the score before and after.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import json
import os
import py_compile
import shutil
import time
from pathlib import Path
from typing import Any

from tests.soak.mutation import trial
from tests.soak.mutation.cover import Cover
from tests.soak.mutation.places import Mutant, sample

ROOT = Path(__file__).parent.parent.parent.parent
PACKAGE = Path("src", "undrift")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many mutants (200)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (0)")
    parser.add_argument("--workers", type=int, default=1, help="how many mutants at a time (1)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long the tests of a mutant may take by themselves (60)"
    )
    parser.add_argument("--again", action="store_true", help="try the survivors again")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants", help="folder for results")
    asked = parser.parse_args()
    out = asked.out.resolve()
    results = out / "results.jsonl"
    cover = Cover(checkout(out / "0"), out / "cover")
    mutants = sample(ROOT / PACKAGE, asked.count, asked.seed)
    tried = read(results)
    todo = [m for m in mutants if m.name not in tried or (asked.again and tried[m.name][-1]["status"] == "survived")]
    print(f"{len(mutants)} mutants, {len(todo)} to try, {len(cover.seconds)} tests", flush=True)
    children = []
    for share in range(1, asked.workers):
        if not (child := os.fork()):
            try:
                work(todo[share :: asked.workers], checkout(out / str(share)), cover, asked.seconds, results)
            finally:
                os._exit(0)
        children.append(child)
    work(todo[:: asked.workers], out / "0" / "checkout", cover, asked.seconds, results)
    for child in children:
        os.waitpid(child, 0)
    print(report(mutants, read(results)))


def checkout(folder: Path) -> Path:
    """A copy of the working tree, to be mutated in place of it."""
    root = folder / "checkout"
    skip = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "carry", "dist")
    shutil.copytree(ROOT, root, ignore=skip, dirs_exist_ok=True)
    # By their hash, not their time: a mutant may follow another within a second, and be of the same size.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(root / "src", quiet=1, invalidation_mode=mode)
    return root


def work(mutants: list[Mutant], root: Path, cover: Cover, seconds: float, results: Path) -> None:
    for mutant in mutants:
        begin = time.monotonic()
        row = attempt(mutant, root, cover, seconds) | {"took": round(time.monotonic() - begin, 1)}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{row['status']:8} {row['took']:5.0f} s  {mutant.name}  {row['by']}", flush=True)


def attempt(mutant: Mutant, root: Path, cover: Cover, seconds: float) -> dict[str, Any]:
    """Put the mutant in place, and run the tests that might notice it until one does."""
    original = (ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8")
    mutated = mutant.source(ROOT / PACKAGE)
    changed = [line for line in difflib.ndiff(original.splitlines(), mutated.splitlines()) if line[0] in "-+"]
    row = {"mutant": mutant.name, "diff": changed, "status": "survived", "by": "", "tests": 0}
    tests = within(cover, cover.tests(mutant.file, mutant.line), seconds)
    place = root / PACKAGE / mutant.file
    place.write_text(mutated, encoding="utf-8")
    try:
        if tests:
            found = trial.run(root, sorted({name.partition("::")[0] for name in tests}), tests)
            row["tests"] = len(found.get("seconds", ()))
            if by := found.get("signal") or (found["code"] and (found["failed"] or ["collecting tests"])[0]):
                return row | {"status": "killed", "by": by}
    finally:
        place.write_text(original, encoding="utf-8")
    return row


def within(cover: Cover, names: list[str], seconds: float) -> dict[str, float]:
    """As many of the tests as take no longer than that together, and the first in any case."""
    chosen: dict[str, float] = {}
    for name in names:
        if not chosen or sum(chosen.values()) + cover.seconds[name] <= seconds:
            chosen[name] = cover.seconds[name]
    return chosen


def read(results: Path) -> dict[str, list[dict[str, Any]]]:
    """By mutant, the trials it has had."""
    tried: dict[str, list[dict[str, Any]]] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        row = json.loads(line)
        tried.setdefault(row["mutant"], []).append(row)
    return tried


def report(mutants: list[Mutant], tried: dict[str, list[dict[str, Any]]]) -> str:
    trials = [tried[m.name] for m in mutants if m.name in tried]
    lines = []
    for rows in trials:
        if rows[-1]["status"] == "survived":
            lines += ["", f"{rows[-1]['mutant']}, {rows[-1]['tests']} tests", *rows[-1]["diff"]]
    for when, which in (("at the first trial", 0), ("at the last", -1)):
        killed = sum(rows[which]["status"] == "killed" for rows in trials)
        lines += ["", f"killed {when}: {killed} of {len(trials)}, {killed / max(1, len(trials)):.1%}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
