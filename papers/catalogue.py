"""The papers' experiments, read from files: tables of cells, the figures taken from them, and the papers' claims.

A paper's file has settings for all its experiments under `experiment`, with the keys of experiment files, and any
number of tables. A table's cells are its columns × rows × seeds; the settings of table, column and row are merged, in
that order. `quick` has the changes for a scaled-down run on a CPU.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError, unknown

FOLDER = Path(__file__).parent / "experiments"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A number taken from a cell's curve, with the published one.

    `take`: "last" (mean of the last `rounds` evaluations), "at" (the value after `rounds` rounds), "best", "least",
    "reach" (the first round at `target` or above), or "peak" (the highest point of the curve averaged over seeds).
    """

    name: str
    column: str
    take: str
    rounds: int = 1
    target: float | None = None
    percent: bool = False
    lower: bool = False
    """Whether less is better."""
    digits: int = 1
    smooth: int = 1
    """Average over this many evaluations first."""
    published: dict[str, list[str]] = field(default_factory=dict)
    """By row, one entry per column: "72.66 (0.20)", value and standard deviation; "" if the paper has none."""
    calculated: dict[str, list[str]] = field(default_factory=dict)
    """Values that we calculated, where the paper prints none; in the form of `published`."""

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0


@dataclass(frozen=True)
class Cell:
    """One run: a setting, a method and a seed."""

    paper: str
    table: str
    column: str
    row: str
    variant: str
    settings: Settings
    """The contents of an experiment file, including the seed."""
    options: Settings
    """Options for the runner: `kind`, `samples`, `samples_of`, `keep`, `training_loss`."""
    minutes: float | None = None
    """The estimated time on one H200, used until a similar cell has been measured."""
    share: float = 1.0
    """The share of a GPU that it uses."""
    quick: bool = False

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def key(self) -> str:
        """Its name in commands, and its path in the folder of results."""
        names = [self.paper, self.table, self.variant, self.column, self.row]
        return "/".join(slug(name) for name in names if name) + f"/{self.seed}"

    @cached_property
    def digest(self) -> str:
        """A digest of all settings. Cells of different tables with the same settings share their result."""
        spec = json.dumps([self.settings, self.options, self.quick], sort_keys=True)
        return hashlib.sha256(spec.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper."""

    paper: str
    name: str
    title: str
    columns: list[str]
    rows: list[str]
    seeds: list[int]
    figures: list[Figure]
    cells: list[Cell]
    standins: dict[str, str]
    """By column, the data that replace the paper's."""
    note: str = ""
    drawing: dict[str, Any] | None = None
    """How to draw it, if it is a figure."""
    variants: list[str] = field(default_factory=list)
    """Choices for settings that the paper leaves open, in order of preference; see `calibration`."""
    calibration: dict[str, Any] | None = None
    """The `row`, `column` and `figure` by which a variant is chosen, and the value that it `reaches`."""

    def at(self, column: str, row: str, variant: str | None = None) -> list[Cell]:
        return [
            cell for cell in self.cells if (cell.column, cell.row) == (column, row) and variant in (None, cell.variant)
        ]


@dataclass(frozen=True)
class Paper:
    name: str
    number: int
    title: str
    tables: dict[str, Table]
    claims: list[dict[str, Any]]


def slug(text: str) -> str:
    """Return a simple file name: "CIFAR-10, Shards(2)" becomes cifar-10-shards-2."""
    return re.sub(r"[^a-z0-9.+=]+", "-", text.lower()).strip("-.")


def merge(*layers: Settings) -> Settings:
    """Merge nested settings; later ones take precedence, and an empty string removes a key."""
    merged: Settings = {}
    for layer in layers:
        for name, value in layer.items():
            if value == "":
                merged.pop(name, None)
            elif isinstance(value, dict):
                merged[name] = merge(merged.get(name, {}), value)
            else:
                merged[name] = copy.deepcopy(value)
    return merged


def filled(value: Any, values: dict[str, str]) -> Any:
    """Return the settings with each `<name>` in their strings replaced by its value from `with`."""
    if isinstance(value, dict):
        return {key: filled(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, values) for inner in value]
    return re.sub(r"<(\w+)>", lambda found: values[found[1]], value) if isinstance(value, str) else value


@cache
def papers(quick: bool = False) -> dict[str, Paper]:
    """Return all papers by name, in the order of their numbers."""
    found = [read(file, quick) for file in sorted(FOLDER.glob("*.toml")) if file.stem != "queue"]
    return {paper.name: paper for paper in sorted(found, key=lambda paper: paper.number)}


def read(file: Path, quick: bool = False) -> Paper:
    with file.open("rb") as opened:
        content = tomllib.load(opened)
    name = file.stem
    specs: dict[str, Settings] = content["tables"]
    tables = {key: _table(name, content, key, _whole(spec, specs), quick) for key, spec in specs.items()}
    return Paper(name, content["number"], content["title"], tables, content.get("claims", []))


def _whole(spec: Settings, specs: dict[str, Settings]) -> Settings:
    """A table's entries in the file. With `like`, its rows, columns, seeds and figures are those of another table."""
    other = specs[spec["like"]] if "like" in spec else {}
    return {key: other[key] for key in ("rows", "columns", "seeds", "figures") if key in other} | spec


def _table(paper: str, content: Settings, name: str, spec: Settings, quick: bool) -> Table:
    columns: dict[str, Settings] = spec.get("columns", {"": {}})
    rows: dict[str, Settings] = spec["rows"]
    seeds: list[int] = spec["seeds"]
    variants: dict[str, Settings] = spec.get("variants", {"": {}})
    small: list[Settings] = []
    if quick:
        own = dict(spec.get("quick", {}))
        columns = {key: columns[key] for key in own.pop("columns", list(columns)[:1])}
        rows = {key: rows[key] for key in own.pop("rows", list(rows))}
        seeds, variants = seeds[:1], dict(list(variants.items())[:1])
        plain = {"engine": "plain"}  # tracing would take longer than these few steps
        small = [plain, content.get("quick", {}), own]
    cells = []
    for variant, changed in variants.items():
        for column, setting in columns.items():
            for row, method in rows.items():
                layers = [content.get("experiment", {}), spec.get("experiment", {}), changed, setting, method]
                whole = merge(*layers, *small)
                whole = filled(whole, whole.pop("with", {}))
                options = whole.pop("run", {})
                minutes, share = whole.pop("minutes", None), whole.pop("share", 1.0)
                for key in ("standin", "label"):
                    whole.pop(key, None)
                for seed in seeds:
                    settings = {**whole, "seed": seed}
                    cells.append(Cell(paper, name, column, row, variant, settings, options, minutes, share, quick))
    standin = {key: setting.get("standin", spec.get("standin", "")) for key, setting in columns.items()}
    figures = [Figure(**figure) for figure in spec.get("figures", [])]
    return Table(
        paper, name, spec["title"], list(columns), list(rows), seeds, figures, cells,
        {key: text for key, text in standin.items() if text}, spec.get("note", ""), spec.get("drawing"),
        [] if list(variants) == [""] else list(variants), spec.get("calibration"),
    )  # fmt: skip


def select(paper: str = "all", table: str | None = None, quick: bool = False) -> list[Table]:
    """Return the selected tables: of one paper, by name or number, or of all; all of them, or one by name."""
    known = papers(quick)
    chosen = list(known.values())
    if paper != "all":
        chosen = [p for p in known.values() if paper in (p.name, str(p.number))]
        if not chosen:
            raise unknown("paper", paper, [*known, *(str(p.number) for p in known.values()), "all"])
    tables = [t for p in chosen for t in p.tables.values()]
    if table is not None:
        tables = [t for t in tables if t.name == table]
        if not tables:
            raise unknown("table", table, [t.name for p in chosen for t in p.tables.values()])
    return tables


def cell(key: str, quick: bool = False) -> Cell:
    """Return the cell of this name."""
    everything = {c.key: c for c in cells(select(quick=quick))}
    if key not in everything:
        raise UndriftError(f"There is no cell {key!r}; `undrift reproduce --list --cells` names them all.")
    return everything[key]


def cells(tables: Iterable[Table]) -> Iterator[Cell]:
    for table in tables:
        yield from table.cells


def value_of(published: str) -> tuple[float, float | None] | None:
    """Return the pair of numbers in "72.66 (0.20)"; the second may be None. None if nothing is published."""
    found = re.fullmatch(r"\s*(-?[0-9.]+)\s*(?:\(([0-9.]+)\))?\s*", published)
    return (float(found[1]), float(found[2]) if found[2] else None) if found else None
