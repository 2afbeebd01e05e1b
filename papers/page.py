"""Writes `docs/papers.md` and a page per paper, in `docs/papers/`, from the results."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from papers import catalogue, drawings, paired, readings, verdict
from papers.catalogue import Cell, Figure, Paper, Table
from papers.comparison import NOT_RUN, QUICK, lines_of, ours_of, seeds_of, shown_variant
from papers.paired import over_seeds
from papers.readings import chosen_variant, find
from papers.results import DEFAULT, Result, Results
from papers.verdict import Verdict, judge
from undrift.errors import UndriftError, unknown
from undrift.files import read_text, write_text

FINDINGS = catalogue.FOLDER / "findings.md"
NOT_JUDGED = "not judged yet"
CLAIM = ["claim", "verdict", "by how much", "last fifth, paired", "seeds", "evidence"]


@dataclass(frozen=True)
class Place:
    """Where the pages are: the targets of their links."""

    results: str = f"../{DEFAULT.as_posix()}"
    """The results, from the overview."""
    name: str = "papers"
    """The overview's name without its ending, which is also that of the folder with the papers' pages."""

    @property
    def findings(self) -> str:
        """Return the page of findings, from the overview."""
        return f"{self.name}/findings.md"

    def page(self, paper: str) -> str:
        """Return a paper's page, from the overview."""
        return f"{self.name}/{catalogue.slug(paper)}.md"


def pages(results_folder: Path, quick: bool = False, place: Place | None = None) -> dict[str, str]:
    """The pages for the results in a folder.

    Args:
        results_folder: A folder with one JSON file per run.
        quick: Whether these are results of scaled-down runs.
        place: The targets of links; by default those of `docs/papers.md`.

    Returns:
        Markdown, by the file's path from the overview, which comes first.

    Raises:
        UndriftError: If the folder has both scaled-down and full results, or not the kind that `quick` says.
    """
    results, place = Results(results_folder), place or Place()
    _check_kind(results, quick)
    papers = list(catalogue.papers(quick).values())
    overview = [
        *_opening(papers, results, quick, place),
        *_rule(),
        *_cost(papers, results, place),
        *_strays(papers, results, place),
    ]
    found = {f"{place.name}.md": overview}
    for paper in papers:
        found[place.page(paper.name)] = list(_paper(paper, results, Place(f"../{place.results}", place.name), quick))
    if FINDINGS.exists() and not quick:
        found[place.findings] = [read_text(FINDINGS).strip().replace("../papers.md", f"../{place.name}.md")]
    return {name: "\n\n".join(parts) + "\n" for name, parts in found.items()}


def write(results_folder: Path, file: Path, quick: bool = False) -> list[Path]:
    """Write the overview and, into a folder of its name, the papers' pages and drawings. Returns all files."""
    links = Path(os.path.relpath(results_folder, file.parent)).as_posix()
    texts = pages(results_folder, quick, Place(links, file.stem))
    results, written = Results(results_folder), [file, *(file.parent / name for name in list(texts)[1:])]
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for table in catalogue.select(quick=quick):
        if drawings.drawable(table, results):
            written.append(folder / _drawing_name(table))
            drawings.draw(table, results, written[-1])
    for target, text in zip(written, texts.values(), strict=False):
        write_text(target, text)
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


def _opening(papers: list[Paper], results: Results, quick: bool, place: Place) -> Iterator[str]:
    yield "# Published results, reproduced"
    if quick:
        yield f"**{QUICK}.**"
    flag = " --quick" if quick else ""
    yield (
        "The tables and figures of the papers below, run again with undrift, beside the published numbers. "
        f"`undrift reproduce all{flag}` runs every experiment and writes one JSON file per run; "
        f"`undrift reproduce{flag} --page docs/papers.md` writes this page and those of the papers from these files, "
        "and no number in their tables is typed by hand. The experiments and the published numbers are in "
        "`papers/experiments/*.toml`, which lists every run before it starts. A run that "
        "has not finished is shown as such."
    )
    if FINDINGS.exists() and not quick:
        yield f"[Findings]({place.findings}) says what held, what did not and what to know, half a screen per paper."
    links = [[f"[{_escape(paper.title)}]({place.page(paper.name)})", _runs_of(paper, results)] for paper in papers]
    yield _markdown(["paper", "runs finished"], links)
    chosen = [(paper, claim) for paper in papers for claim in paper.claims if claim.get("headline")]
    if chosen:
        yield _markdown(["paper", *CLAIM], [_claim_cells(paper, claim, results, place) for paper, claim in chosen])
        yield (
            "A positive amount is a difference in the claimed direction: the mean over the columns, with the smallest "
            "and the largest. "
        )
        yield f"*Last fifth, paired* is beside the verdict, not part of it. {_paired()}"


def _claim_cells(paper: Paper, claim: verdict.Claim, results: Results, overview: Place | None = None) -> list[str]:
    """The cells of a claim on its paper's page or, with the paper's name before them, on the overview."""
    table = _claimed(paper, claim)
    found = judge(claim, table, results)
    link = _link(table, overview)
    first = [f"[{_escape(paper.title)}]({overview.page(paper.name)})"] if overview else []
    late = verdict.late(found.columns, find(table, claim["figure"])) if "better" in claim else ""
    return [*first, _escape(claim["text"]), _words(found, table), _escape(found.amount), late, found.seeds, link]


def _link(table: Table, overview: Place | None = None) -> str:
    """A link to a table, from its paper's page or from the overview."""
    return f"[{_label(table)}]({overview.page(table.paper) if overview else ''}#{_anchor(table)})"


def _runs_of(paper: Paper, results: Results) -> str:
    """How many of a paper's runs have finished. One that several tables share counts once."""
    every = [cell for table in paper.tables.values() for cell in _planned(table, results)]
    return _finished(list({cell.digest: cell for cell in every}.values()), results)


def _finished(cells: list[Cell], results: Results) -> str:
    """How many of these runs have finished: "36 of 60"."""
    return f"{sum(results.get(cell) is not None for cell in cells)} of {len(cells)}"


def _paired() -> str:
    return " ".join((paired.__doc__ or "").partition("\n\n")[2].split())


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


def _cost(papers: list[Paper], results: Results, place: Place) -> Iterator[str]:
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
            finished = _finished(cells, results)
            lines.append([_escape(paper.title), _link(table, place), finished, _minutes(spent), precision])
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
    yield f"# Paper {paper.number}: {paper.title}"
    yield f"{_runs_of(paper, results)} runs have finished. [All papers, and the rule for claims](../{place.name}.md)."
    reading = catalogue.FOLDER / f"{paper.name}.md"
    if reading.exists() and not quick:
        yield reading.read_text(encoding="utf-8").strip()
    if paper.claims:
        yield _markdown(CLAIM, [_claim_cells(paper, claim, results) for claim in paper.claims])
    for table in paper.tables.values():
        yield from _table(paper, table, results, place)


def _table(paper: Paper, table: Table, results: Results, place: Place) -> Iterator[str]:
    cells = _planned(table, results)
    yield f'## <a id="{_anchor(table)}"></a>{table.title} ({_finished(cells, results)} runs)'
    if readings.quick(table):
        yield f"**{QUICK}.**"
    if table.note:
        yield table.note
    yield from _standins(table)
    if not any(results.get(cell) for cell in cells):
        yield f"Not run: none of the {len(cells)} runs has finished." if len(cells) > 1 else "Not run."
    else:
        yield from _variants(table, results, place)
        yield _comparison(table, results, place)
        if drawings.drawable(table, results):
            yield f"![{_escape(table.title)}]({_drawing_name(table)})"
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
        late = verdict.estimate(over_seeds(column.late), which)
        late += f" ({', '.join(verdict.estimate(one, which) for one in column.late)})" if len(column.late) > 1 else ""
        state = column.state or NOT_JUDGED
        lines.append([_escape(column.name), mean, each, late, expected, state, column.note])
    head = ["setting", "difference", "by seed", "last fifth, paired (by seed)", "published difference", "verdict", ""]
    yield _markdown(head, lines)


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
