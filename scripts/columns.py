"""Writes the tables of the history's columns into the documentation; run `python -m scripts.columns`."""

from __future__ import annotations

from pathlib import Path

from undrift.columns import COLUMNS

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- columns of the history: python -m scripts.columns -->", "<!-- end of columns -->"


def table(page: str) -> str:
    """Return the table of a page's columns, with their equations if they have any."""
    columns = [column for column in COLUMNS.values() if column.page == page]
    defined = any(column.equation for column in columns)
    heads = ["column", "definition", "meaning"] if defined else ["column", "meaning"]
    rows = [[f"`{c.name}`", *([c.equation] if defined else []), c.meaning] for c in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def pages() -> dict[Path, str]:
    """Return the documentation's pages with these tables, by file."""
    texts = {}
    for page in dict.fromkeys(column.page for column in COLUMNS.values()):
        file = DOCS / f"{page}.md"
        before, _, rest = file.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        texts[file] = f"{before}{BEGIN}\n\n{table(page)}\n\n{END}{after}"
    return texts


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
