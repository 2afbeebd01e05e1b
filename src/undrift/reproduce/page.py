"""Writes `docs/papers.md` from the results."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from undrift.errors import UndriftError, unknown
from undrift.files import write_text
from undrift.reproduce import catalogue, drawings, readings, verdict
from undrift.reproduce.catalogue import Cell, Figure, Paper, Table
from undrift.reproduce.comparison import NOT_RUN, QUICK, lines_of, ours_of, seeds_of, shown_variant
from undrift.reproduce.readings import chosen_variant, find
from undrift.reproduce.results import DEFAULT, Result, Results
from undrift.reproduce.verdict import Verdict, judge

NOT_JUDGED = "not judged yet"


@dataclass(frozen=True)
class Place:
    """The targets of the page's links, relative to the page."""

    results: str = f"../{DEFAULT.as_posix()}"
    drawings: str = "papers"


def page(results_folder: Path, quick: bool = False, place: Place | None = None) -> str:
    """The page for the results in a folder.

    Args:
        results_folder: A folder with one JSON file per run.
        quick: Whether these are results of scaled-down runs.
        place: The targets of links; by default those of `docs/papers.md`.

    Returns:
        Markdown.

    Raises:
        UndriftError: If the folder has both scaled-down and full results, or not the kind that `quick` says.
    """
    results = Results(results_folder)
    _check_kind(results, quick)
    papers = list(catalogue.papers(quick).values())
    place = place or Place()
    parts = [
        *_opening(papers, results, quick),
        *_rule(),
        *_cost(papers, results),
        *(part for paper in papers for part in _paper(paper, results, place, quick)),
        *_strays(papers, results, place),
    ]
    return "\n\n".join(parts) + "\n"


def write(results_folder: Path, file: Path, quick: bool = False) -> list[Path]:
    """Write the page, and its drawings into a folder of the same name next to it. Returns all files."""
    links = Path(os.path.relpath(results_folder, file.parent)).as_posix()
    text = page(results_folder, quick, Place(links, file.stem))
    results, written = Results(results_folder), [file]
    for table in catalogue.select(quick=quick):
        if drawings.drawable(table, results):
            written.append(file.with_suffix("") / _drawing_name(table))
            drawings.draw(table, results, written[-1])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    return written


def _check_kind(results: Results, quick: bool) -> None:
    kinds = {bool(result.get("quick")) for result in results.by_digest.values()}
    if len(kinds) == 2:
        raise UndriftError(
            f"{results.folder} has both scaled-down and full results, but a page shows one kind; separate them."
        )
    if kinds == {not quick}:
        held, asked = ("full", "scaled-down") if quick else ("scaled-down", "full")
        raise UndriftError(f"{results.folder} has {held} results, but {asked} ones are asked for.")


# ------------------------------------------------------------------------------------------------- the page's opening


def _opening(papers: list[Paper], results: Results, quick: bool) -> Iterator[str]:
    yield "# Published results, reproduced"
    if quick:
        yield f"**{QUICK}.**"
    flag = " --quick" if quick else ""
    yield (
        "The tables and figures of the papers below, run again with undrift, beside the published numbers. "
        f"`undrift reproduce all{flag}` runs every experiment and writes one JSON file per run; "
        f"`undrift reproduce{flag} --page docs/papers.md` writes this page from those files, and no number in its "
        "tables is typed by hand. The experiments and the published numbers are in "
        "`src/undrift/reproduce/papers/*.toml`, which lists every run before it starts. A run that "
        "has not finished is shown as such."
    )
    chosen = [(paper, claim) for paper in papers for claim in paper.claims if claim.get("headline")]
    if chosen:
        head = ["paper", "claim", "verdict", "by how much", "seeds", "evidence"]
        yield _markdown(head, [_claim_cells(paper, claim, results, True) for paper, claim in chosen])
        yield (
            "A positive amount is a difference in the claimed direction: the mean over the columns, with the smallest "
            "and the largest."
        )


def _claim_cells(paper: Paper, claim: verdict.Claim, results: Results, named: bool) -> list[str]:
    table = _claimed(paper, claim)
    found = judge(claim, table, results)
    link = f"[{_label(table)}](#{_anchor(table)})"
    first = [f"[{_escape(paper.title)}](#{catalogue.slug(paper.name)})"] if named else []
    return [*first, _escape(claim["text"]), _words(found, table), _escape(found.amount), found.seeds, link]


def _claimed(paper: Paper, claim: verdict.Claim) -> Table:
    if claim["table"] not in paper.tables:
        raise unknown(f"table of {paper.name}", claim["table"], paper.tables)
    return paper.tables[claim["table"]]


def _words(found: Verdict, table: Table) -> str:
    words = f"**{found.words}**" if found.judged else found.words
    return f"QUICK: {words}" if readings.quick(table) and found.judged else words


def _rule() -> Iterator[str]:
    yield "## The rule"
    yield (verdict.__doc__ or "").partition("\n\n")[2].strip()


def _cost(papers: list[Paper], results: Results) -> Iterator[str]:
    """What was run, by table. The time of a run that several tables share is counted in the first."""
    yield "## What was run"
    counted: set[str] = set()
    total: dict[str, float] = {}
    lines = []
    all_done = all_cells = 0
    for paper in papers:
        for table in paper.tables.values():
            cells = _planned(table, results)
            done = [result for cell in cells if (result := results.get(cell)) is not None]
            spent: dict[str, float] = {}
            for result in done:
                if result["digest"] not in counted:
                    counted.add(result["digest"])
                    where = str(result.get("hardware", "unknown"))
                    spent[where] = spent.get(where, 0.0) + result.get("seconds", 0.0) * result.get("share", 1.0)
            total = {where: total.get(where, 0.0) + spent.get(where, 0.0) for where in [*total, *spent]}
            precision = ", ".join(sorted({str(result["precision"]) for result in done if result.get("precision")}))
            all_done, all_cells = all_done + len(done), all_cells + len(cells)
            link = f"[{_label(table)}](#{_anchor(table)})"
            lines.append([_escape(paper.title), link, f"{len(done)} of {len(cells)}", _minutes(spent), precision])
    lines.append(["all", "", f"{all_done} of {all_cells}", _minutes(total), ""])
    yield _markdown(["paper", "table", "runs finished", "minutes", "precision"], lines)
    yield (
        "Tables that have the same run share its result; its minutes count once, in the first of them. On a GPU, runs "
        "that go side by side count with their share of it. "
        "Of a table with variants, the runs of the variant that it uses count, and any other that has finished."
    )


def _planned(table: Table, results: Results) -> list[Cell]:
    shown = shown_variant(table, results)
    return [cell for cell in table.cells if cell.variant == shown or results.get(cell) is not None]


def _minutes(spent: dict[str, float]) -> str:
    return ", ".join(f"{seconds / 60:.1f} ({where})" for where, seconds in sorted(spent.items()))


# ------------------------------------------------------------------------------------------------ papers and tables


def _paper(paper: Paper, results: Results, place: Place, quick: bool) -> Iterator[str]:
    yield f'## <a id="{catalogue.slug(paper.name)}"></a>Paper {paper.number}: {paper.title}'
    reading = catalogue.FOLDER / f"{paper.name}.md"
    if reading.exists() and not quick:
        yield reading.read_text(encoding="utf-8").strip()
    if paper.claims:
        head = ["claim", "verdict", "by how much", "seeds", "evidence"]
        yield _markdown(head, [_claim_cells(paper, claim, results, False) for claim in paper.claims])
    for table in paper.tables.values():
        yield from _table(paper, table, results, place)


def _table(paper: Paper, table: Table, results: Results, place: Place) -> Iterator[str]:
    yield f'### <a id="{_anchor(table)}"></a>{table.title}'
    if readings.quick(table):
        yield f"**{QUICK}.**"
    if table.note:
        yield table.note
    yield from _standins(table)
    cells = _planned(table, results)
    if not any(results.get(cell) for cell in cells):
        yield f"Not run: none of the {len(cells)} runs has finished." if len(cells) > 1 else "Not run."
    else:
        yield from _variants(table, results, place)
        yield _comparison(table, results, place)
        if drawings.drawable(table, results):
            yield f"![{_escape(table.title)}]({place.drawings}/{_drawing_name(table)})"
        for claim in paper.claims:
            if claim["table"] == table.name:
                yield from _details(claim, table, results)
    yield _command(table)


def _standins(table: Table) -> Iterator[str]:
    for text in dict.fromkeys(table.standins.values()):
        columns = [column for column, standin in table.standins.items() if standin == text]
        where = f" ({_escape(', '.join(columns))})" if len(columns) < len(table.columns) else ""
        yield f"**Stand-in for the paper's data**{where}: {text.rstrip('.')}."


def _variants(table: Table, results: Results, place: Place) -> Iterator[str]:
    """The calibration runs of all variants, and the variant that they select."""
    calibration = table.calibration
    if not table.variants or calibration is None:
        return
    which, column = find(table, calibration["figure"]), calibration.get("column", table.columns[0])
    lines = []
    for variant in table.variants:
        cells = table.at(column, calibration["row"], variant)
        found = readings.calibrated(table, variant, results)
        runs = [run for cell in cells if (run := results.get(cell)) is not None]
        ours = ours_of(which, found, bool(runs))
        lines.append([_escape(variant), ours, seeds_of(found.seeds, len(cells)), _evidence(runs, place)])
    where = ", ".join(word for word in (calibration["row"], column) if word)
    yield f"The paper leaves settings open. Variants are tried in this order, by the {which.name} of {_escape(where)}:"
    yield _markdown(["variant", which.name, "seeds", "evidence"], lines)
    yield _choice(table, which, results)
    others = [run for cell in table.cells if _unused(table, cell, column, results) and (run := results.get(cell))]
    if others:
        yield f"Other runs of variants that are not used: {_evidence(others, place, by_cell=True)}."


def _unused(table: Table, cell: Cell, column: str, results: Results) -> bool:
    assert table.calibration is not None
    calibrates = (cell.column, cell.row) == (column, table.calibration["row"])
    return cell.variant != shown_variant(table, results) and not calibrates


def _choice(table: Table, which: Figure, results: Results) -> str:
    calibration, chosen = table.calibration, chosen_variant(table, results)
    assert calibration is not None
    target = f"{calibration['reaches']:.{which.digits}f}"
    if chosen is None:
        shown = _escape(table.variants[0])
        return f"No variant is chosen yet, as runs are missing; the table is that of the first, {shown}."
    value = readings.calibrated(table, chosen, results).mean
    sign = -1 if which.lower else 1
    if value is not None and sign * value >= sign * calibration["reaches"]:
        return f"**{_escape(chosen)}** is used: the first that reaches {target}."
    return f"**{_escape(chosen)}** is used: none reaches {target}, and it comes nearest."


def _comparison(table: Table, results: Results, place: Place) -> str:
    """Published numbers and ours, one line per column, row and figure; a column without any run has one line."""
    lines = list(lines_of(table, results))
    idle = set(table.columns) - {line.column for line in lines if line.runs} if len(table.rows) > 1 else set()
    settings, several = table.columns != [""], len(table.figures) > 1
    head = [*(["setting"] if settings else []), "method", *(["figure"] if several else [])]
    head += ["data", "published", "ours", "difference", "seeds", "evidence"]
    cells = []
    before: tuple[str, str] | None = None
    for line in lines:
        new_column, new_row = before is None or before[0] != line.column, before != (line.column, line.row)
        before = (line.column, line.row)
        rest = [line.data, line.published, line.ours, line.difference, line.seeds]
        method = line.row
        if line.column in idle:
            if not new_column:
                continue
            runs = sum(len(table.at(line.column, row, shown_variant(table, results))) for row in table.rows)
            method, rest = f"all {len(table.rows)}", [line.data, "", NOT_RUN, "", f"0 of {runs} runs"]
        first = [_escape(line.column) if new_column else ""] if settings else []
        first += [_escape(method) if new_row else ""]
        first += [line.figure if line.column not in idle else ""] if several else []
        cells.append([*first, *rest, _evidence(line.runs, place) if new_row else ""])
    return _markdown(head, cells)


def _evidence(runs: Iterable[Result], place: Place, by_cell: bool = False) -> str:
    """Links to runs' files, named by their seeds."""
    return " ".join(
        f"[{run['cell'] if by_cell else 'seed ' + str(run['seed'])}]({place.results}/{run['file']})" for run in runs
    )


def _details(claim: verdict.Claim, table: Table, results: Results) -> Iterator[str]:
    """How a claim was judged, column by column."""
    found = judge(claim, table, results)
    if not found.judged:
        return
    yield f"*{_escape(claim['text'])}*: {_words(found, table)} ({_escape(found.amount)})."
    seen = [column for column in found.columns if column.seeds]
    if "equal" in claim:
        lines = [[_escape(column.name), column.state or NOT_JUDGED, column.note] for column in seen]
        yield _markdown(["number", "verdict", ""], lines)
        return
    which, better = find(table, claim["figure"]), "better" in claim
    lines = []
    for column in seen:
        each = ", ".join(verdict.difference(d, which, claim) for d in column.each)
        expected = verdict.difference(column.published, which, claim) if better else ""
        mean = verdict.difference(column.difference, which, claim)
        lines.append([_escape(column.name), mean, each, expected, column.state or NOT_JUDGED, column.note])
    yield _markdown(["setting", "difference", "by seed", "published difference", "verdict", ""], lines)


def _command(table: Table) -> str:
    flag = " --quick" if readings.quick(table) else ""
    command = html.escape(f"undrift reproduce {table.paper} --table {table.name}{flag}")
    return f"<details><summary>Command</summary><pre><code>{command}</code></pre></details>"


def _strays(papers: list[Paper], results: Results, place: Place) -> Iterator[str]:
    """Results of experiments that are no longer in the papers' files, so that none disappears."""
    known = {cell.digest for paper in papers for table in paper.tables.values() for cell in table.cells}
    strays = [result for digest, result in results.by_digest.items() if digest not in known]
    if strays:
        yield "## Runs that belong to no table"
        yield "The settings of these runs are no longer in the papers' files."
        strays.sort(key=lambda result: str(result["file"]))
        yield "\n".join(f"- [{_escape(result['cell'])}]({place.results}/{result['file']})" for result in strays)


# ------------------------------------------------------------------------------------------------------------- texts


def _anchor(table: Table) -> str:
    return catalogue.slug(f"{table.paper}-{table.name}")


def _drawing_name(table: Table) -> str:
    return f"{_anchor(table)}.svg"


def _label(table: Table) -> str:
    """The paper's name for the table, with which its title begins."""
    return _escape(table.title.partition(":")[0])


def _escape(text: str) -> str:
    """Text with Markdown's special characters escaped, also for use in a table."""
    for mark in ("\\", "|", "*", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;").replace("\n", " ")


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, without empty columns."""
    kept = [i for i in range(len(head)) if any(line[i] for line in lines)]
    rows = [[head[i] for i in kept], ["---" for _ in kept], *([line[i] for i in kept] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
