"""The papers behind undrift: reads docs/references.bib and writes the page of references from it.

    python -m scripts.references --write docs/references.md

The file is ordinary BibTeX with three fields of our own: `undrift`, the classes that implement the paper, `paper`, its
name in `undrift reproduce`, and `about`, a remark. A comment such as `% ---- Methods ---` starts a section of the page.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import undrift as ud

FILE = Path(__file__).parent.parent / "docs" / "references.bib"
OWN = ("undrift", "paper", "about")
"""Fields of our own, which the BibTeX on the page leaves out."""
NAMES = {
    "Scaffold": "SCAFFOLD",
    "TwoDLRD": "2D-LRD",
    "AllDecreasing": "AD",
    "AdditiveTuning": "AT",
}
"""What the literature calls a method whose class has another name."""


@dataclass(frozen=True)
class Entry:
    """One entry of the BibTeX file."""

    kind: str
    key: str
    section: str
    fields: dict[str, str]

    @property
    def authors(self) -> list[tuple[str, str]]:
        """The authors as pairs of a family name and given names; `others` stands for those who are not listed."""
        names = (name.strip() for name in self.fields["author"].split(" and "))
        return [(family, given) for family, _, given in (name.partition(", ") for name in names)]

    @property
    def families(self) -> list[str]:
        return [family for family, _ in self.authors]

    @property
    def classes(self) -> list[str]:
        """The classes that implement the paper: names in `undrift`, or `page.md:Name` for an example on a page."""
        return [name.strip() for name in self.fields.get("undrift", "").split(",") if name.strip()]

    @property
    def short(self) -> str:
        """The reference as it stands in a sentence, such as `Zhu and Ye, 2021`."""
        names = [name for name in self.families if name != "others"]
        who = " and ".join(names) if len(self.families) < 3 and "others" not in self.families else f"{names[0]} et al."
        return f"{who}, {self.fields['year']}"

    @property
    def venue(self) -> str:
        """Where it was published: the short form in parentheses if the field has one, else arXiv, else nothing."""
        place = self.fields.get("booktitle") or self.fields.get("journal") or ""
        short = re.search(r"\((\w+)\)$", place)
        place = short[1] if short else place
        return place or ("arXiv" if "arxiv.org" in self.fields.get("url", "") else "")

    @property
    def link(self) -> str:
        """`Zhu and Ye, 2021`, linked to the paper, or to the page of references where its address is not known."""
        return f"[{self.short}]({self.fields.get('url', 'references.md')})"

    def bibtex(self) -> str:
        """The entry as BibTeX, without fields of our own."""
        fields = {name: value for name, value in self.fields.items() if name not in OWN}
        width = max(map(len, fields))
        lines = ",\n".join(f"  {name:{width}} = {{{value}}}" for name, value in fields.items())
        return f"@{self.kind}{{{self.key},\n{lines}\n}}"


def read(file: Path = FILE) -> list[Entry]:
    """The entries of a BibTeX file whose values are in braces, one field per line.

    Raises:
        ValueError: If something in the file is neither an entry of this form nor a comment.
    """
    found: list[Entry] = []
    section, entry = "", None
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if title := re.fullmatch(r"% -+ (.+?) -+", line):
            section = title[1]
        elif begin := re.fullmatch(r"@(\w+)\{([\w:-]+),", line):
            entry = Entry(begin[1], begin[2], section, {})
            found.append(entry)
        elif entry and (field := re.fullmatch(r"  (\w+) *= \{(.*)\},?", line)):
            entry.fields[field[1]] = field[2]
        elif line == "}":
            entry = None
        elif line and not line.startswith("%"):
            raise ValueError(f"{file.name}, line {number}: {line!r} is not BibTeX of the form that this reads.")
    return found


def by_class(entries: list[Entry]) -> dict[str, Entry]:
    """The paper of each class."""
    return {name: entry for entry in entries for name in entry.classes}


INTRODUCTION = """# References

The papers behind undrift: its methods, local optimizers and partitions, the methods that the documentation writes as
examples, and what undrift is built on. Each entry names the class that implements it. `BalancedLoss` is the only part
without a paper. The file [references.bib](references.bib) has all entries as BibTeX.

*Generated from that file by `python -m scripts.references --write docs/references.md`.*

## How to cite undrift

Cite undrift as below ([CITATION.cff](../CITATION.cff) has the same for tools that read it), together with the papers of
the methods that you use.

```text
@software{undrift,
  author  = {{The undrift authors}},
  title   = {undrift: federated learning on heterogeneous clients},
  version = {0.1.0},
  license = {Apache-2.0}
}
```"""


def page(entries: list[Entry]) -> str:
    """The page of references, in Markdown."""
    lines = [INTRODUCTION]
    for section in dict.fromkeys(entry.section for entry in entries):
        own = [entry for entry in entries if entry.section == section]
        lines += ["", f"## {section}", "", *map(_line, own)]
        if papers := [entry.bibtex() for entry in own if "paper" in entry.fields]:
            said = "[Papers](papers.md) compares the published results with ours. The same five as BibTeX:"
            lines += ["", said, "", "```text", "\n\n".join(papers), "```"]
    return "\n".join(lines) + "\n"


def _line(entry: Entry) -> str:
    names = ["others" if family == "others" else f"{given} {family}" for family, given in entry.authors]
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    title = f"*{entry.fields['title']}*"
    title = f"[{title}]({entry.fields['url']})" if "url" in entry.fields else title
    when = f"{entry.venue}, {entry.fields['year']}" if entry.venue else entry.fields["year"]
    said = f"- {who.rstrip('.')}. {title}. {when}."
    if entry.classes:
        said += f" In undrift: {', '.join(map(_class, entry.classes))}."
    return f"{said} {entry.fields['about']}." if "about" in entry.fields else said


def _class(name: str) -> str:
    """A link to where the class is described: the page that shows it, the methods page, or the Python reference."""
    where, _, shown = name.rpartition(":")
    if not where:
        where = f"methods.md#{name.lower()}" if name in (*ud.METHODS, "TemporalEnsemble") else "api.md"
    return f"[`{shown}`]({where})" + (f" ({NAMES[name]})" if name in NAMES else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True)
    parser.parse_args().write.write_text(page(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
