"""Figures as tables: on a terminal, in Markdown, in LaTeX for booktabs, and as CSV with every number."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undrift.errors import printable
from undrift.tools.study.measures import Asked, Figures
from undrift.tools.study.statistics import average, paired

Blocks = Mapping[str, Sequence[Figures]]
"""The figures of groups, by partition. The name of the only block of a comparison is empty."""


@dataclass(frozen=True)
class Column:
    header: str
    cell: Callable[[Figures], str]
    printed: bool = True
    """Whether it belongs into a paper, whose page has no room for all of them."""


def columns(blocks: Blocks, asked: Asked) -> list[Column]:
    """The columns that these figures fill. The first one, of names, is not among them."""
    word = asked.metric.replace("_", " ")
    told = [row for rows in blocks.values() for row in rows]
    kept = "" if asked.metric.startswith("validation_") else " (on test data)"  # its round is chosen by what it reports
    main = f"last {word}" if asked.last == 1 else f"{word}, mean of last {asked.last} rounds"
    uneven = any(row["counted"] != told[0]["counted"] or row["lost"] or row["remark"] for row in told)
    found = [
        Column("runs", lambda row: row["counted"], printed=uneven),
        Column(main, lambda row: spread(row, row["runs"] - row["lost"], row["runs"])),
    ]
    if asked.baseline is not None:
        found.append(Column(f"difference to {asked.baseline} [95% interval]", difference))
    found.append(Column(f"best {word}{kept}", lambda row: spread(row["best_on_test_data"]), printed=False))
    if asked.target is not None:
        to = f"to {asked.target:g}"
        found.append(Column(f"rounds {to}", _rounds))
        found.append(Column(f"steps {to}", lambda row: spread(row["steps_to_target"], digits=0), printed=False))
        found.append(Column(f"MB {to}", lambda row: spread(row["bytes_to_target"], digits=1, unit=1e6)))
        found.append(Column(f"s {to}", lambda row: spread(row["seconds_to_target"], digits=1), printed=False))
    if any("client_worst" in row for row in told):
        found.append(Column("worst tenth of clients", lambda row: spread(row.get("client_worst", {}))))
        found.append(Column("deviation over clients", lambda row: spread(row.get("client_std", {}))))
    if any(row.get("settings_tried") for row in told):
        found.append(Column("settings tried", lambda row: str(row["settings_tried"] or "–"), printed=False))
    if any("setting" in row for row in told):
        found.append(Column("setting", lambda row: described(row["setting"]), printed=False))
    return found


def notes(blocks: Blocks) -> list[str]:
    """A line for each group with a run that did not learn, or whose setting has a value at the edge of those tried."""
    found = []
    for partition, rows in blocks.items():
        for row in rows:
            where = ", ".join(filter(None, (partition, row["name"])))
            if row.get("remark"):
                found.append(f"{where}: {row['remark']}")
            if keys := row.get("at_edge"):
                which = described({key: row["setting"][key] for key in keys})
                several = (
                    "its range; consider widening it" if len(keys) == 1 else "their ranges; consider widening them"
                )
                found.append(f"{where}: {which} chosen at the edge of {several}")
    return found


def spread(
    figures: Mapping[str, Any], known: int | None = None, of: int | None = None, digits: int = 4, unit: float = 1.0
) -> str:
    """Mean ± standard deviation, in this unit; with `known` below `of`, also of how many runs it is."""
    if figures.get("mean") is None:
        return "–"
    text = f"{figures['mean'] / unit:,.{digits}f}"
    text += f" ± {figures['std'] / unit:,.{digits}f}" if figures["std"] is not None else ""
    return text if known == of else f"{text} ({known} of {of})"


def _rounds(row: Figures) -> str:
    known, of = row["reached"], row["runs"]
    return spread(row["rounds_to_target"], known, of, digits=0) if known else f"– (0 of {of})"


def difference(row: Figures) -> str:
    """The paired difference with its interval, or why there is none."""
    if "difference" not in row:
        return ""
    found = row["difference"]
    if found["mean"] is None:
        return "no common seed"
    text = f"{found['mean']:+.4f}"
    if found["low"] is None:
        return f"{text} (one common seed)"
    pairs = f" ({found['pairs']} seeds)" if found["pairs"] < row["runs"] else ""
    return f"{text} [{found['low']:+.4f}, {found['high']:+.4f}]{pairs}"


def described(setting: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in setting.items()
    )


def leaders(rows: Sequence[Figures], lower: bool) -> list[Figures]:
    """The row with the best mean, and those that its runs do not show to be worse, of those without a lost run.

    A row is among them if the 95% interval of its difference to the best, paired by seed, contains 0.
    """
    leader = best(rows, lower)
    if leader is None:
        return []
    ahead = _by_seed(leader)
    close = [paired(_by_seed(row), ahead) for row in rows]
    return [
        row
        for row, found in zip(rows, close, strict=True)
        if row is leader or (not row["lost"] and found.low <= 0 <= found.high)
    ]


def _by_seed(row: Figures) -> dict[int, float]:
    """Each seed's figure; the mean, if there are several runs with one seed."""
    found: dict[int, list[float]] = {}
    for seed, value in zip(row["seeds"], row["values"], strict=True):
        found.setdefault(seed, []).append(math.nan if value is None else value)
    return {seed: average(values) for seed, values in found.items()}


def best(rows: Sequence[Figures], lower: bool) -> Figures | None:
    """The row with the best mean, of those without a lost run; None if there is only one row."""
    sound = [row for row in rows if row["mean"] is not None and not row["lost"]]
    sign = 1 if lower else -1
    return min(sound, key=lambda row: sign * row["mean"]) if len(rows) > 1 and sound else None


def rich_table(blocks: Blocks, asked: Asked) -> Any:
    """A Rich table."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    found = columns(blocks, asked)
    made.add_column("")
    for column in found:
        widest = max(len(column.cell(row)) for rows in blocks.values() for row in rows)  # headers may wrap, cells not
        made.add_column(column.header, justify="left" if column.header == "setting" else "right", min_width=widest)
    for name, rows in blocks.items():
        if name:
            made.add_row(Text(name, "bold"))
        for row in rows:
            made.add_row(f"{'  ' if name else ''}{row['name']}", *(column.cell(row) for column in found))
    return made


def markdown(blocks: Blocks, asked: Asked) -> str:
    """A Markdown table; **bold** are the `leaders` of a block."""
    found = columns(blocks, asked)
    named = any(blocks)
    lines = [_line([*(["partition"] if named else []), "method" if named else "", *(c.header for c in found)])]
    lines.append("|" + "---|" * (1 + named) + "---:|" * len(found))
    for name, rows in blocks.items():
        leading = leaders(rows, asked.lower)
        for row in rows:
            cells = [column.cell(row) for column in found]
            cells[1] = f"**{cells[1]}**" if row in leading else cells[1]
            lines.append(_line([*([name] if named else []), row["name"], *cells]))
    below = "".join(f"\n- {one_line(note)}" for note in notes(blocks))
    return "\n".join(lines) + "\n" + (f"{below}\n" if below else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(one_line(cell).replace("|", r"\|") for cell in cells) + " |"


def one_line(text: str) -> str:
    """Text without control characters and ends of lines, after which it would be no cell or comment any more."""
    return " ".join(printable(text).splitlines())


def latex(blocks: Blocks, asked: Asked) -> str:
    r"""A `tabular` for booktabs, to be put into a `table` or `table*`; bold are the `leaders` of a block."""
    found = [column for column in columns(blocks, asked) if column.printed]
    lines = [
        r"% Needs \usepackage{booktabs}. Mean ± standard deviation over seeds. Bold: the best mean, and every mean",
        "% whose difference to it, paired by seed, has a 95% confidence interval that contains 0.",
        *(f"% {one_line(note)}" for note in notes(blocks)),
        rf"\begin{{tabular}}{{@{{}}l{'r' * len(found)}@{{}}}}",
        r"\toprule",
        " & ".join(["", *(_head(column.header) for column in found)]) + r" \\",
    ]
    main = [column.header for column in found].index(columns(blocks, asked)[1].header)
    for name, rows in blocks.items():
        lines.append(r"\midrule")
        if name:
            lines.append(rf"\multicolumn{{{1 + len(found)}}}{{@{{}}l}}{{\emph{{{escaped(name)}}}}} \\")
        leading = leaders(rows, asked.lower)
        for row in rows:
            cells = [escaped(column.cell(row)) for column in found]
            cells[main] = rf"\textbf{{{cells[main]}}}" if row in leading else cells[main]
            lines.append(" & ".join([_first(escaped(row["name"])), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _first(cell: str) -> str:
    r"""The first cell of a row. After \\ and \midrule, a star or a bracket would be taken for an argument of these."""
    return f"{{}}{cell}" if cell.lstrip().startswith(("[", "*")) else cell


def _head(header: str) -> str:
    """A header over two lines, where it is long: as wide as its figures."""
    words = header.split()
    if len(header) < 16:
        return escaped(header)
    cut = min(range(1, len(words)), key=lambda i: abs(len(" ".join(words[:i])) - len(" ".join(words[i:]))))
    above, below = (escaped(" ".join(part)) for part in (words[:cut], words[cut:]))
    return rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{above}\\{{}}{below}\end{{tabular}}"


SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$",
}  # fmt: skip


def escaped(text: str) -> str:
    """Text for LaTeX; a minus or plus before a number becomes mathematics."""
    plain = "".join(SPECIAL.get(letter, letter) for letter in one_line(text))
    return re.sub(r"(?<![\w.])([+-])(?=\d)", r"$\1$", plain)


def csv_text(blocks: Blocks) -> str:
    """Every number, one line per group. Lists, such as the figures by seed, are separated by spaces."""
    rows = [({"partition": name} if name else {}) | _flat(row) for name, own in blocks.items() for row in own]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _inert(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _flat(row: Figures) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("counted", "tried", "remark"):
            continue
        if key == "setting":
            found[key] = described(value)
        elif isinstance(value, dict):
            found |= {f"{key}_{inner}": number for inner, number in value.items()}
        else:
            found[key] = " ".join("nan" if x is None else str(x) for x in value) if isinstance(value, list) else value
    return found


FORMULAS = tuple("=+-@＝＋－＠")
"""What formulas begin with in spreadsheets, also in those for scripts with wide letters."""


def _inert(value: Any) -> Any:
    """A cell of text that spreadsheets show. One that begins like a formula would be computed, and may do harm."""
    if not isinstance(value, str) or _numbers(value):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(FORMULAS) else text


def _numbers(text: str) -> bool:
    """Whether these are numbers, separated by spaces."""
    try:
        return [float(word) for word in text.split()] != []
    except ValueError:
        return False
