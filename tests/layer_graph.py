"""The package's layers and the imports between them; `python -m tests.layer_graph` draws `docs/images/layers.svg`."""

from __future__ import annotations

import ast
from pathlib import Path

import undrift

ROOT = Path(undrift.__file__).parent
PICTURE = Path(__file__).parent.parent / "docs/images/layers.svg"
LAYERS = {
    "foundation": [
        "errors",
        "tree",
        "vmap",
        "triton",
        "random",
        "schedule",
        "loss_modules",
        "columns",
        "registry",
        "losses",
        "metrics",
        "expressions",
        "files",
        "cpus",
    ],
    "data": ["data"],
    "models": ["models"],
    "functional": ["functional"],
    "method": ["method"],
    "methods": ["methods"],
    "engine": ["engine"],
    "training": ["training"],
    "tools": ["tools", "flower", "__main__"],
}
"""From the bottom up, each with its modules and packages."""
ORDER = list(LAYERS)
ABOUT = {
    "foundation": "errors · trees · keyed draws · schedules · losses · files",
    "data": "data sets, partitions, clients",
    "models": "models by name",
    "functional": "a module as a function; convolutions and recurrences in lanes, with their kernels",
    "method": "hooks, composition, what hooks are given, local work, faults",
    "methods": "one file per family of methods",
    "engine": "a cohort's local training: plain, lanes, threads",
    "training": "a run: settings, state, rounds, evaluation, checkpoints, folder, trackers",
    "tools": "command line, experiment files, sweeps, comparison, report · flower/",
}


def modules() -> dict[str, Path]:
    """By dotted name below the package; "" is the package itself, which only names what others hold."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(source: str, known: set[str], for_types: bool = True) -> set[str]:
    """The package's modules that a module imports, wherever in it; `for_types`: also under `if TYPE_CHECKING`."""
    tree, found = ast.parse(source), set()
    relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative, "write imports of the package in full: from undrift.…"
    type_checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = set() if for_types else {inner for node in type_checking for inner in ast.walk(node)}
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


def graph(for_types: bool) -> dict[str, set[str]]:
    """What each module imports of the package."""
    return {
        name: imports(file.read_text(encoding="utf-8"), set(MODULES), for_types) - {name}
        for name, file in MODULES.items()
    }


def layer(module: str) -> str:
    top = module.partition(".")[0]
    return next(name for name, tops in LAYERS.items() if top in tops)


def layer_edges() -> set[tuple[str, str]]:
    """Which layer imports from which, without what follows from other edges: of a → b → c, a → c is left out."""
    found = {
        (layer(module), layer(other))
        for module, others in graph(for_types=True).items()
        for other in others
        if module and layer(module) != layer(other)
    }
    reach = set(found)
    for middle in ORDER:
        reach |= {(a, c) for a, b in reach if b == middle for b2, c in reach if b2 == middle}
    return {(a, c) for a, c in found if not any((a, b) in reach and (b, c) in reach for b in ORDER)}


def drawn() -> str:
    """The layers as boxes, the highest on top; an arrow points from a layer to one that it imports from."""
    width, height, gap, left = 600, 44, 26, 90
    top = {name: 12 + i * (height + gap) for i, name in enumerate(reversed(ORDER))}
    lines, sides = [], {"left": 0, "right": 0}
    for above, below in sorted(layer_edges(), key=lambda edge: [-ORDER.index(name) for name in edge]):
        if ORDER.index(above) - ORDER.index(below) == 1:
            lines.append(f'<path d="M{left + width / 2} {top[above] + height}V{top[below] - 3}"/>')
            continue
        side = min(sides, key=sides.__getitem__)  # around the box on the emptier side
        sides[side] += 1
        out, edge = (-1, left) if side == "left" else (1, left + width)
        x = edge + out * (10 + 16 * sides[side])
        ends = top[above] + height / 2 + 5, top[below] + height / 2 - 5
        lines.append(f'<path d="M{edge} {ends[0]}H{x}V{ends[1]}H{edge + out * 3}"/>')
    boxes = [
        f'<rect x="{left}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        f'<text x="{left + 14}" y="{y + 19}" class="name">{name if name == "foundation" else name + "/"}</text>'
        f'<text x="{left + 14}" y="{y + 35}">{ABOUT[name]}</text>'
        for name, y in top.items()
    ]
    wide, high = 2 * left + width, 24 + len(top) * (height + gap) - gap
    tip = '<path d="M0 0L8 4L0 8z" style="fill:#5a6da3;stroke:none"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif">',
            "<title>Layers of undrift: each imports only from those below it</title>",
            "<style>rect{fill:#f4f6fb;stroke:#3b4f81}text{font-size:12.5px;fill:#333}",
            ".name{font-weight:700;font-size:14px;fill:#1d2c55}",
            "path{fill:none;stroke:#5a6da3;stroke-width:1.6;marker-end:url(#tip)}marker path{marker-end:none}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="8" markerHeight="8"',
            f'markerUnits="userSpaceOnUse" orient="auto">{tip}</marker></defs>',
            f'<rect width="{wide}" height="{high}" style="fill:#fff;stroke:none"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
