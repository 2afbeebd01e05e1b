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
from undrift.tools.compare import Comparison, Figures
from undrift.tools.statistics import average_by_seed, paired

Blocks = Mapping[str, Sequence[Figures]]
"""The figures of groups, by partition. The name of the only block of a comparison is empty."""


@dataclass(frozen=True)
class Column:
    header: str
    cell: Callable[[Figures], str]
    printed: bool = True
    """Whether LaTeX tables have it; a page has no room for all of them."""


def columns(blocks: Blocks, comparison: Comparison) -> list[Column]:
    """The columns that these figures fill, without the first one, of names."""
    word = comparison.metric.replace("_", " ")
    every = [row for rows in blocks.values() for row in rows]
    kept = (
        "" if comparison.metric.startswith("validation_") else " (on test data)"
    )  # its round is chosen by what it reports
    main = f"last {word}" if comparison.last == 1 else f"{word}, mean of last {comparison.last} rounds"
    uneven = any(row["counted"] != every[0]["counted"] or row["lost"] or row["remark"] for row in every)
    shown = [
        Column("runs", lambda row: row["counted"], printed=uneven),
        Column(main, lambda row: spread(row, row["runs"] - row["lost"], row["runs"])),
    ]
    if comparison.baseline is not None:
        shown.append(Column(f"difference to {comparison.baseline} [95% interval]", difference))
    shown.append(Column(f"best {word}{kept}", lambda row: spread(row["best_on_test_data"]), printed=False))
    if comparison.target is not None:
        to = f"to {comparison.target:g}"
        shown.append(Column(f"rounds {to}", _rounds))
        shown.append(Column(f"steps {to}", lambda row: spread(row["steps_to_target"], digits=0), printed=False))
        shown.append(Column(f"MB {to}", lambda row: spread(row["bytes_to_target"], digits=1, unit=1e6)))
        shown.append(Column(f"s {to}", lambda row: spread(row["seconds_to_target"], digits=1), printed=False))
    if any("client_worst" in row for row in every):
        shown.append(Column("worst tenth of clients", lambda row: spread(row.get("client_worst", {}))))
        shown.append(Column("deviation over clients", lambda row: spread(row.get("client_std", {}))))
    if any(row.get("settings_tried") for row in every):
        shown.append(Column("settings tried", lambda row: str(row["settings_tried"] or "–"), printed=False))
    if any("setting" in row for row in every):
        shown.append(Column("setting", lambda row: setting_text(row["setting"]), printed=False))
    return shown


def notes(blocks: Blocks) -> list[str]:
    """A line for each group with a run that did not learn, or whose setting has a value at the edge of those tried."""
    lines = []
    for partition, rows in blocks.items():
        for row in rows:
            where = ", ".join(filter(None, (partition, row["name"])))
            if row.get("remark"):
                lines.append(f"{where}: {row['remark']}")
            if keys := row.get("at_edge"):
                which = setting_text({key: row["setting"][key] for key in keys})
                several = (
                    "its range; consider widening it" if len(keys) == 1 else "their ranges; consider widening them"
                )
                lines.append(f"{where}: {which} chosen at the edge of {several}")
    return lines


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
    interval = row["difference"]
    if interval["mean"] is None:
        return "no common seed"
    text = f"{interval['mean']:+.4f}"
    if interval["low"] is None:
        return f"{text} (one common seed)"
    pairs = f" ({interval['pairs']} seeds)" if interval["pairs"] < row["runs"] else ""
    return f"{text} [{interval['low']:+.4f}, {interval['high']:+.4f}]{pairs}"


def setting_text(setting: Mapping[str, Any]) -> str:
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
    differences = [paired(_by_seed(row), ahead) for row in rows]
    return [
        row
        for row, interval in zip(rows, differences, strict=True)
        if row is leader or (not row["lost"] and interval.low <= 0 <= interval.high)
    ]


def _by_seed(row: Figures) -> dict[int, float]:
    return average_by_seed(row["seeds"], [math.nan if value is None else value for value in row["values"]])


def best(rows: Sequence[Figures], lower: bool) -> Figures | None:
    """The row with the best mean, of those without a lost run; None if there is only one row."""
    sound = [row for row in rows if row["mean"] is not None and not row["lost"]]
    sign = 1 if lower else -1
    return min(sound, key=lambda row: sign * row["mean"]) if len(rows) > 1 and sound else None


def rich_table(blocks: Blocks, comparison: Comparison) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown = columns(blocks, comparison)
    table.add_column("")
    for column in shown:
        widest = max(len(column.cell(row)) for rows in blocks.values() for row in rows)  # headers may wrap, cells not
        table.add_column(column.header, justify="left" if column.header == "setting" else "right", min_width=widest)
    for name, rows in blocks.items():
        if name:
            table.add_row(Text(name, "bold"))
        for row in rows:
            table.add_row(f"{'  ' if name else ''}{row['name']}", *(column.cell(row) for column in shown))
    return table


def markdown(blocks: Blocks, comparison: Comparison) -> str:
    """A Markdown table; **bold** are the `leaders` of a block."""
    shown = columns(blocks, comparison)
    named = any(blocks)
    lines = [_line([*(["partition"] if named else []), "method" if named else "", *(c.header for c in shown)])]
    lines.append("|" + "---|" * (1 + named) + "---:|" * len(shown))
    for name, rows in blocks.items():
        leading = leaders(rows, comparison.lower)
        for row in rows:
            cells = [column.cell(row) for column in shown]
            cells[1] = f"**{cells[1]}**" if row in leading else cells[1]
            lines.append(_line([*([name] if named else []), row["name"], *cells]))
    below = "".join(f"\n- {one_line(note)}" for note in notes(blocks))
    return "\n".join(lines) + "\n" + (f"{below}\n" if below else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(one_line(cell).replace("|", r"\|") for cell in cells) + " |"


def one_line(text: str) -> str:
    """Text without control characters and ends of lines, after which it would be no cell or comment any more."""
    return " ".join(printable(text).splitlines())


def latex(blocks: Blocks, comparison: Comparison) -> str:
    r"""A `tabular` for booktabs, to be put into a `table` or `table*`; bold are the `leaders` of a block."""
    shown = [column for column in columns(blocks, comparison) if column.printed]
    lines = [
        r"% Needs \usepackage{booktabs}. Mean ± standard deviation over seeds. Bold: the best mean, and every mean",
        "% whose difference to it, paired by seed, has a 95% confidence interval that contains 0.",
        *(f"% {one_line(note)}" for note in notes(blocks)),
        rf"\begin{{tabular}}{{@{{}}l{'r' * len(shown)}@{{}}}}",
        r"\toprule",
        " & ".join(["", *(_two_line_header(column.header) for column in shown)]) + r" \\",
    ]
    main = [column.header for column in shown].index(columns(blocks, comparison)[1].header)
    for name, rows in blocks.items():
        lines.append(r"\midrule")
        if name:
            lines.append(rf"\multicolumn{{{1 + len(shown)}}}{{@{{}}l}}{{\emph{{{escape_latex(name)}}}}} \\")
        leading = leaders(rows, comparison.lower)
        for row in rows:
            cells = [escape_latex(column.cell(row)) for column in shown]
            cells[main] = rf"\textbf{{{cells[main]}}}" if row in leading else cells[main]
            lines.append(" & ".join([_first_cell(escape_latex(row["name"])), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _first_cell(cell: str) -> str:
    r"""The first cell of a row. After \\ and \midrule, a star or a bracket would be taken for an argument of these."""
    return f"{{}}{cell}" if cell.lstrip().startswith(("[", "*")) else cell


def _two_line_header(header: str) -> str:
    """A header over two lines, where it is long: as wide as its figures."""
    words = header.split()
    if len(header) < 16:
        return escape_latex(header)
    cut = min(range(1, len(words)), key=lambda i: abs(len(" ".join(words[:i])) - len(" ".join(words[i:]))))
    above, below = (escape_latex(" ".join(part)) for part in (words[:cut], words[cut:]))
    return rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{above}\\{{}}{below}\end{{tabular}}"


SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """Text for LaTeX; a minus or plus before a number becomes mathematics."""
    plain = "".join(SPECIAL.get(letter, letter) for letter in one_line(text))
    return re.sub(r"(?<![\w.])([+-])(?=\d)", r"$\1$", plain)


def csv_text(blocks: Blocks) -> str:
    """Every number, one line per group. Lists, such as the figures by seed, are separated by spaces."""
    rows = [({"partition": name} if name else {}) | _flatten(row) for name, own in blocks.items() for row in own]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _defuse_formula(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _flatten(row: Figures) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("counted", "tried", "remark"):
            continue
        if key == "setting":
            flat[key] = setting_text(value)
        elif isinstance(value, dict):
            flat |= {f"{key}_{inner}": number for inner, number in value.items()}
        else:
            flat[key] = " ".join("nan" if x is None else str(x) for x in value) if isinstance(value, list) else value
    return flat


FORMULAS = tuple("=+-@＝＋－＠")
"""What formulas begin with in spreadsheets, also in those for scripts with wide letters."""


def _defuse_formula(value: Any) -> Any:
    """A cell of text that spreadsheets show. One that begins like a formula would be computed, and may do harm."""
    if not isinstance(value, str) or _is_numbers(value):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(FORMULAS) else text


def _is_numbers(text: str) -> bool:
    """Whether these are numbers, separated by spaces."""
    try:
        return [float(word) for word in text.split()] != []
    except ValueError:
        return False
