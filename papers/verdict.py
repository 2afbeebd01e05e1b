"""Whether a paper's claims hold here, by a rule that was fixed before the first run.

A claim is judged column by column, then as a whole.

- *A is better than B.* For every seed that both have finished, d is their difference in the claimed direction (divided
  by B's value for relative claims), and D is the published difference. A column *holds* if d has the claimed sign for
  every seed and the mean of d is at least D/2, where D is known and positive. It holds *partly* if only the mean of d
  is positive, and *fails* otherwise. For the peak of a mean curve, the sign is that of each seed's own peak, and the
  size is the difference of the two mean curves' peaks.
- *A is no worse than B.* A column holds if the mean of d is not below minus the margin that the claim states, and fails
  otherwise.
- *A comes out as published.* A column holds if our mean is within two standard deviations of the published one,
  2·√(s² + s′²), where s and s′ are the standard deviations over seeds, ours and the paper's, and one that is unknown
  counts as 0. If both are unknown, the bound is one point for percentages. It is never less than half a unit of the
  last printed digit. A column without a published number is left out, unless the number follows from the paper's
  equations: then what we calculated from them takes its place, and the verdict says so.
- *These numbers are equal.* Each published number is judged by itself, and holds if ours, rounded to the digits that
  are printed, is the same.
- A run that diverged, or that never reached its target, is worse than any other. A column fails where A did so for any
  seed. Where only B did, the difference has a sign but no size, and the column holds partly at most.
- A column is judged once two seeds have finished, or the only one of a table that has one.

A claim *held* if all its columns hold, *did not hold here* if more than half of them fail, and *partly held*
otherwise. While columns are missing, the verdict is that of the columns judged so far, and says so.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from papers.catalogue import Figure, Table, value_of
from papers.paired import Estimate, by_seed, over_columns, over_seeds
from papers.readings import (
    Measured,
    chosen_variant,
    expected,
    find,
    measured,
    published,
    quick,
    reading,
    shortfall,
)
from papers.results import Result, Results
from papers.results import over_seeds as mean_over_seeds
from undrift.errors import unknown

Claim = dict[str, Any]
HOLDS, PARTLY, FAILS, NOT_JUDGED = "holds", "partly", "fails", ""
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Column:
    """The verdict on a claim in one column of its table."""

    name: str
    state: str = NOT_JUDGED
    difference: float | None = None
    """In the claimed direction, averaged over seeds; None if a run has no value."""
    published: float | None = None
    """The published difference; for a claim to match, the published value, or the calculated one."""
    seeds: int = 0
    each: list[float] = field(default_factory=list)
    """The difference for each seed; infinite where one of the two runs diverged or missed its target."""
    note: str = ""
    late: list[Estimate] = field(default_factory=list)
    """The paired difference over the last fifth for each seed: see `paired.py`. It does not decide the verdict."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim."""

    words: str
    """*held*, *partly held* or *did not hold here*, possibly "so far", or "not run yet"."""
    amount: str
    """By how much."""
    seeds: str
    columns: list[Column]
    unit: str = "column"
    """What an entry of `columns` is: a column, or a single number."""

    @property
    def judged(self) -> int:
        return sum(column.state != NOT_JUDGED for column in self.columns)

    @property
    def total(self) -> int:
        return len(self.columns)


def judge(claim: Claim, table: Table, results: Results) -> Verdict:
    """Judge a claim that is about this table."""
    if "equal" in claim:
        columns = [_equal(table, *place, results) for place in _numbers(claim, table)]
        return _verdict(columns, _counted(columns, "number"), "number")
    which = find(table, claim["figure"])
    if "matches" in claim:
        _check(table, claim["matches"])
        names = [name for name in _columns(claim, table) if value_of(expected(table, which, name, claim["matches"]))]
        columns = [_matches(table, which, name, claim["matches"], results) for name in names]
        return _verdict(columns, _amount(columns, which, claim))
    _check(table, claim["better"], claim["than"])
    columns = [_better(claim, table, which, name, results) for name in _columns(claim, table)]
    return _verdict(columns, _amount(columns, which, claim))


def _check(table: Table, *rows: str) -> None:
    for row in rows:
        if row not in table.rows and not quick(table):
            raise unknown(f"row of {table.paper}'s {table.name}", row, table.rows)


def _columns(claim: Claim, table: Table) -> list[str]:
    asked, but = claim.get("columns", table.columns), claim.get("but", [])
    for name in [*asked, *but]:
        if name not in table.columns and not quick(table):
            raise unknown(f"column of {table.paper}'s {table.name}", name, table.columns)
    return [name for name in asked if name in table.columns and name not in but]


def _enough(table: Table, seeds: int) -> bool:
    return seeds >= min(2, len(table.seeds))


def _finished(table: Table, column: str, row: str, results: Results) -> dict[int, Result]:
    """The finished results by seed, for the variant that the table uses."""
    variant = chosen_variant(table, results)
    cells = [] if variant is None else table.at(column, row, variant)
    return {cell.seed: result for cell in cells if (result := results.get(cell)) is not None}


def _better(claim: Claim, table: Table, which: Figure, column: str, results: Results) -> Column:
    better = _finished(table, column, claim["better"], results)
    than = _finished(table, column, claim["than"], results)
    expected = _published_difference(claim, table, which, column)
    pairs = [(better[seed], than[seed]) for seed in table.seeds if seed in better and seed in than]
    read = [(one, other, _paired(which, one, other, claim)) for one, other in pairs]
    read = [(one, other, d) for one, other, d in read if d is not None]
    each = [d for _, _, d in read if d is not None]
    late = [found for one, other, d in read if math.isfinite(d or 0.0) and (found := by_seed(which, one, other))]
    if not _enough(table, len(each)):
        return Column(column, published=expected, seeds=len(each), each=each, late=late)
    finite = [(one, other) for one, other, d in read if d is not None and math.isfinite(d)]
    size = _size(which, finite, claim)
    state, note = _state(each, size, expected, claim.get("no_worse"))
    whole = size if len(finite) == len(each) else None
    return Column(column, state, whole, expected, len(each), each, note, late)


def _paired(which: Figure, better: Result, than: Result, claim: Claim) -> float | None:
    """The difference of two runs in the claimed direction, infinite if one of them has an infinitely bad value."""
    one, other = reading(which, better), reading(which, than)
    if one is None or other is None:
        return None
    if math.isinf(one):
        return -math.inf
    return math.inf if math.isinf(other) else _difference(which, one, other, claim)


def _difference(which: Figure, better: float, than: float, claim: Claim) -> float | None:
    d = than - better if which.lower else better - than
    if not claim.get("relative"):
        return d
    return d / abs(than) if than else None


def _size(which: Figure, pairs: list[tuple[Result, Result]], claim: Claim) -> float | None:
    """The mean difference; for "peak", that of the mean curves' peaks."""
    if which.take != "peak":
        found = [d for one, other in pairs if (d := _paired(which, one, other, claim)) is not None]
        return statistics.fmean(found) if found else None
    better, than = (mean_over_seeds(which, side) for side in ([one for one, _ in pairs], [other for _, other in pairs]))
    return _difference(which, better[0], than[0], claim) if better and than else None


def _state(
    each: list[float], size: float | None, expected: float | None, margin: float | None = None
) -> tuple[str, str]:
    if -math.inf in each:
        return FAILS, f"no value for {each.count(-math.inf)} of {len(each)} seeds"
    if math.inf in each:
        note = f"no value to compare with for {each.count(math.inf)} of {len(each)} seeds"
        return (PARTLY if size is None or size > 0 else FAILS), note
    if margin is not None:
        return (HOLDS if size is not None and size >= -margin - 1e-9 else FAILS), f"margin {margin:g}"
    if size is None or size <= 0:
        return FAILS, ""
    if min(each) <= 0:
        return PARTLY, f"the sign differs for {sum(d <= 0 for d in each)} of {len(each)} seeds"
    if expected is not None and size < expected / 2 - 1e-9:
        return PARTLY, "less than half of what is published"
    return HOLDS, ""


def _published_difference(claim: Claim, table: Table, which: Figure, column: str) -> float | None:
    """The claim's own figure, one for all columns or by column, or the difference of the published numbers."""
    if "published" in claim:
        given = claim["published"]
        value = given.get(column) if isinstance(given, dict) else given
        return None if value is None or quick(table) else float(value)
    one = value_of(published(table, which, column, claim["better"]))
    other = value_of(published(table, which, column, claim["than"]))
    return _difference(which, one[0], other[0], claim) if one and other else None


def _matches(table: Table, which: Figure, column: str, row: str, results: Results) -> Column:
    printed = expected(table, which, column, row)
    known = value_of(printed)
    assert known is not None
    value, spread = known
    found = _in_use(table, which, column, row, results)
    if not _enough(table, found.seeds):
        return Column(column, published=value, seeds=found.seeds)
    if not found.whole or found.mean is None:
        return Column(column, FAILS, None, value, found.seeds, note=shortfall(found))
    bound = 2 * math.hypot(spread or 0.0, found.std or 0.0)
    if spread is None and found.std is None and which.percent:
        bound = 1.0
    bound = max(bound, _half_a_digit(printed))
    d = found.mean - value
    state = HOLDS if abs(d) <= bound + 1e-9 else FAILS
    return Column(column, state, d, value, found.seeds, note=f"bound {bound:.2g}")


def _half_a_digit(printed: str) -> float:
    """Half a unit of the last digit: 0.005 for "72.66 (0.20)"."""
    return float(0.5 * 10.0 ** -len(printed.split("(")[0].strip().partition(".")[2]))


def _in_use(table: Table, which: Figure, column: str, row: str, results: Results) -> Measured:
    variant = chosen_variant(table, results)
    return Measured() if variant is None else measured(which, table.at(column, row, variant), results)


def _numbers(claim: Claim, table: Table) -> list[tuple[Figure, str, str]]:
    """The published numbers of a claim of equality, as (figure, column, row)."""
    whichs = [find(table, name) for name in claim["equal"]]
    places = [(which, column, row) for which in whichs for column in _columns(claim, table) for row in table.rows]
    return [place for place in places if value_of(published(table, *place))]


def _equal(table: Table, which: Figure, column: str, row: str, results: Results) -> Column:
    printed = published(table, which, column, row)
    known = value_of(printed)
    assert known is not None
    name = ", ".join(word for word in (which.name, column, row) if word)
    found = _in_use(table, which, column, row, results)
    if not _enough(table, found.seeds):
        return Column(name, published=known[0], seeds=found.seeds)
    if not found.whole or found.mean is None:
        return Column(name, FAILS, None, known[0], found.seeds, note=shortfall(found))
    d = found.mean - known[0]
    state = HOLDS if abs(d) <= _half_a_digit(printed) + 1e-9 else FAILS
    return Column(name, state, d, known[0], found.seeds)


def _verdict(columns: list[Column], amount: str, unit: str = "column") -> Verdict:
    judged = [column for column in columns if column.state != NOT_JUDGED]
    if not judged:
        return Verdict(NOT_RUN if columns else "nothing to compare with", "", "", columns, unit)
    fails = sum(column.state == FAILS for column in judged)
    words = "did not hold here" if 2 * fails > len(judged) else "partly held"
    if all(column.state == HOLDS for column in judged):
        words = "held"
    if len(judged) < len(columns):
        words += f" so far, {len(judged)} of {len(columns)} {unit}s"
    counts = sorted({column.seeds for column in judged})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return Verdict(words, amount, seeds, columns, unit)


def signed(x: float, digits: int) -> str:
    """A number with its sign, in print: +1.20, −0.40, 0.00."""
    text = f"{x:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", "−")


def difference(x: float | None, which: Figure, claim: Claim) -> str:
    """A difference of a claim, in its units; "" for None."""
    if x is None:
        return ""
    if math.isinf(x):
        return "+∞" if x > 0 else "−∞"
    return f"{signed(100 * x, 1)}%" if claim.get("relative") else signed(x, which.digits)


def late(columns: list[Column], which: Figure) -> str:
    """The paired difference over the last fifth, as the mean over seeds and then over columns; "" if there is none."""
    return estimate(over_columns([found for column in columns if (found := over_seeds(column.late))]), which)


def estimate(x: Estimate | None, which: Figure) -> str:
    """A difference with its standard error, in print: +0.05 ± 0.07."""
    if x is None:
        return ""
    return signed(x.value, which.digits) + ("" if x.error is None else f" ± {x.error:.{which.digits}f}")


def _amount(columns: list[Column], which: Figure, claim: Claim) -> str:
    judged = [column for column in columns if column.state != NOT_JUDGED]
    known = [column.difference for column in judged if column.difference is not None]
    parts = []
    if known:
        unit = " points" if which.percent and not claim.get("relative") else ""
        text = difference(statistics.fmean(known), which, claim) + unit
        if len(known) > 1:
            text += f" ({difference(min(known), which, claim)} to {difference(max(known), which, claim)})"
        known_as = "calculated" if claim.get("matches") in which.calculated else "published"
        parts.append(f"ours − {known_as} {text}" if "matches" in claim else text)
    expected = [column.published for column in judged if column.published is not None]
    if expected and "matches" not in claim:
        parts.append(f"published {difference(statistics.fmean(expected), which, claim)}")
    without = [column for column in judged if column.difference is None]
    if without:
        who = "the baseline" if all(math.inf in column.each for column in without) else "a run"
        why = f"{who} {'never got there' if which.take == 'reach' else 'diverged'}"
        where = f" in {_many(len(without), 'column')}" if len(judged) > 1 else ""
        parts.append(f"effect size undefined{where} ({why})")
    return "; ".join([*parts, _counted(columns, "column")]) if judged else ""


def _counted(columns: list[Column], unit: str) -> str:
    judged = [column for column in columns if column.state != NOT_JUDGED]
    counts = [(word, sum(column.state == word for column in judged)) for word in (HOLDS, PARTLY, FAILS)]
    said = ", ".join(f"{word} in {count}" for word, count in counts if count)
    return f"{said} of {_many(len(judged), unit)}" if judged else ""


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
