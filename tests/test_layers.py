"""The package's layers: a module imports from its own and those below it, also lazily, and never in a circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import undrift

ROOT = Path(undrift.__file__).parent
LAYERS = {
    "foundation": ["errors", "tree", "random", "schedule", "losses", "expressions", "files"],
    "data": ["data"],
    "models": ["models"],
    "functional": ["functional"],
    "method": ["method"],
    "methods": ["methods"],
    "engine": ["engine"],
    "training": ["training"],
    "tools": ["tools", "reproduce", "__main__"],
}
"""From the bottom up, each with its modules and packages."""
ORDER = list(LAYERS)


def modules() -> dict[str, Path]:
    """By dotted name below the package; "" is the package itself, which only names what others hold."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(source: str, known: set[str], for_types: bool = True) -> set[str]:
    """The package's modules that a module imports, wherever in it; `for_types`: also under `if TYPE_CHECKING`."""
    tree, found = ast.parse(source), set()
    unused = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = set() if for_types else {inner for node in unused for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "undrift":
            base = (node.module or "").removeprefix("undrift").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in known else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("undrift.") for a in node.names if a.name.startswith("undrift.")}
    return found - {""}


MODULES = modules()


def graph(for_types: bool) -> dict[str, set[str]]:
    """What each module imports of the package."""
    return {
        name: imports(file.read_text(encoding="utf-8"), set(MODULES), for_types) - {name}
        for name, file in MODULES.items()
    }


GRAPH = graph(for_types=True)


def layer(module: str) -> str:
    top = module.partition(".")[0]
    return next(name for name, tops in LAYERS.items() if top in tops)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_imports_point_down(module):
    up = [other for other in GRAPH[module] if ORDER.index(layer(other)) > ORDER.index(layer(module))]
    assert not up, f"{module} is of the layer {layer(module)} and must not import {', '.join(up)}"


def test_no_import_goes_in_a_circle():
    at_run_time, done = graph(for_types=False), set()

    def follow(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle of imports: {' → '.join((*above[above.index(module) :], module))}"
        if module not in done:
            for other in at_run_time[module]:
                follow(other, (*above, module))
            done.add(module)

    for module in sorted(set(MODULES) - {""}):
        follow(module, ())


def test_every_module_has_a_layer_and_the_test_sees_lazy_imports():
    assert {name.partition(".")[0] for name in MODULES} - {""} == {top for tops in LAYERS.values() for top in tops}
    lazy = "def f():\n    from undrift.tools import cli\n    import undrift.training.loop\n"
    assert imports(lazy, set(MODULES)) == {"tools.cli", "training.loop"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_files_and_functions_stay_small(module):
    text = MODULES[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not module.endswith(".kernels"):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            assert (node.end_lineno or 0) - body[0].lineno < 60, f"{node.name} is long; split it"
