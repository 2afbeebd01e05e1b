"""The `[study]` section of an experiment file, checked before anything runs.

    [study]
    tuning_seeds = [100]            # settings are chosen on these, by validation data
    seeds = [0, 1, 2]               # and the chosen ones are reported on these
    baseline = "FedAvg"

    [study.tune]                    # what every method may choose from
    local.lr = [0.1, 0.3, 1.0]

    [study.partitions]              # an expression, or a table of the keys that differ
    IID = "IID()"
    skewed = { data.partition = "Dirichlet(0.1)", rounds = 60 }

    [study.methods]                 # an expression, or a table: values for its {braces}, and keys of its own
    FedAvg = "FedAvg()"
    FedProx = { method = "FedProx(mu={mu})", mu = [0.1, 1.0] }

In `tune` and `methods`, a list holds the values to try, `{low, high}` is a range, and any other value is fixed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, StrictFloat, StrictInt, StrictStr, ValidationError

from undrift.errors import UndriftError, first_line, nearest, quoted
from undrift.tools.config import SECTIONS, Count, Document, Experiment, Section, Seed, put

BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A place in a method's expression: FedProx(mu={mu})."""


class Range(Section):
    """`{low = 0.01, high = 1.0, log = true}`: between two numbers, whole ones if both are whole."""

    low: StrictInt | StrictFloat
    high: StrictInt | StrictFloat
    log: bool = False


class Plan(Section):
    """The section `[study]`."""

    seeds: list[Seed] = Field(min_length=1)
    tuning_seeds: list[Seed] = Field(default_factory=list)
    baseline: StrictStr | None = None
    metric: StrictStr | None = None
    last: Count = 1
    target: StrictInt | StrictFloat | None = None
    search: Literal["grid", "random", "bayesian"] = "grid"
    trials: Count | None = None
    tune: dict[str, Any] = Field(default_factory=dict)
    partitions: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Cell:
    """A method on a partition: its fixed settings, and the choices that are tuned."""

    partition: str
    method: str
    settings: Document
    expression: str
    """The method, with the choices that it takes in braces."""
    choices: dict[str, list[Any] | Range]

    def chosen(self, values: Mapping[str, Any], seed: int, where: str) -> Document:
        """The settings of a run with these values of the choices."""
        expression = BRACES.sub(lambda match: str(values.get(match[1], match[0])), self.expression)
        settings = {**self.settings, "method": expression, "seed": seed}
        for key, value in values.items():
            if key not in BRACES.findall(self.expression):
                settings = put(settings, key, value, where)
        return settings

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices of which there is only one."""
        return {key: own[0] for key, own in self.choices.items() if isinstance(own, list) and len(own) == 1}

    @property
    def tuned(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.fixed) < len(self.choices)

    def at_edge(self, values: Mapping[str, Any]) -> list[str]:
        """The choices, of three numbers or more or from a range, whose value is the lowest or the highest."""
        at_edge = []
        for key, own in self.choices.items():
            options = [own.low, own.high] if isinstance(own, Range) else own
            numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in options)
            enough = isinstance(own, Range) or len(set(map(str, options))) > 2
            if numbers and enough and values[key] in (min(options), max(options)):
                at_edge.append(key)
        return at_edge

    @property
    def combinations(self) -> int:
        return math.prod(len(own) for own in self.choices.values() if isinstance(own, list))


@dataclass(frozen=True, eq=False)
class Study:
    """A study file: its plan, and a cell per partition and method."""

    plan: Plan
    cells: list[Cell]

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(cell.partition for cell in self.cells))

    @property
    def tuned(self) -> bool:
        return any(cell.tuned for cell in self.cells)


def read_study(settings: Document, where: str) -> Study:
    """The study of an experiment file with a `[study]` section.

    Raises:
        UndriftError: If the section is missing, or something in it is wrong or contradicts the rest.
    """
    if "study" not in settings:
        raise UndriftError(f"{where} has no [study] section; add one with seeds and [study.methods].")
    base = {key: value for key, value in settings.items() if key not in ("study", "sweep")}
    plan = _plan(settings["study"], where)
    shared = _entries(plan.tune)
    methods = plan.methods or {str(base.get("method", "FedAvg()")): str(base.get("method", "FedAvg()"))}
    cells = [
        _cell(base, partition, keys, method, entry, shared, where)
        for partition, keys in (plan.partitions or {"": {}}).items()
        for method, entry in methods.items()
    ]
    study = Study(plan, cells)
    _check(study, where)
    return study


def _plan(section: Any, where: str) -> Plan:
    try:
        return Plan.model_validate(section)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["study", *map(str, first["loc"][:2])])
        if first["type"] == "extra_forbidden":
            close = nearest(str(first["loc"][-1]), Plan.model_fields)
            hint = f"Did you mean {close!r}?" if close else f"Known: {', '.join(Plan.model_fields)}."
            raise UndriftError(f"{where}: There is no key {quoted(key)}. {hint}") from None
        if first["type"] == "missing":
            raise UndriftError(f"{where}: The key {key!r} is missing; add it, such as seeds = [0, 1, 2].") from None
        raise UndriftError(f"{where}: The key {key!r} is wrong: {first_line(ValueError(first['msg']))}.") from None


def _cell(
    base: Document, partition: str, keys: Any, method: str, entry: Any, shared: dict[str, Any], where: str
) -> Cell:
    """The cell of one partition and one method."""
    place = f"{where}: study.partitions.{partition}"
    keys = {"data.partition": keys} if isinstance(keys, str) else keys
    if not isinstance(keys, dict):
        raise UndriftError(f"{place} must be a partition in quotes, or a table of keys, not {quoted(keys)}.")
    settings = base
    for key, value in _entries(keys, ranges=False).items():
        if key in ("seed", "method"):
            raise UndriftError(f"{place}: {key} must be the same for all partitions; set it in study.{key}s.")
        settings = put(settings, key, value, place)
    place = f"{where}: study.methods.{method}"
    entry = {"method": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict):
        raise UndriftError(f"{place} must be a method in quotes, or a table with its choices, not {quoted(entry)}.")
    entry = _entries(entry)
    expression = entry.pop("method", method)
    if not isinstance(expression, str):
        raise UndriftError(f'{place}.method must be an expression such as "FedProx(mu={{mu}})".')
    own = shared | entry
    choices = {key: _options(value, f"{place}: {key}") for key, value in own.items()}
    braces = BRACES.findall(expression)
    for name in braces:
        if name not in choices:
            raise UndriftError(f"{place}: {{{name}}} has no values; add them, such as {name} = [0.1, 1.0].")
    for key in own:
        if key == "seed" or key.startswith("data."):
            raise UndriftError(
                f"{place}: {key} must be the same for all methods; vary it in [study.partitions] or in seeds."
            )
        if key not in braces and not _known(key):
            raise UndriftError(
                f"{place}: {key!r} is neither in braces in {quoted(expression)} nor a key of experiment files."
            )
    return Cell(partition, method, settings, expression, choices)


def _known(key: str) -> bool:
    section, _, name = key.rpartition(".")
    return name in (
        SECTIONS[section].model_fields if section in SECTIONS else {} if section else Experiment.model_fields
    )


def _options(value: Any, place: str) -> list[Any] | Range:
    """The values to choose from: those of a list, a range, or the only one."""
    if is_range(value):
        try:
            range_ = Range.model_validate(value)
        except ValidationError as error:
            raise UndriftError(f"{place} is not a range such as {{low = 0.01, high = 1.0, log = true}}.") from error
        if not range_.low < range_.high or (range_.log and range_.low <= 0):
            raise UndriftError(f"{place}: a range needs low < high, and low > 0 with log = true.")
        return range_
    if isinstance(value, list):
        if not value:
            raise UndriftError(f"{place} has an empty list; give it values to choose from.")
        return value
    return [value]


def is_range(value: Any) -> bool:
    return isinstance(value, dict) and bool({"low", "high"} & value.keys())


def _entries(section: dict[str, Any], ranges: bool = True) -> dict[str, Any]:
    """Keys and values, with dotted keys for the sections of experiment files: `local.lr`."""
    entries: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict) and name in SECTIONS and not (ranges and is_range(value)):
            entries |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            entries[name] = value
    return entries


def _check(study: Study, where: str) -> None:
    """Raise `UndriftError` if the plan contradicts itself."""
    plan = study.plan
    for name, seeds in (("seeds", plan.seeds), ("tuning_seeds", plan.tuning_seeds)):
        if len(set(seeds)) < len(seeds):
            raise UndriftError(f"{where}: study.{name} lists a seed twice.")
    both = sorted({*plan.seeds} & {*plan.tuning_seeds})
    if both:
        raise UndriftError(
            f"{where}: the seed {both[0]} is in both study.seeds and study.tuning_seeds. A setting chosen on a seed "
            "looks better there than it is; tune on others, such as tuning_seeds = [100]."
        )
    methods = dict.fromkeys(cell.method for cell in study.cells)
    if plan.baseline is not None and plan.baseline not in methods:
        raise UndriftError(f"{where}: study.baseline is {quoted(plan.baseline)}; the methods are {', '.join(methods)}.")
    if not study.tuned:
        return
    if not plan.tuning_seeds:
        raise UndriftError(f"{where}: there are settings to tune; add study.tuning_seeds, such as [100].")
    ranged = [key for cell in study.cells for key, options in cell.choices.items() if isinstance(options, Range)]
    if plan.search == "grid" and ranged:
        raise UndriftError(
            f"{where}: a grid needs lists of values, and {ranged[0]} is a range; list its values, or set "
            'study.search to "random" or "bayesian".'
        )
    if (plan.search == "grid") != (plan.trials is None):
        raise UndriftError(
            f'{where}: study.trials is how many settings search = "random" and "bayesian" try; '
            + ("a grid tries all, so leave it out." if plan.search == "grid" else "add it, such as trials = 20.")
        )
