"""References: every method names its paper, the page is made from the BibTeX file, and docstrings' examples run."""

from __future__ import annotations

import doctest
import inspect
import operator
import re
import sys

import pytest

import undrift as ud
from scripts import catalogue, references
from tests.pages import DOCS
from undrift.method.parse import as_method
from undrift.methods.server import ServerOptimizer

ENTRIES = references.read()
PAPERS = references.by_class(ENTRIES)
OURS = sorted(name for name in PAPERS if ":" not in name)
SHOWN = sorted(name for name in PAPERS if ":" in name)
MEASURED = {e.partition("(")[0]: e for group in catalogue.METHODS.values() for e in group}


def test_entries_are_complete_and_keys_are_unique():
    keys = [entry.key for entry in ENTRIES]
    assert len(keys) == len(set(keys)) > 30
    for entry in ENTRIES:
        assert {"author", "title", "year"} <= entry.fields.keys() and entry.section, entry.key
        assert re.search(rf"{entry.fields['year']}(?!\d)", entry.key), f"{entry.key} is of {entry.fields['year']}"
        assert re.fullmatch(r"https://(arxiv\.org/abs/\d{4}\.\d{4,5}|doi\.org/10\.\S+)", entry.fields.get("url", URL))
    assert [entry.fields["paper"] for entry in ENTRIES if "paper" in entry.fields] == PUBLISHED


URL = "https://arxiv.org/abs/0000.00000"
"""Stands for an address that is not known."""
PUBLISHED = ["2d-lrd", "k-decay", "four-techniques", "fednlr", "temporal-targets"]


@pytest.mark.parametrize("line", ["author = {A}", "  year = 2020,", "@misc{a b,", '  title = "T",'])
def test_what_the_reader_of_bibtex_cannot_read_is_an_error(line, tmp_path):
    (tmp_path / "some.bib").write_text(f"@misc{{a2020,\n{line}\n}}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        references.read(tmp_path / "some.bib")


def test_the_page_of_references_is_up_to_date():
    assert (DOCS / "references.md").read_text(encoding="utf-8") == references.page(ENTRIES), (
        "run python -m scripts.references --write docs/references.md"
    )


def test_every_method_has_a_paper_and_every_paper_names_what_exists():
    assert ud.METHODS.keys() | {"TemporalEnsemble"} <= PAPERS.keys()
    assert set(OURS) <= set(ud.__all__)
    for name in SHOWN:
        page, _, shown = name.partition(":")
        assert f"class {shown}(" in (DOCS / page).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", OURS)
def test_a_docstring_names_the_authors_title_and_year_of_its_paper(name):
    text, entry = " ".join((inspect.getdoc(getattr(ud, name)) or "").split()), PAPERS[name]
    cited = text.partition(f"*{entry.fields['title']}*")[0]
    assert cited != text and f"*{entry.fields['title']}* ({entry.fields['year']})" in text
    *most, last = entry.families
    every = f"{', '.join(most)} and {last}, " if most else f"{last}, "
    assert cited.endswith((every, f"{entry.families[0]} et al., ")), f"{name}: {cited[-120:]!r}"


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_a_docstring_says_what_the_method_cannot_be_combined_with(name):
    paragraphs = (inspect.getdoc(getattr(ud, name)) or "").split("\n\n")
    said = " ".join(p for p in paragraphs if re.match("Cannot be combined with", p))
    found = catalogue.contradictions(as_method(MEASURED[name]).parts[0])
    if "another server optimizer" in said:
        found = [other for other in found if not issubclass(getattr(ud, other), ServerOptimizer)]
    assert all(f"`{other}`" in said for other in found), (found, said)
    named = set(re.findall(r"`(\w+)`", said)) & ud.METHODS.keys()
    assert named == set(found)


def test_the_page_of_methods_has_every_part_and_nothing_else():
    parts = ud.METHODS.keys() | ud.PARTS.keys() | {"TemporalEnsemble"}
    assert catalogue.ABOUT.keys() == parts
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    assert all(text.count(f"\n### {name}\n") == 1 for name in parts)


GIVEN = {"Client", "Batch", "Plan", "Server", "Totals"}
"""What hooks are given: their fields are documented one by one, and docs/hooks.md has the examples."""
MORE = ["Method", "Part", "Faults", "batches", *(f"random.{f}" for f in ("bits", "uniform", "normal", "keep_mask"))]


@pytest.mark.parametrize("name", [*ud.METHODS, *ud.PARTS, "TemporalEnsemble", *MORE])
def test_the_example_in_a_docstring_runs(name):
    thing = operator.attrgetter(name)(ud)
    module = sys.modules[thing.__module__]
    (example,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=module)
    assert example.examples and doctest.DocTestRunner(verbose=False).run(example).failed == 0


METHODS_TOO = (
    *(f"FederatedDataset.{name}" for name in ("from_clients", "label_counts")),
    *(f"Result.{name}" for name in ("own_params", "frame")),
    *(f"Client.{name}" for name in ("gradient", "gradients", "shared")),
    *(f"Optimizer.{name}" for name in ("carry", "step")),
    "models.get",
)


@pytest.mark.parametrize(
    "name", [*sorted(set(ud._PUBLIC) - GIVEN - {"FederatedDataset", "Result"}), *METHODS_TOO, *MORE]
)
def test_a_docstring_has_every_argument_and_what_a_function_returns(name):
    thing = operator.attrgetter(name)(ud)
    text = inspect.getdoc(thing) or ""
    if name not in ("Number", "UndriftError", "Part", "Optimizer"):
        arguments = inspect.signature(thing).parameters.keys() - {"self"}
        assert not [a for a in arguments if not re.search(rf"^ +\**{a}: ", text, re.M)]
    if not isinstance(thing, type) and inspect.signature(thing).return_annotation not in (None, "None"):
        assert "\n\nReturns:\n    " in text


def test_every_public_name_has_a_one_line_summary_and_an_example():
    for name in set(ud._PUBLIC) - GIVEN:
        text = inspect.getdoc(getattr(ud, name)) or ""
        summary, _, rest = text.partition("\n\n")
        assert "\n" not in summary and summary.endswith("."), f"{name}: {summary!r}"
        assert "Example:\n    >>> " in rest, name
