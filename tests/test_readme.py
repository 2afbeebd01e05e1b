"""The README's code, run as printed, and what pages say about files and names."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

import undrift as ud
from tests.pages import DOCS, ROOT, blocks, check_output, commands, console, python
from undrift import models
from undrift.data import sources
from undrift.tools import config

README = ROOT / "README.md"


def test_the_readmes_python_prints_what_it_shows():
    code, shown = example()
    printed = python(code, {"__name__": "readme"})
    check_output(shown, printed)
    (fedavg, _), (feddyn, _) = headline(printed).values()
    assert feddyn > fedavg > 80


def example() -> tuple[str, str]:
    """The README's Python and what it says that this prints."""
    found = blocks(README)
    (at,) = (i for i, block in enumerate(found) if block.language == "python")
    return found[at].code, found[at + 1].code


def headline(printed: str) -> dict[str, tuple[float, float]]:
    """Accuracy in per cent and its standard deviation, by method."""
    lines = (re.fullmatch(r"(\w+): ([\d.]+) ± ([\d.]+)", line) for line in printed.splitlines())
    return {found[1]: (100 * float(found[2]), 100 * float(found[3])) for found in lines if found}


def test_the_headline_is_the_examples_wherever_it_stands():
    """On the README, on the home page, and in the figure of both."""
    pages = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in (README, DOCS / "index.md")}
    figure = (DOCS / "images" / "undrift.svg").read_text(encoding="utf-8")
    for name, (mean, deviation) in headline(example()[1]).items():
        assert f"<!-- {name}  {mean:.0f}% -->" in figure
        for page, text in pages.items():
            shown = re.search(rf"{name}\b[^0-9.]* ([\d.]+) ± ([\d.]+) %", text)
            assert shown and (shown[1], shown[2]) == (f"{mean:.1f}", f"{deviation:.1f}"), page


def test_the_readme_begins_with_the_commands_that_set_themselves_up():
    first = next(block.code for block in blocks(README) if block.language in ("text", "console"))
    assert [line.split()[:2] for line in first.splitlines()] == [["make", "demo"], ["make", "test"]]
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search("^demo:", targets, re.M) and re.search("^test:", targets, re.M)


@pytest.mark.parametrize("shell", [commands, pytest.param(console, marks=pytest.mark.long)])
def test_the_readmes_commands_run_as_printed(shell, tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    (code,) = (block.code for block in blocks(README) if block.language == "console")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert "best by validation accuracy" in shell(code, tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 1e6


def test_the_readme_compares_methods_on_the_same_seeds_and_learning_rates():
    (code,) = (block.code for block in blocks(README) if block.language == "console")
    (sweep,) = (line for line in code.replace("\\\n", "").splitlines() if " sweep " in line)
    assert "seed" not in sweep and len(re.findall("--grid", sweep)) == 2
    assert set(re.findall(r"seed=(\w+)", example()[0])) == {"seed"} and example()[0].count("seed=") == 2


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def times(name: str) -> dict[str, float]:
    """Milliseconds per round, by side."""
    return {row["side"]: row["ms"] for row in results(name)["rows"]}


def test_the_readmes_figures_are_those_of_the_results():
    text = " ".join(README.read_text(encoding="utf-8").split())
    gpu, cpu, jax = times("pfl"), times("pfl_cpu"), times("fedjax_cpu")
    compiled, eager = gpu["undrift, tf32, compiled"], gpu["undrift, tf32"]
    assert f"takes {compiled:.1f} ms on one H200 in TF32 with `torch.compile`, and {eager:.1f} ms without" in text
    assert f"pfl-research 0.6.0 takes {gpu['pfl 0.6.0, tf32']:.0f} ms in TF32" in text
    assert "two repeats" in text and {len(row["all"]) for row in results("pfl")["rows"]} == {2}
    assert f"undrift takes {cpu['undrift'] / 1e3:.1f} s and pfl {cpu['pfl 0.6.0'] / 1e3:.1f} s" in text
    assert jax["FedJAX 0.0.17"] < jax["undrift"] and "FedJAX is faster" in text
    cells = {cell["name"]: cell for cell in results("troubles")["cells"] if cell["partition"] == "skewed labels"}
    tried = {name: cells[name]["setting"] for name in ("FedAvg", "FedDyn")}
    assert tried == {"FedAvg": {"local.lr": 0.5}, "FedDyn": {"local.lr": 0.5, "alpha": 0.03}}
    assert "(ud.FedAvg(), ud.FedDyn(alpha=0.03))" in example()[0] and "lr=0.5" in example()[0]
    values = {name: cell["values"] for name, cell in cells.items()}
    worse = [n for n, v in values.items() if all(a < b for a, b in zip(v, values["FedAvg"], strict=True))]
    assert sorted(worse) == ["FedLC", "FedNLR"] and "FedLC and FedNLR did worse than FedAvg in every seed" in text
    assert f"undrift has {len(ud.METHODS)} methods" in text


def cell(name: str, side: str, unit: float) -> str:
    """A side's median, fastest and slowest repeat, as the page on other systems writes them."""
    (row,) = (row for row in results(name)["rows"] if row["side"] == side)
    return f"{row['ms'] / unit:.1f} ({min(row['all']) / unit:.1f} – {max(row['all']) / unit:.1f})"


def test_the_speeds_beside_other_systems_are_those_of_the_results():
    text = (DOCS / "why-undrift.md").read_text(encoding="utf-8")
    sides = {
        "pfl-research 0.6.0": "pfl 0.6.0, {}",
        "undrift": "undrift, {}",
        "undrift, `torch.compile`": "undrift, {}, compiled",
    }
    for words, side in sides.items():
        assert f"| {words} | {cell('pfl', side.format('tf32'), 1)} | {cell('pfl', side.format('bf16'), 1)} |" in text
    others = {
        "Flower 1.41.0, two Ray actors": ("flower_cpu", "Flower 1.41.0, 2 at a time"),
        "pfl-research 0.6.0": ("pfl_cpu", "pfl 0.6.0"),
        "FedJAX 0.0.17": ("fedjax_cpu", "FedJAX 0.0.17"),
    }
    for words, (name, side) in others.items():
        assert f"| {words} | {cell(name, side, 1e3)} | {cell(name, 'undrift', 1e3)} |" in text
    ours, jax = times("fedjax_cpu")["undrift"], times("fedjax_cpu")["FedJAX 0.0.17"]
    assert f"FedJAX's median is {100 * (1 - jax / ours):.0f}% lower" in text
    assert f"| methods included | {len(ud.METHODS)} |" in text


def test_the_home_pages_own_method_learns_and_is_short():
    first, second = (block.code for block in blocks(DOCS / "index.md") if block.language == "python")
    names: dict = {"__name__": "index"}
    assert float(python(first, names)) > 0.85
    python(second, names)
    assert names["result"].history[-1]["accuracy"] > 0.3
    own = re.search(r"@dataclass.*?(?=\n\n\nmethod)", second, re.DOTALL).group()
    assert len(own.splitlines()) <= 10


def test_the_home_page_names_every_method_and_model():
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    for name in (*ud.METHODS, *models.MODELS):
        assert f"`{name}`" in page, name


def test_the_example_in_the_page_on_runs_is_an_experiment():
    (code,) = (block.code for block in blocks(DOCS / "runs.md") if block.language == "toml")
    assert config.checked(tomllib.loads(code), "docs/runs.md").local.lr == "decay(0.1, 0.99)"


def test_the_data_page_has_every_name():
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    for name in (*sources.names(), *models.MODELS):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_what_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target
