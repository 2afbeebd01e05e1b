"""Which tests run which lines, and how long they take."""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.soak.mutation import trial
from tests.soak.mutation.places import FILES

SLOW = {
    "benchmarks", "cli", "docs", "examples", "gpu", "gpu_checks", "package", "readme", "report", "shared_data",
    "sources", "track",
}  # fmt: skip
"""Test files that are left out: they start processes, servers or browsers, or need a GPU."""


class Contexts:
    """A pytest plugin: coverage notes which test is running."""

    def __init__(self, measuring: coverage.Coverage) -> None:
        self.measuring = measuring

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.measuring.switch_context(item.nodeid)
        done = yield
        self.measuring.switch_context("")
        return done


class Cover:
    """The tests of a checkout, and the lines of the package that each of them runs."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.package = root / "src" / "undrift"
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, set[str]]] = {}
        cache.mkdir(parents=True, exist_ok=True)
        common = _digest([*self.package.rglob("*.py"), *(set((root / "tests").glob("*.py")) - set(_tests(root)))])
        for test in _tests(root):
            kept = cache / f"{test.stem}-{common[:16]}-{_digest([test])[:16]}.json"
            if not kept.exists():
                kept.write_text(json.dumps(_measure(root, f"tests/{test.name}", self.package)))
            found = json.loads(kept.read_text())
            self.seconds |= found["seconds"]
            for file, lines in found["lines"].items():
                own = self.lines.setdefault(file, {})
                for line, names in lines.items():
                    own.setdefault(int(line), set()).update(names)
        self.breadth = Counter(name for lines in self.lines.values() for names in lines.values() for name in names)

    def tests(self, file: str, line: int) -> list[str]:
        """The tests that run this line, or where it runs at import: the functions of its class, else of its file.

        Quick and specific ones first, and one case of each function before the second of any.
        """
        tree = ast.parse((self.package / file).read_text(encoding="utf-8"))
        own = self.lines.get(file, {})
        for lines in _around(tree, line):
            if found := {name for at in lines for name in own.get(at, ()) if name in self.seconds}:
                return _mixed(sorted(found, key=lambda name: (self.seconds[name] * self.breadth[name], name)))
        return []


def _mixed(tests: list[str]) -> list[str]:
    seen: Counter[str] = Counter()
    turns = []
    for name in tests:
        seen[name.partition("[")[0]] += 1
        turns.append(seen[name.partition("[")[0]])
    return [name for _, name in sorted(zip(turns, tests, strict=True), key=lambda pair: pair[0])]


def _around(tree: ast.Module, line: int) -> Iterator[set[int]]:
    """Lines whose tests might notice a change of this one: its statement's if that is in a function and tests run it.

    What runs at import, by whichever test imports first, has its effect in the functions of its class or its file.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if any(line in _body(function) for function in functions):
        holding = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
        inner = max(holding, key=lambda n: (n.lineno, -(n.end_lineno or 0)))
        below = [child.lineno for child in getattr(inner, "body", [])]
        yield set(range(inner.lineno, min([(inner.end_lineno or 0) + 1, *below])))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if begin <= line <= (node.end_lineno or 0):
                yield {at for f in ast.walk(node) if isinstance(f, ast.FunctionDef) for at in _body(f)}
    yield {at for function in functions for at in _body(function)}


def _body(function: ast.FunctionDef) -> range:
    return range(function.body[0].lineno, (function.end_lineno or 0) + 1)


def _tests(root: Path) -> list[Path]:
    return sorted(p for p in (root / "tests").glob("test_*.py") if p.stem.removeprefix("test_") not in SLOW)


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in sorted(files))).hexdigest()


def _measure(root: Path, test: str, package: Path) -> dict[str, Any]:
    """The tests of a file that pass, with their seconds, and by line of the source which of them run it."""
    plain = trial.run(root, [test])
    if "signal" in plain:
        raise RuntimeError(f"{test} does not pass as it is: {plain['signal']}")
    wanted = sorted(path for pattern in FILES for path in package.glob(pattern))

    def measured(main: Callable[..., int]) -> dict[str, Any]:
        measuring = coverage.Coverage(data_file=None, include=[str(path) for path in wanted], config_file=False)
        measuring.start()
        code = main(Contexts(measuring))
        measuring.stop()
        data = measuring.get_data()
        files = {path.relative_to(package).as_posix(): data.contexts_by_lineno(str(path)) for path in wanted}
        return {"code": code, "lines": files}

    found = trial.run(root, [test], extra=measured)
    if "signal" in found:
        raise RuntimeError(f"{test} does not pass under coverage: {found['signal']}")
    bad = {*plain["failed"], *plain["skipped"], *found["failed"]}
    seconds = {name: s for name, s in plain["seconds"].items() if name not in bad}
    lines = {
        file: {line: names for line, all_ in by.items() if (names := [name for name in all_ if name in seconds])}
        for file, by in found["lines"].items()
    }
    skipped = f", {len(plain['skipped'])} skipped" if plain["skipped"] else ""
    failed = f", left out: {sorted({*plain['failed'], *found['failed']})}" if plain["failed"] or found["failed"] else ""
    print(f"{test}: {len(seconds)} tests, {sum(seconds.values()):.0f} s{skipped}{failed}", flush=True)
    return {"seconds": seconds, "lines": lines}
